"""Checks of arguments, made before any work; each error is one sentence."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable
from functools import partial
from numbers import Integral
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SAME_SUM = 1e-4
"""The largest distance from 1 of what still counts as a sum of probabilities."""
LARGEST_SEED = 2**63 - 1
LEAST_LOG_PROBABILITY = math.log(torch.finfo(torch.float64).tiny)


class NotFiniteError(ValueError):
    """Logits or a value of f that are NaN or infinite."""


def describe(x: object) -> str:
    """A tensor by its type and shape, anything else by the name of its type."""
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def is_whole(count: object) -> bool:
    """Whether it is an integer, also NumPy's, and not a bool."""
    return isinstance(count, Integral) and not isinstance(count, bool)


def check_whole(name: str, count: object) -> None:
    """Require an integer."""
    if not is_whole(count):
        raise ValueError(f"{name} must be a whole number, but is {count!r}.")


def check_count(name: str, count: int, least: int = 1) -> None:
    """Require an integer of at least this."""
    check_whole(name, count)
    if count < least:
        raise ValueError(f"{name} must be at least {least}, but is {count}.")


def check_seed(seed: int) -> None:
    """Require a seed that generators take."""
    if not is_whole(seed) or not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1, but is {seed!r}.")


def check_samples(name: str, samples: int, live: int | None = None) -> None:
    """Require at least two samples, and at most that many live ones."""
    check_whole("samples", samples)
    if samples < 2:
        raise ValueError(
            f"{name} compares samples with each other and needs at least 2, but samples = "
            f"{samples}."
        )
    if live is not None and not 1 <= live <= samples:
        raise ValueError(f"live must lie between 1 and samples = {samples}, but is {live}.")


def check_temperature(temperature: float) -> None:
    """Require a positive, finite temperature."""
    check_positive("temperature", temperature)


def check_positive(name: str, number: float) -> None:
    """Require a positive, finite number."""
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, but is {number}.")


def check_decay(decay: float) -> None:
    """Require the weight of the past in a running average."""
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be at least 0 and below 1, but is {decay}.")


def check_one_variable(estimator: object, logits: Tensor) -> None:
    """Require logits of one variable."""
    if logits.shape[-2] != 1:
        raise ValueError(
            f"{type(estimator).__name__} is for one variable, logits [C] or [*B, 1, C], but they "
            f"are {list(logits.shape)}; use RLOO or ARSM, or enumerate the {logits.shape[-2]} "
            "variables jointly as one."
        )


def check_logits(logits: Tensor, *, read: bool) -> bool:
    """Require valid logits [C] or [*B, K, C]; with `read`, check the values too, which
    synchronises with the device.

    Returns whether a category may be masked: False only if the values were read.
    """
    if (
        not isinstance(logits, Tensor)
        or logits.dtype not in DTYPES
        or logits.layout != torch.strided
    ):
        found, mend = _other_logits(logits)
        raise TypeError(f"logits must be a floating tensor [*B, K, C], but are {found}; {mend}.")
    if logits.is_meta:
        raise ValueError(
            "logits lie on the meta device and have no values; compute them on a device that has "
            "some."
        )
    if logits.ndim == 0 or 0 in logits.shape:
        raise ValueError(
            "logits must be [C] or [*B, K, C] with no dimension empty, but are "
            f"{list(logits.shape)}."
        )
    if not read:
        return True
    logits = logits.detach()
    # one kernel answers for most logits: their sum is finite only if all of them are
    total = float(logits.sum())
    if math.isfinite(total):
        # probabilities have the sum 1 in each of the rows; hardly any logits do
        if abs(total * logits.shape[-1] / logits.numel() - 1) < SAME_SUM:
            _warn_of_probabilities(logits)
        return False
    # something is masked or illegal, or the sum overflowed
    _check_rows(logits)
    return not bool(logits.isfinite().all())


def _warn_of_probabilities(logits: Tensor) -> None:
    """Warn if every row of logits [..., C] is non-negative and has the sum 1."""
    if logits.shape[-1] == 1 or bool((logits < 0).any()):
        return
    if bool(((logits.sum(-1, dtype=torch.float64) - 1).abs() > SAME_SUM).any()):
        return
    warnings.warn(
        f"logits {list(logits.shape)} look like probabilities: every row is non-negative and has "
        "the sum 1; if they are, give probabilities.log() instead.",
        stacklevel=_outside(),
    )


def _outside() -> int:
    """The `stacklevel` at which a warning names the user's line, not one of the library."""
    level = 1
    frame = sys._getframe(1)
    inner = ("arsm", "torch")  # torch's decorators lie between
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in inner:
        level += 1
        frame = frame.f_back
    return level


def _other_logits(logits: object) -> tuple[str, str]:
    """Describe what was given instead of logits, and say what to do about it."""
    if callable(logits) and not isinstance(logits, Tensor):
        return "a function", "the logits come before f"
    if not isinstance(logits, Tensor):
        return type(logits).__name__, "convert them with torch.tensor"
    if logits.layout != torch.strided:
        return str(logits.layout), "convert them with .to_dense()"
    mend = ".real" if logits.is_complex() else ".float()"
    return str(logits.dtype), f"convert them with {mend}"


def warn_of_single_category(logits: Tensor, by: str) -> None:
    """Warn if there is nothing to choose, though several variables are to be learned:
    logits [*B, K, 1].
    """
    if (
        logits.ndim < 2
        or logits.shape[-2] == 1
        or not logits.requires_grad
        or torch.compiler.is_compiling()
    ):
        return
    warnings.warn(
        f"logits {list(logits.shape)} have one category per variable, so that nothing is chosen "
        f"and their gradient is 0; the categories are the last dimension, so give {by} logits.mT.",
        stacklevel=_outside(),
    )


def _check_rows(logits: Tensor) -> None:
    """Raise an error that names the first invalid row."""
    if bool((legal := legal_rows(logits)).all()):
        return
    # the first of them is enough to find the mistake
    where = (~legal).nonzero()[0].tolist()
    row = logits[tuple(where)]
    if bool((row == -torch.inf).all()):
        raise ValueError(
            f"logits{where or ''} are -inf in every category; leave at least one finite."
        )
    category = int((~(row < torch.inf)).nonzero()[0])
    raise NotFiniteError(
        f"logits{[*where, category]} is {float(row[category])}; logits must be finite, or -inf to "
        "mask a category."
    )


def legal_rows(logits: Tensor) -> Tensor:
    """[*B, K]: whether no logit is NaN or +inf and at least one is finite."""
    # one kernel: the maximum is NaN if one is, +inf if one is, and -inf if all are
    return logits.amax(-1).isfinite()


def check_function(f: Callable[..., Any], context: int, by: str, own: str = "z") -> None:
    """Require a function of z and this many context tensors.

    Args:
        by: the call that f was given to, as its users write it.
        own: the arguments before the context.
    """
    if not callable(f):
        found = f"a tensor {describe(f)}" if isinstance(f, Tensor) else describe(f)
        raise TypeError(
            f"f must be a function of z, such as lambda z: values[z[:, 0]], but is {found}."
        )
    # a compiler does not trace how f looks as a Python object
    if torch.compiler.is_compiling() or _takes(f, len(own.split(", ")) + context):
        return
    tensors = "1 context tensor" if context == 1 else f"{context} context tensors"
    raise TypeError(
        f"f{inspect.signature(f)} cannot be called with {own} and {tensors}; it must take {own}, "
        f"and one argument for each tensor that follows f in {by}."
    )


def _takes(f: Any, given: int) -> bool:
    """Whether f may be called with so many arguments; True for objects of which that is
    not cheap to know.

    `inspect.signature(f).bind` would take a tenth of the time of a small estimate.
    """
    if isinstance(f, partial):
        # keywords may fill any of the places
        return bool(f.keywords) or _takes(f.func, given + len(f.args))
    if isinstance(f, nn.Module):
        f = f.forward
    if isinstance(f, MethodType):
        # self is one more
        return _takes(f.__func__, given + 1)
    if not isinstance(f, FunctionType):
        return True
    code = f.__code__
    least = code.co_argcount - len(f.__defaults__ or ())
    most = math.inf if code.co_flags & inspect.CO_VARARGS else code.co_argcount
    only_by_name = code.co_kwonlyargcount > len(f.__kwdefaults__ or ())
    return least <= given <= most and not only_by_name


def check_generator(generator: object, logits: Tensor) -> None:
    """Require a torch.Generator on the logits' device."""
    if not isinstance(generator, torch.Generator):
        seed = generator if is_whole(generator) else 0
        raise TypeError(
            f"generator must be a torch.Generator, but is {generator!r}; "
            f"torch.Generator(logits.device).manual_seed({seed}) makes one."
        )
    if generator.device.type != logits.device.type:
        raise ValueError(
            f"generator draws on {generator.device}, but the logits lie on {logits.device}; make "
            "it with torch.Generator(logits.device)."
        )


def check_context(
    context: tuple[object, ...], batch: torch.Size, device: torch.device | None = None
) -> None:
    """Require tensors [*B, ...], on this device if one is given."""
    for position, x in enumerate(context):
        if device is not None and isinstance(x, Tensor) and x.device != device:
            raise ValueError(
                f"Context {position} lies on {x.device}, but the logits on {device}; move it with "
                ".to(logits.device)."
            )
        if not isinstance(x, Tensor) or x.shape[: len(batch)] != batch:
            raise ValueError(
                f"Context {position} must be a tensor that leads with the batch's shape "
                f"{list(batch)}, but is {describe(x)}."
            )


def check_same_rows(context: tuple[object, ...]) -> None:
    """Require tensors [N, ...] with the same N."""
    if not context:
        return
    first = context[0]
    if not isinstance(first, Tensor) or first.ndim == 0:
        raise ValueError(
            "Context 0 must be a tensor [N, ...], one row for each value, but is "
            f"{describe(first)}."
        )
    check_context(context, first.shape[:1])


def check_given(logits: Tensor, z: Tensor) -> None:
    """Require a sample z [*B, K] that these logits [*B, K, C] can draw."""
    if not isinstance(z, Tensor) or z.dtype != torch.int64 or z.shape != logits.shape[:-1]:
        raise ValueError(
            f"The sample z must be int64 {list(logits.shape[:-1])} for these logits, but is "
            f"{describe(z)}."
        )
    categories = logits.shape[-1]
    outside = (z < 0) | (z >= categories)
    if bool(outside.any()):
        where = outside.nonzero()[0].tolist()
        raise ValueError(
            f"z{where} is {int(z[tuple(where)])}, but the categories are 0 to {categories - 1}."
        )
    # what underflows in float64 was not drawn from these logits
    logits = logits.detach()
    own = logits.gather(-1, z.unsqueeze(-1)).squeeze(-1)
    below = own.double() - logits.amax(-1).double()
    if bool((impossible := below < LEAST_LOG_PROBABILITY).any()):
        where = impossible.nonzero()[0].tolist()
        raise ValueError(
            f"z{where} is {int(z[tuple(where)])}, which has probability 0 under these logits; give "
            "the logits that it was drawn from."
        )
