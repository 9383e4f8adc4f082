"""Refuse batches, loss functions and models that `arsm.choices` cannot train with, each in one
sentence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from arsm.checks import NotFiniteError, describe
from arsm.noise import working_dtype
from arsm.types import Estimator

ROUNDING = {torch.float64: 2.0**-20, torch.float32: 2.0**-6}
"""The relative difference of logits between two passes that may be rounding, by the
coarsest dtype in use.

Matrix products round differently with another number of rows. One rounding is 2^-53 in
float64, 2^-11 in TF32 (which float32 may mean on a GPU) and 2^-9 in bfloat16; a deep
model adds up some, so the bounds are well above: 2^-6 for float32, as its earlier
layers may have run in bfloat16 unseen. Dropout with probability p changes logits by
about sqrt(2 p), 0.45 for p = 0.1."""
COARSE = 2.0**-4
"""The same for bfloat16 and float16, also by autocast."""
LEAST_SCALE = 2.0**-3
"""Differences are relative to the largest logit, but at least to this: near 0, rounding
may be all that there is.
"""
IMPROBABLE = -30.0
"""A category this far below the most probable one counts as masked, whatever its logit:
masks may be -1e9.
"""


def batch_rows(batch: tuple[Tensor, ...]) -> int:
    """N of a batch of tensors [N, ...]."""
    tensors = all(isinstance(x, Tensor) and x.ndim > 0 for x in batch)
    if not tensors or len({len(x) for x in batch}) != 1:
        found = ", ".join(map(describe, batch)) or "none"
        raise ValueError(
            f"run(function, *batch) takes tensors [N, ...] with the same N, but got {found}."
        )
    if len(batch[0]) == 0:
        raise ValueError(
            "run(function, *batch) takes a batch of at least one row, but got an empty one."
        )
    return len(batch[0])


def check_values(values: Tensor, rows: int, *, positions: bool) -> None:
    """Require finite values of a loss function, [rows], or [rows, T] for its positions."""
    if positions:
        _check_positions(values, rows)
    else:
        _check_rows(values, rows)
    finite = values.detach().isfinite()
    if not bool(finite.all()):
        where = (~finite).nonzero()[0].tolist()
        raise NotFiniteError(
            f"The loss function returned {float(values[tuple(where)])} in row {where[0]}; it "
            "must be finite."
        )


def _check_rows(values: Tensor, rows: int) -> None:
    if isinstance(values, Tensor) and values.is_floating_point() and values.shape == (rows,):
        return
    raise ValueError(
        f"The loss function must return one floating value per row, [{rows}] here, but returned "
        f"{describe(values)}; leave its mean to the caller, as in F.cross_entropy(..., "
        'reduction="none").'
    )


def _check_positions(values: Tensor, rows: int) -> None:
    if (
        isinstance(values, Tensor)
        and values.is_floating_point()
        and values.ndim == 2
        and len(values) == rows
    ):
        return
    raise ValueError(
        f"With a Choice(reach=...) the loss function must return one floating value per position, "
        f"[{rows}, T] here, but returned {describe(values)}; leave sums and means to the caller."
    )


def check_again(
    model: nn.Module,
    estimator: Estimator,
    true: Tensor,
    again: Tensor,
    row: Tensor,
    batch: tuple[Tensor, ...],
) -> None:
    """Require that another pass found the logits of the true path [N, K, C] again, in its
    rows [R].

    z was drawn from the true path's logits, and its alternatives are compared with it: had
    they other logits, as after another dropout mask, the estimate would be biased.
    """
    true = true.detach()
    # the coarsest dtype in use decides how far rounding alone can move the logits
    tensors = (true, *model.parameters(), *batch)
    dtypes = {x.dtype for x in tensors if x.is_floating_point()}
    if torch.is_autocast_enabled(true.device.type):
        dtypes.add(torch.get_autocast_dtype(true.device.type))
    allowed = max(ROUNDING.get(dtype, COARSE) for dtype in dtypes)
    if again.shape[1:] == true.shape[1:] and bool(_distance(true, again, row) <= allowed):
        return
    raise RuntimeError(
        f"{type(estimator).__name__} runs the model again for the values of other choices, and "
        "the logits of a Choice were not the same then; use RLOO(n), which runs the model once, "
        "or call eval() on the dropout or other random layer before the Choice."
    )


def _distance(true: Tensor, again: Tensor, row: Tensor) -> Tensor:
    """[]: the largest difference between logits of the true path [N, K, C] and of other
    rows [R, K, C] of it.

    Relative to the largest logit of the true path, of those that are not masked.
    """
    dtype = torch.promote_types(working_dtype(true.dtype), working_dtype(again.dtype))
    true = true.to(dtype)
    again = again.to(dtype)
    # less the maximum: a constant in all logits of a variable changes no probability
    below = (true - true.amax(-1, keepdim=True)).clamp_min(IMPROBABLE)
    scale = true.abs().masked_fill(below == IMPROBABLE, 0).amax().clamp_min(LEAST_SCALE)
    other = (again - again.amax(-1, keepdim=True)).clamp_min(IMPROBABLE)
    return (other - below.index_select(0, row)).abs().amax() / scale
