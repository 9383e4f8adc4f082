"""Double control variates: leave-one-out REINFORCE of what the other samples' slopes do not explain."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from arsm.categorical import one_hot
from arsm.checks import check_samples
from arsm.evaluate import share
from arsm.relaxations import slopes_at_queries
from arsm.samples import Draws, draw, mean_weight, samples
from arsm.scores import centred, less_mean, probabilities, weighted_scores
from arsm.types import Estimator, Queries, at_most_all


class Slope(nn.Module):
    """How far to follow the slopes: one number."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(float(alpha)))


@dataclass(frozen=True, eq=False)
class DoubleControl(Estimator):
    """Leave-one-out REINFORCE of f less its linear part, as the slopes at the other samples have it.

        b_i = mean_{j != i} h_j.(z_i - p)
        g = 1/n sum_i (f_i - alpha b_i - mean_{j != i} [f_j - alpha b_j]) (z_i - p) + alpha G 1/n sum_j h_j

    with one-hot z_i ~ Cat(p), h_j = df/dz at z_j, and G = blockdiag_k(diag(p_k) - p_k p_k'). b_i acts twice: on f_i it
    is a control variate, the gradient of whose expectation, alpha G h_j, is added back; on the baselines of the others
    it takes noise off them, though it contains their slopes, as z_i - p has mean 0. alpha = 0 is RLOO, and 1 leaves
    no variance where f is linear. Unbiased for all alpha, which is learned: `estimate` returns the squared norm of g
    as `estimator_loss`. Reference: Titsias and Shi, Double control variates for gradient estimation in discrete latent
    variable models, AISTATS 2022.
    """

    samples: int = 4
    alpha: float = 0.5
    """To begin with."""
    control: Slope = field(init=False, repr=False)
    """Holds alpha as it is learned; to keep it fixed, say `control.requires_grad_(False)`."""

    learned: nn.ModuleList = field(init=False, repr=False)

    unbiased = True
    needs_gradient = True
    vmappable = False  # tell calls torch.autograd.grad

    def __post_init__(self) -> None:
        check_samples("DoubleControl", self.samples)
        object.__setattr__(self, "control", Slope(self.alpha))
        object.__setattr__(self, "learned", nn.ModuleList([self.control]))

    def noise(self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None) -> Draws:
        return draw(logits, self.samples, generator, z)

    def ask(self, logits: Tensor, noise: Draws) -> Queries:
        z = samples(logits, noise)
        # attached to the logits at no slope: what is compiled cannot begin a graph of its own
        no_slope = 0 * logits.masked_fill(logits == -torch.inf, 0)
        points = one_hot(z.movedim(-2, 0), logits.shape[-1], logits.dtype) + no_slope
        if not points.requires_grad:
            points.requires_grad_()
        return Queries(points, z, share(z.movedim(-2, 0)), mean_weight(self.samples, z.device))

    def most_queries(self, logits: Tensor) -> int:
        return at_most_all(self.samples, logits)

    def within(self, budget: int) -> DoubleControl:
        resized = replace(self, samples=max(2, budget))
        object.__setattr__(resized, "control", self.control)
        object.__setattr__(resized, "learned", self.learned)
        return resized

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        n = self.samples
        p = probabilities(logits)
        h = mean_of_equals(slopes_at_queries(queries, values).to(p.dtype), queries.same_as)
        total = h.sum(0)
        b = ((total - h) * (queries.points.detach() - p)).sum((-2, -1)) / (n - 1)
        alpha = self.control.alpha
        weight = (less_mean(values.detach()) - alpha * less_mean(b)) / (n - 1)
        sampled = weighted_scores(p, queries.z.movedim(-2, 0), weight.to(p.dtype))
        return sampled + alpha * p * centred(p, total / n)


def mean_of_equals(slopes: Tensor, same_as: Tensor) -> Tensor:
    """Each query's slope, where the sum over equal queries may lie at the one that was evaluated: [n, *B, K, C]."""
    where = same_as[..., None, None].expand_as(slopes)
    total = torch.zeros_like(slopes).scatter_add(0, where, slopes)
    count = torch.zeros_like(same_as).scatter_add(0, same_as, torch.ones_like(same_as))
    return (total / count.clamp_min(1)[..., None, None]).gather(0, where)
