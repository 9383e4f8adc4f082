"""Refusing batch normalisation in training mode, which mixes the rows that must be
evaluated one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle


def refuse_batch_norm(model: nn.Module, by: str) -> None:
    """Refuse a model that has it."""
    for module in _training([model]):
        raise _error(module, [model], by)


def watch_batch_norm(f: Callable[..., Any], by: str) -> list[RemovableHandle]:
    """Make f fail when it runs one, until the handles are removed.

    Only then is it known to be inside f: a bound method's model may also hold the
    encoder that computed the logits. Modules that f names are found, as are its own and
    those that a method or a partial function binds.
    """
    models = _modules_of(f)
    return [_watch(module, models, by) for module in _training(models)]


def _watch(module: nn.Module, models: list[nn.Module], by: str) -> RemovableHandle:
    def refuse(*_: object) -> None:
        raise _error(module, models, by)

    return module.register_forward_pre_hook(refuse)


def _error(module: nn.Module, models: list[nn.Module], by: str) -> ValueError:
    name = next(_names_of(module, models)) or type(module).__name__
    return ValueError(
        f"{name} normalises over the batch in training mode, which "
        f"mixes the repeated rows that {by} evaluates; use LayerNorm or GroupNorm, or put it into "
        "evaluation mode."
    )


def _names_of(module: nn.Module, models: list[nn.Module]) -> Iterator[str]:
    """The names under which the models hold a module; "" for a model itself."""
    for model in models:
        for name, each in model.named_modules():
            if each is module:
                yield name


def _training(models: list[nn.Module]) -> list[nn.Module]:
    """All batch normalisation in training mode; `modules()` would take several times as long."""
    found = []
    pending: list[nn.Module | None] = [*models]
    for module in pending:  # which grows
        if module is not None:
            pending += module._modules.values()
            if isinstance(module, _BatchNorm) and module.training:
                found.append(module)
    return found


def _modules_of(f: Any) -> list[nn.Module]:
    """The modules that are found without calling f."""
    # partial functions wrap methods, methods wrap functions, and functions name globals and cells
    held = [f]
    while isinstance(f, partial):
        held += [*f.args, *f.keywords.values()]
        f = f.func
        held.append(f)
    if isinstance(f, MethodType):
        held.append(f.__self__)
        f = f.__func__
    if isinstance(f, FunctionType):
        for name in f.__code__.co_names:
            held.append(f.__globals__.get(name))
        for cell in f.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # a variable that has no value yet
                continue
    return [each for each in held if isinstance(each, nn.Module)]
