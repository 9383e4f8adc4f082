"""Importance weights for completions that another distribution than the model drew."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from arsm.sequences.batch import TokenCredit


@dataclass(frozen=True)
class Importance:
    """Truncated importance weights for given completions.

    With p the model, q the sampler and rho_t = p(y_t | y_<t) / q(y_t | y_<t) the ratios
    of a completion's T tokens, the credit of its token t is multiplied by

    | `per` | weight | with cap = inf, the gradient's mean |
    |---|---|---|
    | "sequence" | min(rho_1 ... rho_T, cap) | as for completions from p: no new bias |
    | "token" | min(rho_t, cap) | has states and returns of q, and only the token t of p: biased |

    The product corrects what came before a token and what follows, which the return
    depends on; its variance grows with the length. A single ratio varies far less, and
    its bias vanishes as q approaches p. Truncation bounds the variance, and biases
    towards q in the completions that p likes more than cap times as much. A token that
    q never draws, as with top-k or top-p, cannot be corrected.

    References: Ionides, Truncated importance sampling, JCGS 2008; Yao et al., Your
    efficient RL framework secretly brings you off-policy RL training, 2025.

    Attributes:
        cap: The largest weight; `math.inf` for no truncation.
        per: What a weight is for.
    """

    cap: float = 2.0
    per: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        if not self.cap >= 1:
            raise ValueError(f"cap must be at least 1, the weight of equals, but is {self.cap}.")
        if self.per not in ("token", "sequence"):
            raise ValueError(f'per must be "token" or "sequence", but is {self.per!r}.')

    def ratios(self, log_probs: Tensor, reported: Tensor, live: Tensor) -> Tensor:
        """p/q before truncation, [M, T] from ln p, ln q and the tokens that count; a
        sequence's ratio in all its columns.
        """
        # in logarithms: a product over a long sequence would overflow
        logs = torch.where(live, log_probs - reported.to(log_probs.dtype), 0)
        if self.per == "sequence":
            logs = logs.sum(-1, keepdim=True).expand_as(logs)
        return logs.exp()

    def weigh(self, credit: TokenCredit, ratios: Tensor) -> TokenCredit:
        """The credit [M, T, d] times the truncated ratios [M, T]."""
        if credit.along is not None:
            raise ValueError(
                "Importance weights are those of the given completions, but this strategy gives "
                "credit to branches' own tokens too; use one such as Branch(arsm.RLOO(8))."
            )
        weight = ratios.clamp_max(self.cap).unsqueeze(-1)
        if self.per == "sequence":
            # one factor per sequence commutes with everything: also with a gradient in all logits
            if credit.gradient is not None:
                return replace(credit, gradient=credit.gradient.scaled(weight.squeeze(-1)))
            return replace(credit, weights=credit.weights * weight.to(credit.weights.dtype))
        if credit.gradient is not None:
            raise ValueError(
                "Importance weights per token need a credit of single tokens; use "
                'per="sequence", or an estimator with weights, such as RLOO(8).'
            )
        # only the first draw of a state came from the sampler, the others from the model
        weights = credit.weights.clone()
        weights[..., :1] *= weight.to(weights.dtype)
        return replace(credit, weights=weights, centred=False)


def effective_share(ratios: Tensor, live: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2) over the tokens that count: 1 for equal weights, 1/n if
    one outweighs all.
    """
    w = ratios[live]
    return w.sum().square() / (w.shape[0] * w.square().sum())
