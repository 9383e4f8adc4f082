"""RLOO: REINFORCE with the other samples as its baseline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from arsm.categorical import one_hot
from arsm.estimators.independent_samples import IndependentSamples
from arsm.scores import centred, leave_one_out, less_mean, sum_by_category
from arsm.types import Queries


@dataclass(frozen=True, eq=False)
class RLOO(IndependentSamples):
    """Leave-one-out REINFORCE over n independent samples, with an optional ridge
    regression as its baseline.

        g = 1/n sum_i (f_i - mean_{m != i} f_m) x_i,    x_i = onehot(z_i) - softmax(phi)

    With `ridge = eta` the baseline of sample i is what a ridge regression of f on x,
    fitted without sample i, predicts at x_i; the average prediction's exact gradient is
    added back, which keeps the estimate unbiased:

        A = X X' + eta tr(G) I,   P = A^-1 - A^-1 1 1' A^-1 / (1' A^-1 1),   e_i = (P f)_i / P_ii
        g = 1/n sum_i e_i x_i + G X' (P f - P e / n),    G = blockdiag_k(diag(p_k) - p_k p_k')

    eta -> infinity gives plain leave-one-out back; 1 works well from about 10 samples
    on. With a `surrogate` h, f is first replaced by f - beta h.x, and the gradient of
    that term's expectation, beta G h, is added. Row b of the batch takes the
    coefficient of the other rows, which does not depend on its own samples:

        beta_b = sum_{b' != b} cov_i(f_b'i, h_b'.x_b'i) / sum_{b' != b} var_i(h_b'.x_b'i)

    Reference for the first form: Kool, van Hoof and Welling, Buy 4 REINFORCE samples,
    get a baseline for free, 2019.

    Attributes:
        samples: n, the number of samples.
        live: Number of samples that keep f's graph (None: all); f's parameters get
            their average gradient.
        ridge: eta, the strength of the ridge regression; None for plain leave-one-out.
        surrogate: h: the logits, which suit an ELBO, or any [*B, K, C] that does not
            depend on the samples. It needs a batch of at least two rows, because each
            row takes its coefficient from the others.
    """

    ridge: float | None = None
    surrogate: Literal["logits"] | Tensor | None = None

    unbiased = True
    centred = True

    @property
    def couples_rows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """With a surrogate, each row takes its coefficient from the others."""
        return self.surrogate is not None

    @property
    def paths(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Ridge and surrogate need the samples' common logits."""
        return self.samples if self.ridge is None and self.surrogate is None else 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ridge is not None and not 0 < self.ridge < math.inf:
            raise ValueError(f"ridge must be positive and finite, but is {self.ridge}.")
        if isinstance(self.surrogate, str) and self.surrogate != "logits":
            raise ValueError(
                f'surrogate must be "logits" or a tensor [*B, K, C], but is {self.surrogate!r}.'
            )

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        dtype = torch.promote_types(values.dtype, logits.dtype)
        z = queries.points
        if self.ridge is None and self.surrogate is None:
            return leave_one_out(z, values, logits.shape[-1], dtype)

        # subtract the surrogate from f, and remember the gradient of its expectation
        f = less_mean(values).to(dtype)  # [n, *B]
        p = logits.detach().to(dtype).softmax(-1)
        known = 0.0
        if self.surrogate is not None:
            h = centred(p, self._surrogate(logits).to(dtype))
            hx = h.expand(*z.shape, -1).gather(-1, z.unsqueeze(-1)).sum((-2, -1))
            beta = other_rows_slope(f, hx)
            f = f - beta * (hx - hx.mean(0))
            known = beta[..., None, None] * p * h

        # leave-one-out, or ridge regression, of what remains
        if self.ridge is None:
            return known + sum_by_category(z, f / (self.samples - 1), logits.shape[-1])
        return known + self._ridge(p, z, f, self.ridge)

    def weights(self, values: Tensor, energy: Tensor | None = None) -> Tensor:
        """(f_i - mean_{m != i} f_m) / n."""
        return less_mean(values) / (self.samples - 1)

    def _surrogate(self, logits: Tensor) -> Tensor:
        h = self.surrogate if isinstance(self.surrogate, Tensor) else logits
        if h.ndim != logits.ndim:
            raise ValueError(
                f"surrogate must be shaped like the logits {list(logits.shape)}, but is "
                f"{list(h.shape)}; inside Average they are [*B, n, K, C], so unsqueeze(-3) it."
            )
        # a masked category has p = 0, and 0 times -inf would be NaN
        return h.detach().expand(logits.shape).masked_fill(logits == -torch.inf, 0)

    def _ridge(self, p: Tensor, z: Tensor, f: Tensor, eta: float) -> Tensor:
        n = self.samples
        # [*B, n, K C]
        x = (one_hot(z.movedim(0, -2), p.shape[-1], p.dtype) - p.unsqueeze(-3)).flatten(-2)
        trace = (p - p.square()).sum((-2, -1))[..., None, None]
        # Any ridge that does not depend on the samples is unbiased; a smaller one would drown in
        # the rounding of X X'.
        ridge = (eta * trace).clamp_min(torch.finfo(f.dtype).eps ** 0.5)
        eye = torch.eye(n, device=f.device, dtype=f.dtype)
        # A / ridge, which a large ridge leaves finite; cholesky_inverse cannot be captured in a
        # CUDA graph
        root = torch.linalg.solve_triangular(
            torch.linalg.cholesky_ex(x @ x.mT / ridge + eye).L, eye, upper=False
        )
        # P, which also takes an intercept out of f
        inverse = root.mT @ root
        ones = inverse.sum(-1, keepdim=True)
        projection = inverse - ones @ ones.mT / ones.sum(-2, keepdim=True)
        # the residuals e of the fits without each sample, from one fit of all
        fitted = projection @ f.movedim(0, -1).unsqueeze(-1)  # [*B, n, 1]
        residual = fitted / projection.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        coefficient = (fitted - projection @ residual / n) / ridge
        sampled = (x.mT @ (residual / n)).view(p.shape)
        h = (x.mT @ coefficient).view(p.shape)
        return sampled + p * centred(p, h)  # G h


def other_rows_slope(f: Tensor, hx: Tensor) -> Tensor:
    """beta [*B], each row's from all the others: f, centred, and h.x [n, *B]."""
    if f.shape[1:].numel() < 2:
        raise ValueError(
            "A surrogate's coefficient is fitted to the other rows of the batch and needs at "
            f"least two rows, but the batch has the shape {list(f.shape[1:])}; leave surrogate out."
        )
    hx = (hx - hx.mean(0)).double()
    covariance = (f * hx).sum(0)
    variance = hx.square().sum(0)
    # where all other rows are constant in h, the coefficient is 0 instead of 0 / 0
    rest = variance.sum() - variance
    least = torch.finfo(torch.float64).eps * variance.sum() + torch.finfo(torch.float64).tiny
    return ((covariance.sum() - covariance) / rest.clamp_min(least)).to(f.dtype)
