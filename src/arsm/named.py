"""Objects named in words, for commands: `module:name`, or `path.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load(words: str) -> Any:
    """The object that `module:name` or `path.py:name` stands for.

    A module is looked for where Python looks, and in the folder of the command.
    """
    place, _, name = words.rpartition(":")
    if not place or not name:
        raise ValueError(f'"{words}" must be module:function or path.py:function, or a class.')
    found: Any = _file(Path(place)) if place.endswith(".py") else _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{place} has no {name}.")
        found = getattr(found, part)
    return found


def _module(name: str) -> ModuleType:
    # a console script, unlike `python -m`, does not look in the folder that it is started in
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"There is no module {name} here: {error}.") from error
    except Exception as error:
        raise _broken(name, error) from error


def _file(path: Path) -> ModuleType:
    """The module in a file, made once: dataclasses look their module up by its name."""
    path = path.resolve()
    if not path.exists():
        raise ValueError(f"There is no file {path.name} in {path.parent}.")
    # a copy of the list: some modules import others when they are looked at
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_of_{path.parent.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        # half a module must not be found by the next import
        del sys.modules[name]
        if isinstance(error, Exception):
            raise _broken(path.name, error) from error
        raise
    return module


def _broken(place: str, error: Exception) -> ValueError:
    """The sentence for a user's own file with an error in it."""
    why = f"{type(error).__name__}: {error}"
    return ValueError(f"{place} cannot be imported: {why}; mend it first.")
