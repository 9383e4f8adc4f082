"""Local expectation gradients: one variable at a time, exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.draws import SampleNoise, sample_noise, samples
from arsm.scores import centred, probabilities_for
from arsm.types import Estimator, Queries


@dataclass(frozen=True, eq=False)
class LocalExpectation(Estimator):
    """Sum each variable out exactly, given a sample of the others.

        g_kc = p_kc (f(z_k = c, z_-k) - sum_m p_km f(z_k = m, z_-k)),    p_k = softmax(phi_k)

    K(C-1) + 1 evaluations. `Average(LocalExpectation(), N)` equals IndeCateR (De Smet,
    Sansone and Zuidberg Dos Martires 2023) with N samples of independent variables,
    shared by all of them, sample by sample. Reference: Titsias and Lazaro-Gredilla,
    Local expectation gradients for black box variational inference, NeurIPS 2015.
    """

    unbiased = True

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> SampleNoise:
        return sample_noise(logits, 1, generator, z)

    def ask(self, logits: Tensor, noise: SampleNoise) -> Queries:
        z = samples(logits, noise).squeeze(-2)
        variables, categories = logits.shape[-2:]
        column = (variables, categories, *(1,) * (z.ndim - 1))
        k = torch.arange(variables, device=z.device)
        c = torch.arange(categories, device=z.device)

        # z, then z with variable k set to c, for all k and c: [1 + K C, *B, K]
        own = (k.view(-1, 1) == k).view(variables, 1, *column[2:], variables)
        changed = torch.where(own, c.view(1, *column[1:], 1), z)
        points = torch.cat([z.unsqueeze(0), changed.flatten(0, 1)])

        # c = z_k is z itself; a masked category has weight 0 and takes z's value, unasked
        is_z = c.view(1, *column[1:]) == z.movedim(-1, 0).unsqueeze(1)
        masked = logits.detach().movedim((-2, -1), (0, 1)) == -torch.inf
        number = (1 + torch.arange(variables * categories, device=z.device)).view(column)
        numbers = torch.where(is_z | masked, 0, number).flatten(0, 1)
        same_as = torch.cat([torch.zeros_like(z[..., 0]).unsqueeze(0), numbers])
        return Queries(points, z, same_as, torch.ones(1, device=z.device))

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        f = (values[1:] - values[0]).unflatten(0, logits.shape[-2:]).movedim((0, 1), (-2, -1))
        p = probabilities_for(f, logits)
        return p * centred(p, f)

    def most_queries(self, logits: Tensor) -> int:
        choices = (logits > -torch.inf).sum(-1)
        return int(1 + (choices - 1).sum(-1).max())
