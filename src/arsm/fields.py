"""Adds the documentation of a class's fields to `help()`, which Python itself leaves out."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from functools import cache
from pathlib import Path

WIDTH = 116
CLASS_OR_FIELD = re.compile(
    r'''^class (?P<cls>\w+)|^    (?P<field>\w+): .*\n    """(?P<text>(?=\S)(?:[^"]|"(?!""))*)"""''', re.MULTILINE
)
"""A regular expression, because a parser would take ten times as long at every import."""


def document_fields(*names: object) -> None:
    """Add the strings below the fields of dataclasses and named tuples to their docstrings; skip all other names."""
    for cls in names:
        if not isinstance(cls, type) or "\nAttributes:\n" in (cls.__doc__ or ""):
            continue
        words: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            words |= _strings_below(base.__module__).get(base.__qualname__, {})
        fields = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
        known = [name for name in fields or getattr(cls, "_fields", ()) if name in words]
        if known:
            lines = [textwrap.fill(f"{name}: {words[name]}", WIDTH, subsequent_indent="    ") for name in known]
            section = textwrap.indent("\n".join(lines), "    ")
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nAttributes:\n{section}"


@cache
def _strings_below(module: str) -> dict[str, dict[str, str]]:
    """Each field's string in one line, by class; none for a module without source, or of another package."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if not module.startswith("arsm") or path is None or not Path(path).is_file():
        return {}
    found: dict[str, dict[str, str]] = {}
    cls = ""
    for match in CLASS_OR_FIELD.finditer(Path(path).read_text(encoding="utf-8")):
        cls = match["cls"] or cls
        if match["field"]:
            found.setdefault(cls, {})[match["field"]] = " ".join(match["text"].split())
    return found
