r"""Were these tokens drawn from this model? A test that is right for any number of tokens.

For an alternative sampler q, the likelihood ratio L = prod_t q_t(y_t) / p_t(y_t) of
tokens y_t that were drawn from the model p has the mean 1. So has the average over
several alternatives, and by Markov's inequality

    P(average >= 1 / alpha) <= alpha

The alternatives are other temperatures, cut-off tails (top-p), and, where the sampler
reports ln q, the sampler itself. A sampler in lower precision is no error: a reported q
counts only beyond `ROUNDING` nats per token.

Reference: Ramdas et al., Game-theoretic statistics and safe anytime-valid inference,
Statistical Science 2023.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FALSE_ALARM = 1e-6
TEMPERATURES = (0.7, 0.9, 1.1, 1.4)
"""Temperatures of alternative samplers, relative to the stated one."""
TOP_P = (0.9, 0.95, 0.99)
"""Shares of probability that alternative samplers keep."""
SLIP = 1e-3
"""An alternative with a cut-off tail draws from the whole distribution with this
probability, so that one token of the tail does not clear it at once."""
ROUNDING = 0.005
"""KL divergence in nats per token up to which a reported sampler may differ from the model."""
TOKENS_AT_ONCE = 256


class Fit:
    """ln L of every alternative, added up over tokens."""

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature
        self.tokens = 0
        self.names = [f"temperature {temperature * x:.3g}" for x in TEMPERATURES]
        self.names += [f"top-p {x}" for x in TOP_P]
        self.names += ["other weights"]
        self.log_ratios = torch.zeros(len(self.names), dtype=torch.float64)

    @torch.no_grad()
    def add(self, logits: Tensor, tokens: Tensor, reported: Tensor | None = None) -> None:
        """Count tokens [M] at logits [M, V], before temperature, and the sampler's own
        ln q [M] of them.
        """
        for some in torch.arange(tokens.shape[0], device=tokens.device).split(TOKENS_AT_ONCE):
            # float64: the ratios of thousands of tokens are added up
            log_p = (logits[some].double() / self.temperature).log_softmax(-1)
            own = log_p.gather(-1, tokens[some].unsqueeze(-1))
            ratios = [self._scaled(log_p, own, x) for x in TEMPERATURES]
            ratios += self._cut(log_p, own)
            ratios.append(self._reported(own, None if reported is None else reported[some]))
            self.log_ratios += torch.stack([x.sum() for x in ratios]).cpu()
        self.tokens += tokens.shape[0]

    def _scaled(self, log_p: Tensor, own: Tensor, temperature: float) -> Tensor:
        scaled = log_p / temperature
        return own / temperature - scaled.logsumexp(-1, keepdim=True) - own

    def _cut(self, log_p: Tensor, own: Tensor) -> list[Tensor]:
        """ln of (1 - slip) q/p + slip, q the distribution without its tail."""
        ordered = log_p.sort(-1, descending=True).values.exp()
        sums = ordered.cumsum(-1)
        # probability of the likelier tokens
        before = (log_p.exp() * (log_p > own)).sum(-1, keepdim=True)
        ratios = []
        for share in TOP_P:
            # the smallest set of the likeliest tokens that reaches the share
            last = (sums < share).sum(-1, keepdim=True).clamp_max(sums.shape[-1] - 1)
            kept = sums.gather(-1, last)
            inside = torch.where(before < share, (1 - SLIP) / kept, 0.0)
            ratios.append((inside + SLIP).log())
        return ratios

    def _reported(self, own: Tensor, reported: Tensor | None) -> Tensor:
        if reported is None:
            return torch.zeros_like(own)
        # less what rounding may explain: such a ratio has a mean below 1, and the bound holds
        return reported.double().unsqueeze(-1) - own - ROUNDING

    def alarm(self) -> str | None:
        """The alternative that explains the tokens best, if the model itself does not;
        else None.
        """
        # the average of all alternatives: choosing the best would need a correction
        evidence = float(self.log_ratios.logsumexp(0)) - math.log(len(self.names))
        if not evidence >= -math.log(FALSE_ALARM):
            return None
        return self.names[int(self.log_ratios.argmax())]
