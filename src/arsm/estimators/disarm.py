"""DisARM: antithetic pairs, for categories as trees of binary choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm.checks import check_given
from arsm.distinct import share
from arsm.draws import EDGE, mean_weight, open_uniforms
from arsm.noise import working_dtype
from arsm.scores import log_probability
from arsm.trees import SHAPES
from arsm.types import Estimator, Queries

Coupling = Literal["tree", "stick-breaking"]


class Choices(NamedTuple):
    """The two walks down the trees, for `tell`."""

    left: Tensor
    """[2, *B, K, N] bool: the choice at every node."""
    reached: Tensor
    """[2, *B, K, N] bool: whether the walk came by."""


@dataclass(frozen=True, eq=False)
class DisARM(Estimator):
    """Two antithetic samples, each a walk down a tree of C - 1 binary choices.

    Node i goes left with probability sigma(alpha_i), where alpha_i is the log odds of
    its left against its right categories; logistic noise l_i decides for the first walk
    (left iff l_i < alpha_i), -l_i for the second. With b_i = 1[left], and ~ for the
    second walk,

        dE[f]/dalpha_i ~ 1/2 (f(z) - f(z~)) r_i
        r_i = (b_i - b~_i) sigma(|alpha_i|)   where both walks come by node i
              b_i - sigma(alpha_i)            where only the first does
              sigma(alpha_i) - b~_i           where only the second does
        g_c = sum_i dE[f]/dalpha_i dalpha_i/dphi_c

    At C = 2 there is one node, and this is DisARM. References: Dong, Mnih and Tucker,
    DisARM, NeurIPS 2020; Yin, Ho, Yan, Qian and Zhou, Probabilistic best subset
    selection (U2G), 2020; Dong, Mnih and Tucker, Coupled gradient estimators for
    discrete latent variables, NeurIPS 2021.

    Attributes:
        coupling: "tree": halve the categories in their order at every node.
            "stick-breaking": take or leave one category after the other, the least
            likely first.
    """

    coupling: Coupling = "tree"

    unbiased = True

    def __post_init__(self) -> None:
        if self.coupling not in SHAPES:
            raise ValueError(
                f'coupling must be "tree" or "stick-breaking", but is {self.coupling!r}.'
            )

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Tensor:
        """l [*B, K, N], logistic; N nodes per variable. Given z, the first walk turns
        towards it at every node.
        """
        shape = SHAPES[self.coupling]
        nodes = shape.nodes(logits.shape[-1])
        u = open_uniforms((*logits.shape[:-1], nodes), logits.device, generator)
        if z is None:
            return u.logit()
        check_given(logits, z)
        log_p = log_probability(logits)
        alpha = shape.log_odds(log_p).double()
        left, reached = shape.path(log_p, z)
        toward = torch.where(left, alpha, -alpha)  # the walk turns right where -l < -alpha
        # below `toward`: logit(u sigma(toward)), of which u near 1 would round to the threshold
        # itself
        below = u.clamp_max(1 - EDGE).log() + F.logsigmoid(toward)
        given = below - (-below.exp()).log1p()
        return torch.where(reached, torch.where(left, given, -given), u.logit())

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        shape = SHAPES[self.coupling]
        log_p = log_probability(logits)
        alpha = shape.log_odds(log_p)
        left = torch.stack([noise < alpha, -noise < alpha])  # the antithetic pair
        points, reached = shape.walk(log_p, left)
        z = points.movedim(0, -2)
        return Queries(points, z, share(points), mean_weight(2, z.device), Choices(left, reached))

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        left, reached = queries.aux
        shape = SHAPES[self.coupling]
        log_p = log_probability(logits).to(
            torch.promote_types(values.dtype, working_dtype(logits.dtype))
        )
        alpha = shape.log_odds(log_p)

        # r_i; the value of a node that no walk came by does not exist
        b = left.to(alpha.dtype)
        both = (b[0] - b[1]) * alpha.abs().sigmoid()
        first = b[0] - alpha.sigmoid()
        second = alpha.sigmoid() - b[1]
        by_node = torch.where(reached[0] & reached[1], both, torch.where(reached[0], first, second))
        by_node = torch.where(reached[0] | reached[1], by_node, 0)

        half_difference = (values[0] - values[1])[..., None, None] / 2
        return shape.pull_back(log_p, half_difference * by_node)
