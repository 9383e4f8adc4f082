"""A shape such as [*B, K, C] is set as code; Markdown would take its stars for emphasis."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.util import AtomicString
from mkdocs.config.defaults import MkDocsConfig

SHAPE = r"\[(?:[A-Z0-9*][^\[\]\n`]*)?\](?![\[(])"
AFTER_BACKTICKS = 185  # and before links and emphasis


class Shapes(Extension):
    """Inline code for shapes."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.inlinePatterns.register(_Shape(SHAPE, md), "shape", AFTER_BACKTICKS)


class _Shape(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element, int, int]:
        code = Element("code")
        code.text = AtomicString(m[0])
        return code, m.start(), m.end()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the extension to pages and docstrings."""
    config.markdown_extensions.append(Shapes())  # pyright: ignore[reportArgumentType]
    return config
