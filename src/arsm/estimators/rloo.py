"""RLOO: REINFORCE with the other samples as its baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from arsm.categorical import score
from arsm.evaluate import share
from arsm.noise import argmin_sample, dirichlet, repeat_draws
from arsm.types import Queries


@dataclass(frozen=True)
class RLOO:
    """Leave-one-out REINFORCE over n independent samples, with an optional ridge regression as its baseline.

        g = 1/n sum_i (f_i - mean_{m != i} f_m) x_i,    x_i = onehot(z_i) - softmax(phi)

    With `ridge = eta` the baseline of sample i is what a ridge regression of f on x, fitted without sample i, predicts
    at x_i; the average prediction's exact gradient is added back, so that the estimate stays unbiased:

        A = X X' + eta tr(G) I,   P = A^-1 - A^-1 1 1' A^-1 / (1' A^-1 1),   e_i = (P f)_i / P_ii
        g = 1/n sum_i e_i x_i + G X' (P f - P e / n),    G = blockdiag_k(diag(p_k) - p_k p_k')

    eta -> infinity gives plain leave-one-out back; 1 works well from about 10 samples on. Reference for the first
    form: Kool, van Hoof and Welling, Buy 4 REINFORCE samples, get a baseline for free, 2019.
    """

    samples: int = 4
    ridge: float | None = None
    live: int | None = None
    """How many of the samples carry f's own graph (all, if None): f's parameters get their average."""

    unbiased: ClassVar[bool] = True
    needs_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.samples < 2:
            raise ValueError(
                f"RLOO compares samples with each other and needs at least 2, but samples = {self.samples}."
            )
        if self.live is not None and not 1 <= self.live <= self.samples:
            raise ValueError(f"live must lie between 1 and samples = {self.samples}, but is {self.live}.")
        if self.ridge is not None and not self.ridge > 0:
            raise ValueError(f"ridge must be positive, but is {self.ridge}.")

    def noise(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """ln pi [*B, n, K, C]."""
        return dirichlet(logits, generator, self.samples)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        z = argmin_sample(repeat_draws(logits, self.samples), noise)
        points = z.movedim(-2, 0)
        live = self.live or self.samples
        return Queries(points, z, share(points), torch.full((live,), 1 / live, device=z.device))

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        n = self.samples
        f = values.movedim(0, -1)  # [*B, n]
        x = score(repeat_draws(logits, n), queries.z)  # [*B, n, K, C]
        f, x = f.to(torch.promote_types(f.dtype, x.dtype)), x.to(torch.promote_types(f.dtype, x.dtype))
        f = f - f.mean(-1, keepdim=True)
        if self.ridge is None:
            return torch.einsum("...n,...nkc->...kc", f / (n - 1), x)

        p = logits.detach().to(f.dtype).softmax(-1)
        flat = x.flatten(-2)
        trace = (p - p.square()).sum((-2, -1))[..., None, None]
        a = flat @ flat.mT + self.ridge * trace.clamp_min(torch.finfo(f.dtype).tiny) * torch.eye(
            n, device=f.device, dtype=f.dtype
        )
        inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(a).L)
        ones = inverse.sum(-1, keepdim=True)
        projection = inverse - ones @ ones.mT / ones.sum(-2, keepdim=True)
        fitted = (projection @ f.unsqueeze(-1)).squeeze(-1)
        residual = fitted / projection.diagonal(dim1=-2, dim2=-1)
        sampled = torch.einsum("...n,...nkc->...kc", residual / n, x)
        coefficient = fitted - (projection @ residual.unsqueeze(-1)).squeeze(-1) / n
        h = torch.einsum("...n,...nkc->...kc", coefficient, x)
        return sampled + p * (h - (p * h).sum(-1, keepdim=True))  # G h
