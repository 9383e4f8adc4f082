"""UGC: DisARM, and single flips for nearly certain binary variables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from arsm.distinct import share
from arsm.draws import mean_weight
from arsm.estimators.disarm import DisARM
from arsm.scores import probabilities, probabilities_for
from arsm.types import Estimator, Queries

PAIR = DisARM()


class PairAndFlip(NamedTuple):
    """The noise of UGC."""

    pair: Tensor
    """[*B, K, 1], that of DisARM."""
    flip: Tensor
    """[*B] float64 in [0, 1): which of the nearly certain variables is flipped."""


class Flip(NamedTuple):
    """Data for `tell`."""

    pair: object
    """Data for DisARM's `tell`."""
    flipped: Tensor
    """[*B, K] bool: the variable that was flipped, at most one."""
    certain: Tensor
    """[*B, K] bool: the nearly certain variables."""


@dataclass(frozen=True, eq=False)
class UGC(Estimator):
    """Unbiased gradient variance clipping: flip one of the nearly certain variables,
    and leave the others to DisARM.

        S = {k: 0 < min(p_k0, p_k1) < 1/(2K)},    i ~ Uniform(S)
        g_kc = |S| p_k0 p_k1 [f(z with z_k = c) - f(z with z_k = 1 - c)] 1[k = i]
               for k in S    (bitflip-1)
        g_kc = DisARM's, of z and its antithetic z~                                  for all other k

    For two categories; 3 evaluations. In S the second moment is |S| (p_k0 p_k1)^2 times
    a squared change of f by one flip; that of DisARM is 1/2 min(p_k) max(p_k)^2 times a
    squared difference of f at z and z~. So the variance is never above DisARM's where f
    is a sum over variables, nor its bound for the worst f of a given range; other f
    exist for which DisARM is better. Reference: Kunes, Yin, Land, Haviv, Pe'er and
    Tavare, Gradient estimation for binary latent variables via gradient variance
    clipping, AAAI 2023, where i is drawn from all variables.
    """

    unbiased = True

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> PairAndFlip:
        u = torch.empty(logits.shape[:-2], dtype=torch.float64, device=logits.device)
        return PairAndFlip(PAIR.noise(logits, generator, z), u.uniform_(generator=generator))

    def ask(self, logits: Tensor, noise: PairAndFlip) -> Queries:
        variables, categories = logits.shape[-2:]
        if categories != 2:
            raise ValueError(
                f"UGC is for variables of 2 categories, but these have {categories}; DisARM takes "
                "any."
            )
        queries = PAIR.ask(logits, noise.pair)
        # a masked category can never be chosen, so that flipping to it would be wrong
        least = probabilities(logits).amin(-1)
        certain = (least > 0) & (least < 1 / (2 * variables))
        count = certain.sum(-1, keepdim=True)
        # the number of the flipped variable among the certain ones
        chosen = (noise.flip.unsqueeze(-1) * count).long()
        flipped = certain & (certain.cumsum(-1) - 1 == chosen)
        first = queries.points[0]
        points = torch.cat([queries.points, torch.where(flipped, 1 - first, first).unsqueeze(0)])
        weight = mean_weight(2, logits.device)
        return Queries(
            points, queries.z, share(points), weight, Flip(queries.aux, flipped, certain)
        )

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        pair, flipped, certain = queries.aux
        of_pair = PAIR.tell(logits, replace(queries, aux=pair), values)
        p = probabilities_for(values, logits)
        # |S| makes up for flipping only one of the certain variables
        change = certain.sum(-1) * (values[0] - values[2])
        sign = 2.0 * (queries.points[0].unsqueeze(-1) == torch.arange(2, device=p.device)) - 1
        of_flip = sign * (flipped * p.prod(-1) * change.unsqueeze(-1)).unsqueeze(-1)
        return torch.where(certain.unsqueeze(-1), of_flip.to(of_pair.dtype), of_pair)
