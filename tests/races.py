"""Hypothesis strategies: logits and noise of all the kinds that a race can meet, and a rounding
bound.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor


class Drawn(NamedTuple):
    """A race before it is run."""

    logits: Tensor
    """[*B, K, C]."""
    log_pi: Tensor
    """[*B, K, C]; on a coarse grid it is no Dirichlet sample, which neither the race nor the sums
    ask for.
    """

    @property
    def total_weight(self) -> float:
        """max_k sum_j |1/C - pi_kj|."""
        return float((1 / self.logits.shape[-1] - self.log_pi.double().exp()).abs().sum(-1).max())


LOGITS = ("normal", "grid", "equal", "extreme", "masked", "dominated")
NOISE = ("dirichlet", "grid")


def _logits(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    chosen = torch.rand(shape, generator=generator).argsort(-1)  # 0 for one category per variable
    match kind:
        case "normal":
            return 2 * normal
        case "grid":
            return (4 * normal).round() / 4
        case "equal":
            return torch.zeros_like(normal)
        case "extreme":
            return 1e4 * normal.sign()
        case "masked":
            return normal.masked_fill((chosen > 0) & (normal > 0), -torch.inf)
        case _:
            return normal + 30 * (chosen == 0)


def _noise(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if kind == "grid":
        return -torch.randint(1, 16, shape, generator=generator).double() / 4
    exponential = torch.empty(shape, dtype=torch.float64).exponential_(generator=generator)
    return (exponential / exponential.sum(-1, keepdim=True)).log()


@st.composite
def races(draw: st.DrawFn, max_variables: int = 6, max_categories: int = 40) -> Drawn:
    """C = 2..40, K = 1..6, with ties, masks, extremes, in float32 and float64."""
    batch = draw(st.sampled_from([(), (3,), (2, 2)]))
    shape = (*batch, draw(st.integers(1, max_variables)), draw(st.integers(2, max_categories)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    logits = _logits(draw(st.sampled_from(LOGITS)), shape, generator)
    return Drawn(logits.to(dtype), _noise(draw(st.sampled_from(NOISE)), shape, generator).to(dtype))


def rounding(terms: int, total_weight: float, largest: float, dtype: torch.dtype) -> float:
    """How far two ways of computing a gradient may differ.

    Either sums `terms` products of f - f(z), at most 2 max|f|, with weights of absolute sum W,
    after one mean over as many values of f: at most 4 terms max|f| W eps for each of the two sums
    of the fast form and for the centring, plus a few eps for f and the weights themselves. 16
    (terms + 4) covers both sides.
    """
    return 16 * (terms + 4) * torch.finfo(dtype).eps * max(total_weight, 1) * largest
