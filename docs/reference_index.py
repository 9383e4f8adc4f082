"""Write docs/reference/README.md, the reference that can be read from a clone: `python
docs/reference_index.py`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "README.md"
MODULES = (
    *("arsm", "arsm.extend", "arsm.policy", "arsm.sequences", "arsm.rl"),
    *("arsm.referee", "arsm.testing", "arsm.diagnostics", "arsm.pyro", "arsm.trl"),
    *("arsm.question", "arsm.capabilities"),
)
OPENING = """# Reference

Every public name with the first sentence of its documentation, and the file that holds it.
`help(arsm.estimate)` prints all of it: arguments, shapes, returned fields, equation and reference.
The site that `make docs` builds has it all as pages.
"""


def names(module: str) -> Iterator[tuple[str, object]]:
    """A module's public names that it defines or exports."""
    found = importlib.import_module(module)
    public = getattr(found, "__all__", None) or [
        name for name in vars(found) if not name.startswith("_")
    ]
    for name in sorted(public, key=str.lower):
        value = getattr(found, name)
        home = getattr(value, "__module__", "")
        if (inspect.isclass(value) or inspect.isfunction(value)) and (
            hasattr(found, "__all__") or home == module
        ):
            yield name, value


def line(module: str, name: str, value: object) -> str:
    """One row of the table."""
    words = (
        (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ").replace("|", r"\|")
    )
    home = importlib.import_module(value.__module__).__file__ or ""
    path = Path(home).resolve().relative_to(ROOT).as_posix()
    return f"| `{module}.{name}` | {words} | [{path}](../../{path}) |"


def page() -> str:
    """The whole page."""
    parts = [OPENING]
    for module in MODULES:
        rows = [line(module, name, value) for name, value in names(module)]
        parts.append("\n".join([f"## {module}\n", "| name | | file |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
