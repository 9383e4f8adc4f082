"""OTB: leave-one-out REINFORCE whose baseline weighs samples by the length of their score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.estimators.independent_samples import IndependentSamples
from arsm.scores import less_mean

LEAST = 1e-6
"""The least weight of a sample: certain variables have scores of length 0."""


@dataclass(frozen=True, eq=False)
class OTB(IndependentSamples):
    """The optimal baseline of each variable, from the other samples.

        W_ik = sum_{s <= k} |x_is|^2,    |x_is|^2 = 1 - 2 p_s(z_is) + sum_c p_sc^2
        b_ik = sum_{j != i} W_jk f_j / sum_{j != i} W_jk
        g_k = 1/n sum_i (f_i - b_ik) x_ik,    x_ik = onehot(z_ik) - softmax(phi_k)

    The variables are taken in their order, as tokens are. Sample i is left out of its
    own baseline, without which the estimate would be biased. Reference: Li et al., The
    optimal token baseline: variance reduction for long-horizon LLM-RL, 2026, where the
    sample itself is not left out.

    Attributes:
        samples: n, the number of samples.
        live: Number of samples that keep f's graph (None: all); f's parameters get
            their average gradient.
    """

    unbiased = True
    weighs_energy = True

    @property
    def paths(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.samples

    def weights(self, values: Tensor, energy: Tensor | None = None) -> Tensor:
        """(f_i - b_ik) / n, with W_ik as the energy."""
        assert energy is not None  # declared by `weighs_energy`
        f = less_mean(values).to(energy.dtype)  # [n, *B, K]
        energy = energy.clamp_min(LEAST)
        # a product with zeros on the diagonal, since a sum less the own term would lose digits
        n = self.samples
        others = torch.ones(n, n, dtype=f.dtype, device=f.device).fill_diagonal_(0)
        weighted = torch.einsum("ij,j...->i...", others, energy * f)
        total = torch.einsum("ij,j...->i...", others, energy)
        return (f - weighted / total) / self.samples
