"""Results and estimators in one line, for a prompt or a notebook."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

FEW = 3
"""Numbers of a tensor that are shown; of a longer one, only its type and shape."""


def brief(x: object) -> str:
    """A tensor by its type and shape, a module by its class, the rest as Python writes it."""
    if isinstance(x, Tensor):
        if x.numel() <= FEW:
            return repr(x.detach())
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    if isinstance(x, nn.Module):
        return f"{type(x).__name__}(...)"
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{key}: {brief(value)}" for key, value in x.items()) + "}"
    return repr(x)


def of_parts(x: object, **parts: object) -> str:
    """The parts of a result that are not None: `Estimate(value=..., z=...)`."""
    named = [f"{name}={brief(part)}" for name, part in parts.items() if part is not None]
    return f"{type(x).__name__}({', '.join(named)})"


def of_options(x: Any) -> str:
    """A dataclass by the options that differ from their defaults: `RLOO(4, ridge=1.0)`.

    `samples`, the size of an estimator, is always shown.
    """
    words = []
    bare = True  # so far, every option is in the place that it has in a call
    for each in dataclasses.fields(x):
        if not (each.init and each.repr):
            continue
        value = getattr(x, each.name)
        always = each.name == "samples" or each.default is dataclasses.MISSING
        if not always and _same(value, each.default):
            # one that is left out leaves a gap: all that follow need their names
            bare = bare and each.kw_only
            continue
        required = each.name == "samples" or each.default_factory is dataclasses.MISSING
        in_place = bare and always and required and not each.kw_only
        words.append(brief(value) if in_place else f"{each.name}={brief(value)}")
        bare = in_place or (bare and each.kw_only)
    return f"{type(x).__name__}({', '.join(words)})"


def _same(value: object, default: object) -> bool:
    """Whether an option has its default; a tensor is never one."""
    return value is default or (not isinstance(value, Tensor) and bool(value == default))
