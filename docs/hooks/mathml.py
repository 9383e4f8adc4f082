"""Formulas become MathML while the site is built, so that a page needs neither scripts nor a
network.
"""

from __future__ import annotations

import html
import re
from itertools import pairwise
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert_to_element

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
LIMITS = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}
TILDE, SIMILAR = "&#x0007E;", "\u223c"
THIN = "0.167em"


def on_page_content(content: str, **_: object) -> str:
    """Replace each formula that pymdownx.arithmatex found."""
    return FORMULA.sub(
        lambda found: formula(html.unescape(found[2]), display=found[1] == "div"), content
    )


def formula(latex: str, *, display: bool) -> str:
    """LaTeX as MathML; a display formula scrolls by itself where the page is narrow."""
    math = convert_to_element(latex.strip(), display="block" if display else "inline")
    _set_as_tex(math, script=False)
    # the converter writes character references as text
    mathml = ElementTree.tostring(math, encoding="unicode").replace("&amp;#x", "&#x")
    if "\\" in mathml or "&amp;" in mathml:
        raise ValueError(f"latex2mathml does not know all of {latex!r}; write it in other words.")
    return f'<div class="formula">{mathml}</div>' if display else mathml


def _set_as_tex(parent: Element, *, script: bool) -> None:
    """Spaces and limits where TeX has them and the converter or the browser has not."""
    if parent.tag in LIMITS and _character(parent[0]) in "∑∏":
        parent.tag = LIMITS[parent.tag]
    scripts = parent.tag in (*LIMITS, *LIMITS.values())
    for place, child in enumerate(list(parent)):
        _set_as_tex(child, script=script or (scripts and place > 0))
    if parent.tag == "mo" and (_is_word(parent) or _character(parent) == "∞"):
        parent.tag = "mi"
    if parent.tag == "mo" and (script or _character(parent) == "/"):
        parent.set("lspace", "0")
        parent.set("rspace", "0")
    if parent.text == TILDE:
        parent.tag, parent.text = "mo", SIMILAR
    if parent.tag == "mi" and "Α" <= _character(parent) <= "Ω":
        parent.set("mathvariant", "normal")
    if parent.tag in ("mrow", "math", "mtd"):
        _space_functions(parent)


def _space_functions(row: Element) -> None:
    """A thin space between a function's name and what it is not bracketed from."""
    children = list(row)
    for before, after in pairwise(children):
        named, follows = _is_function(before), _is_function(after)
        operand = after.tag != "mo" and not _opens(after)
        if (named and operand) or (follows and before.tag not in ("mo", "mspace")):
            row.insert(list(row).index(after), Element("mspace", width=THIN))


def _is_function(element: Element) -> bool:
    scripted = element.tag in (*LIMITS, *LIMITS.values())
    return _is_word(element[0] if scripted else element)


def _is_word(element: Element) -> bool:
    return element.tag in ("mi", "mo") and bool(re.fullmatch("[A-Za-z]{2,}", element.text or ""))


def _opens(element: Element) -> bool:
    first = next((leaf for leaf in element.iter() if leaf.tag == "mo"), None)
    return element.tag == "mrow" and first is not None and first is element[0]


def _character(element: Element) -> str:
    text = html.unescape(element.text or "")
    return text if len(text) == 1 else "\0"
