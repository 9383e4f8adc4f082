"""Parts of packages whose other parts need a GPU: the judged modules are theirs, unchanged.

Both functions change what an import runs, not what it finds. A stand-in raises as soon as it is
used: a verdict shows that the judged code does not need what is absent.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


class AbsentError(RuntimeError):
    """The judged code has used what is not installed."""


def without_init(package: str) -> None:
    """Import modules of `package` from now on without running its `__init__`, which imports what
    needs a GPU.
    """
    if package in sys.modules:
        return
    parent, _, name = package.rpartition(".")
    found = importlib.util.find_spec(parent)
    assert found is not None
    module = ModuleType(package)
    module.__path__ = [f"{place}/{name}" for place in found.submodule_search_locations or ()]
    sys.modules[package] = module


def absent(module: str, *names: str) -> None:
    """A stand-in for a module that cannot be installed here, with classes of these names."""
    if module in sys.modules:
        return
    made = ModuleType(module)

    def refuse(self: object, *_: object, **__: object) -> None:
        raise AbsentError(f"{module}.{type(self).__name__} is used, but {module} is absent.")

    for name in names:
        setattr(made, name, type(name, (), {"__init__": refuse}))
    sys.modules[module] = made
