"""ARS: augment-REINFORCE-swap, with references drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.noise import race_noise
from arsm.references import ReferenceNoise, ask_references, tell_references
from arsm.types import Estimator, Queries


@dataclass(frozen=True, eq=False)
class ARS(Estimator):
    """Compare the pseudo actions that swaps with one random reference per variable give.

        g_kc = [f(z^{c<->j}) - mean_m f(z^{m<->j})] (1 - C pi_{k j_k}),    j_k ~ Uniform{1..C}

    where z^{c<->j} swaps c and j_k in every row k at once. C + 1 evaluations at most,
    the true sample among them. Reference: Yin, Yue and Zhou, ARSM, ICML 2019, equation
    9 and its multivariate form.
    """

    unbiased = True

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> ReferenceNoise:
        # whoever wins the race: a reference that depended on the winner would be biased
        references = torch.randint(
            logits.shape[-1], logits.shape[:-1], generator=generator, device=logits.device
        )
        return ReferenceNoise(race_noise(logits, generator, z), references)

    def ask(self, logits: Tensor, noise: ReferenceNoise) -> Queries:
        return ask_references(logits, noise.log_pi, noise.references.unsqueeze(-2))

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        return tell_references(logits, queries, values, pooled=False)

    def value(self, queries: Queries, live: Tensor) -> Tensor:
        """f at z, whose weight is 1."""
        return live.squeeze(0)
