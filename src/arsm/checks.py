"""Checks of arguments, made before any work; each error is one sentence."""

from __future__ import annotations

import math
from numbers import Integral

import torch
from torch import Tensor

from arsm.types import Estimator

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_SEED = 2**63 - 1
LEAST_LOG_PROBABILITY = math.log(torch.finfo(torch.float64).tiny)


class NotFiniteError(ValueError):
    """Logits or a value of f that are NaN or infinite."""


def check_estimator(estimator: object) -> None:
    """Require an estimator, not its name or its class."""
    if isinstance(estimator, Estimator):
        return
    words = repr(estimator) if isinstance(estimator, str) else '"arsm"'
    mend = f"arsm.estimator({words}) makes one from words"
    if not isinstance(estimator, str | type):
        mend = "an estimator of your own must be a subclass of arsm.Estimator, and " + mend
    raise TypeError(f"estimator must be an estimator such as arsm.ARSM(), but is {estimator!r}; {mend}.")


def describe(x: object) -> str:
    """What was given instead: a tensor's type and shape, or the name of another type."""
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
        raise ValueError(f"{name} compares samples with each other and needs at least 2, but samples = {samples}.")
    if live is not None and not 1 <= live <= samples:
        raise ValueError(f"live must lie between 1 and samples = {samples}, but is {live}.")


def check_temperature(temperature: float) -> None:
    """Require a positive, finite temperature."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, but is {temperature}.")


def check_one_variable(estimator: object, logits: Tensor) -> None:
    """Require logits of one variable."""
    if logits.shape[-2] != 1:
        raise ValueError(
            f"{type(estimator).__name__} is for one variable, logits [C] or [*B, 1, C], but they are "
            f"{list(logits.shape)}; use RLOO or ARSM, or enumerate the {logits.shape[-2]} variables jointly as one."
        )


def check_logits(logits: Tensor, *, read: bool) -> bool:
    """Require valid logits [C] or [*B, K, C]; with `read`, check the values too, which synchronises with the device.

    Returns whether a category may be masked: False only if the values were read.
    """
    if not isinstance(logits, Tensor) or logits.dtype not in DTYPES:
        found, mend = (
            (logits.dtype, ".float()") if isinstance(logits, Tensor) else (type(logits).__name__, "torch.tensor")
        )
        raise TypeError(f"logits must be a floating tensor [*B, K, C], but are {found}; convert them with {mend}.")
    if logits.ndim == 0 or 0 in logits.shape:
        raise ValueError(f"logits must be [C] or [*B, K, C] with no dimension empty, but are {list(logits.shape)}.")
    if not read:
        return True
    logits = logits.detach()
    if math.isfinite(logits.sum()):  # one kernel; if the sum overflows, check again
        return False
    _check_rows(logits)
    return not bool(logits.isfinite().all())


def _check_rows(logits: Tensor) -> None:
    """Raise an error that names the first invalid row."""
    if bool((legal := legal_rows(logits)).all()):
        return
    where = (~legal).nonzero()[0].tolist()
    row = logits[tuple(where)]
    if bool((row == -torch.inf).all()):
        raise ValueError(f"logits{where or ''} are -inf in every category; leave at least one finite.")
    category = int((~(row < torch.inf)).nonzero()[0])
    raise NotFiniteError(
        f"logits{[*where, category]} is {float(row[category])}; logits must be finite, or -inf to mask a category."
    )


def legal_rows(logits: Tensor) -> Tensor:
    """[*B, K]: whether no logit is NaN or +inf and at least one is finite."""
    return logits.amax(-1).isfinite()


def check_context(context: tuple[object, ...], batch: torch.Size) -> None:
    """Require tensors [*B, ...]."""
    for position, x in enumerate(context):
        if not isinstance(x, Tensor) or x.shape[: len(batch)] != batch:
            raise ValueError(
                f"Context {position} must be a tensor that leads with the batch's shape {list(batch)}, but is "
                f"{describe(x)}."
            )


def check_same_rows(context: tuple[object, ...]) -> None:
    """Require tensors [N, ...] with the same N."""
    for first in context[:1]:
        if not isinstance(first, Tensor) or first.ndim == 0:
            raise ValueError(f"Context 0 must be a tensor [N, ...], one row for each value, but is {describe(first)}.")
        check_context(context, first.shape[:1])


def check_given(logits: Tensor, z: Tensor) -> None:
    """Require a sample z [*B, K] that these logits [*B, K, C] can draw."""
    if not isinstance(z, Tensor) or z.dtype != torch.int64 or z.shape != logits.shape[:-1]:
        raise ValueError(
            f"The sample z must be int64 {list(logits.shape[:-1])} for these logits, but is {describe(z)}."
        )
    categories = logits.shape[-1]
    outside = (z < 0) | (z >= categories)
    if bool(outside.any()):
        where = outside.nonzero()[0].tolist()
        raise ValueError(f"z{where} is {int(z[tuple(where)])}, but the categories are 0 to {categories - 1}.")
    logits = logits.detach()
    below = logits.gather(-1, z.unsqueeze(-1)).squeeze(-1).double() - logits.amax(-1).double()
    if bool((impossible := below < LEAST_LOG_PROBABILITY).any()):
        where = impossible.nonzero()[0].tolist()
        raise ValueError(
            f"z{where} is {int(z[tuple(where)])}, which has probability 0 under these logits; give the logits that it "
            "was drawn from."
        )


def check_noise(estimator: Estimator, logits: Tensor, noise: object) -> None:
    """Require noise such as `estimator.noise(logits)` draws for these logits [*B, K, C].

    Any other would be broadcast or read as something else, and give a wrong estimate without a word.
    """
    batch = logits.shape[:-2]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        _check_leading(noise, batch)  # nothing can be drawn here to compare it with
        return
    expected, given = _noise_layout(estimator, logits), _layout(noise)
    if given != expected and given != _noise_layout(estimator, logits, given_sample=True):
        raise ValueError(
            f"noise must be {expected} for {type(estimator).__name__} and logits {list(logits.shape)}, but is {given}; "
            "draw it by estimator.noise(logits) for these logits."
        )


def _check_leading(noise: object, batch: torch.Size) -> None:
    """Require tensors [*B, ...]."""
    for x in noise if isinstance(noise, tuple) else (noise,):
        if not isinstance(x, Tensor) or x.shape[: len(batch)] != batch:
            raise ValueError(
                f"noise must lead with the batch's shape {list(batch)}, but is {describe(x)}; draw it by "
                "estimator.noise(logits) for these logits."
            )


def _noise_layout(estimator: Estimator, logits: Tensor, *, given_sample: bool = False) -> str | None:
    """The layout of `estimator.noise(logits)`, or of noise given a sample; None if it takes none."""
    if given_sample and not estimator.given_sample:
        return None
    batch, variables = logits.shape[:-2], estimator.subset or logits.shape[-2]
    # Of no rows on a CPU: draws no random numbers, and takes no time for many categories.
    none = torch.empty(0, *logits.shape[-2:], dtype=logits.dtype)
    z = torch.empty(0, variables, dtype=torch.int64) if given_sample else None
    try:
        return _layout(estimator.noise(none, None, z), batch, 1)
    except Exception:  # an estimator whose noise cannot do without rows
        generator = torch.Generator(logits.device)
        z = torch.arange(variables, device=logits.device) % logits.shape[-1] if given_sample else None
        drawn = estimator.noise(torch.zeros_like(logits), generator, None if z is None else z.expand(*batch, -1))
        return _layout(drawn, batch, len(batch))


def _layout(noise: object, batch: torch.Size | None = None, instead_of: int = 0) -> str:
    """Types and shapes of noise, in words, with a batch shape instead of that many leading dimensions."""
    from arsm.samples import Draws  # which imports this module

    if isinstance(noise, Tensor):
        shape = [*(batch or ()), *noise.shape[instead_of:]]
        # devices differ in the precision of their noise
        kind = "floating" if noise.dtype in (torch.float32, torch.float64) else str(noise.dtype)
        return f"{kind} {shape}"
    if isinstance(noise, Draws) and _is_legal(noise.uniform, noise.given):
        # samples that were given count like those that are still to be drawn
        samples = torch.Size([*noise.given.shape[:-2], noise.uniform.shape[-2] + noise.given.shape[-2]])
        return f"Draws of samples {[*(batch or ()), *samples[instead_of:], noise.given.shape[-1]]}"
    if isinstance(noise, tuple):
        return f"{type(noise).__name__}({', '.join(_layout(x, batch, instead_of) for x in noise)})"
    return type(noise).__name__


def _is_legal(uniform: object, given: object) -> bool:
    """Whether these are uniform numbers [*B, n - g, K] and samples [*B, g, K]."""
    if not isinstance(uniform, Tensor) or not isinstance(given, Tensor):
        return False
    if uniform.dtype != torch.float64 or given.dtype != torch.int64 or uniform.ndim < 2:
        return False
    return uniform.shape[:-2] == given.shape[:-2] and uniform.shape[-1:] == given.shape[-1:]
