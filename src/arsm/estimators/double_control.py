"""Double control variates: leave-one-out REINFORCE with a linear surrogate from the
other samples' slopes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from arsm.estimators.sloped_group import SlopedGroup
from arsm.scores import centred, less_mean, probabilities, weighted_scores
from arsm.types import Queries


class Slope(nn.Module):
    """The weight of the slopes, one learned number."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(float(alpha)))


@dataclass(frozen=True, eq=False)
class DoubleControl(SlopedGroup):
    """Leave-one-out REINFORCE of f minus a linear surrogate, made from the slopes at
    the other samples.

        b_i = mean_{j != i} h_j.(z_i - p)
        g = 1/n sum_i (f_i - alpha b_i - mean_{j != i} [f_j - alpha b_j]) (z_i - p)
            + alpha G 1/n sum_j h_j

    with one-hot z_i ~ Cat(p), h_j = df/dz at z_j, and G = blockdiag_k(diag(p_k) - p_k
    p_k'). b_i acts twice: on f_i it is a control variate, the gradient of whose
    expectation, alpha G h_j, is added back; on the baselines of the others it takes
    noise off them, though it contains their slopes, as z_i - p has mean 0. alpha = 0 is
    RLOO, and 1 leaves no variance where f is linear. Unbiased for all alpha, which is
    learned: `estimate` returns the squared norm of g as `estimator_loss`. Reference:
    Titsias and Shi, Double control variates for gradient estimation in discrete latent
    variable models, AISTATS 2022.

    Attributes:
        samples: n, the number of samples.
        control: Holds alpha as it is learned; to keep it fixed, say
            `control.requires_grad_(False)`.
        learned: The learned parts, for the optimiser, `.to(device)` and checkpoints;
            empty for most estimators.
        alpha: Initial value of the learned coefficient.
    """

    alpha: float = 0.5
    control: Slope = field(init=False, repr=False)

    def new_control(self) -> Slope:
        return Slope(self.alpha)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        n = self.samples
        p = probabilities(logits)
        # b_i, from the slopes of all samples less its own
        h = self.slopes(queries, values, p.dtype)
        total = h.sum(0)
        b = ((total - h) * (queries.points.detach() - p)).sum((-2, -1)) / (n - 1)

        # leave-one-out of f - alpha b, and what alpha b adds in the mean; G h = p centred(h)
        alpha = self.control.alpha
        weight = (less_mean(values.detach()) - alpha * less_mean(b)) / (n - 1)
        sampled = weighted_scores(p, queries.z.movedim(-2, 0), weight.to(p.dtype))
        return sampled + alpha * p * centred(p, total / n)
