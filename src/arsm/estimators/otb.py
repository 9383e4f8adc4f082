"""OTB: leave-one-out REINFORCE whose baseline weighs samples by the length of their score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.estimators.group import Group
from arsm.scores import less_mean, probabilities_for
from arsm.types import Queries

LEAST = 1e-6
"""The least weight of a sample: certain variables have scores of length 0."""


@dataclass(frozen=True, eq=False)
class OTB(Group):
    """The optimal baseline of each variable, from the other samples.

        W_ik = sum_{s <= k} |x_is|^2,    |x_is|^2 = 1 - 2 p_s(z_is) + sum_c p_sc^2
        b_ik = sum_{j != i} W_jk f_j / sum_{j != i} W_jk
        g_k = 1/n sum_i (f_i - b_ik) x_ik,    x_ik = onehot(z_ik) - softmax(phi_k)

    The variables are taken in their order, as tokens are. Sample i is left out of its own baseline, without which the
    estimate would be biased. Reference: Li et al., The optimal token baseline: variance reduction for long-horizon
    LLM-RL, 2026, where the sample itself is not left out.
    """

    unbiased = True

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        p = probabilities_for(values, logits)
        z = queries.points  # [n, *B, K]
        f = less_mean(values).to(p.dtype).unsqueeze(-1)  # [n, *B, 1]
        of_sample = p.expand(*z.shape, -1).gather(-1, z.unsqueeze(-1)).squeeze(-1)
        energy = (1 - 2 * of_sample + p.square().sum(-1)).cumsum(-1).clamp_min(LEAST)  # [n, *B, K]
        others = torch.ones(self.samples, self.samples, dtype=p.dtype, device=p.device).fill_diagonal_(0)
        weighted, total = (torch.einsum("ij,j...->i...", others, x) for x in (energy * f, energy))
        weight = ((f - weighted / total) / self.samples).movedim(0, -1)  # [*B, K, n]
        return (-weight.sum(-1, keepdim=True) * p).scatter_add(-1, z.movedim(0, -1), weight)
