"""The unordered-set estimator: samples without replacement."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from arsm.checks import check_one_variable, check_whole
from arsm.noise import fixed_point, race_noise
from arsm.scores import probabilities_for, weighted_scores
from arsm.types import Estimator, Queries, at_most_all

LIMIT = 10
"""Most samples, whose 2^k subsets are listed."""
MASKED_LOG_P = -1e30
"""ln p of a masked category; -inf - -inf would be NaN."""


@dataclass(frozen=True, eq=False)
class UnorderedSet(Estimator):
    r"""k distinct categories of one variable, drawn without replacement, as a set S
    whose order is summed out.

        E[f] ~ sum_{s in S} p(s) R(S, s) f(s),    R(S, s) = p^{D\s}(S\s) / p(S)
        g    = sum_{s in S} p(s) R(S, s) (f(s) - b_s) (onehot(s) - p)
        b_s  = sum_{s' in S} p(s') R^{D\s}(S, s') f(s')

    p^{D\A}(T) is the probability that the first |T| draws without replacement from the
    categories outside A are the set T; R^{D\s}(S, s') = p^{D\{s,s'}}(S\{s,s'}) /
    p^{D\s}(S\s), and 1 where s' = s. At k = C the estimate is exact. Reference: Kool,
    van Hoof and Welling, Estimating gradients for discrete random variables by sampling
    without replacement, ICLR 2020.

    Attributes:
        samples: k, or all C categories if there are fewer; keep it small: the ratios
            cost O(k^2 2^k).
    """

    samples: int = 4

    unbiased = True

    def __post_init__(self) -> None:
        check_whole("samples", self.samples)
        if not 2 <= self.samples <= LIMIT:
            raise ValueError(
                f"UnorderedSet enumerates the subsets of its samples and takes 2 to {LIMIT} of "
                f"them, but samples = {self.samples}."
            )

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Tensor:
        """ln pi [*B, 1, C]."""
        return race_noise(logits, generator, z)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        check_one_variable(self, logits)
        k = min(self.samples, logits.shape[-1])
        # the first k of a race are k draws without replacement
        phi, a = fixed_point(logits, noise)
        # [*B, k], in the order of the draws
        s = (a - phi).topk(k, largest=False).indices.squeeze(-2)
        log_p = logits.detach().double().log_softmax(-1).squeeze(-2).clamp_min(MASKED_LOG_P)
        rest = log_p.scatter(-1, s, MASKED_LOG_P).logsumexp(-1)
        first, second = set_weights(log_p.gather(-1, s).movedim(-1, 0), rest)
        s = s.movedim(-1, 0)
        number = torch.arange(k, device=s.device).view(-1, *(1,) * (s.ndim - 1))
        # Where fewer than k categories are left unmasked, the set holds masked ones, which weigh
        # nothing.
        same_as = torch.where(first > 0, number, first.argmax(0))
        return Queries(s.unsqueeze(-1), s[0].unsqueeze(-1), same_as, first, second)

    def most_queries(self, logits: Tensor) -> int:
        return at_most_all(self.samples, logits)

    def within(self, budget: int) -> UnorderedSet | None:
        return None if budget > LIMIT else replace(self, samples=max(2, budget))

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        f = values - values[0]
        advantage = f - (queries.aux * f).sum(1)
        p = probabilities_for(f, logits)
        return weighted_scores(p, queries.points, (queries.weight * advantage).to(p.dtype))


def set_weights(log_w: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    r"""p(s) R(S, s) [k, ...] and p(s') R^{D\s}(S, s') [k, k, ...], from the ln p(s) [k,
    ...] of the set and the ln of the mass outside it [...].

    q(T) = p^{D\(S\T)}(T) for the subsets T of S follows from its first draw, q(T) =
    sum_{s in T} p(s) / (rest + p(T)) q(T\s), all terms positive; T is a row number, s
    one of its bits.
    """
    k = log_w.shape[0]
    column = (1,) * rest.ndim
    subset = torch.arange(2**k, device=rest.device)
    bit = 1 << torch.arange(k, device=rest.device)
    has = ((subset.unsqueeze(-1) & bit) != 0).view(2**k, k, *column)
    mass = torch.logaddexp(torch.where(has, log_w, -torch.inf).logsumexp(1), rest)
    draw = torch.where(has, log_w - mass.unsqueeze(1), -torch.inf)
    empty = (subset == 0).view(-1, *column)
    without = subset.unsqueeze(-1) & ~bit
    log_q = torch.where(empty, 0, -torch.inf).expand_as(mass)
    for _ in range(k):  # after i rounds every subset of at most i members has its value
        log_q = torch.where(empty, 0, (draw + log_q[without]).logsumexp(1))

    # R(S, s) and R^{D\s}(S, s') are ratios of q at S without one or two of its members
    all_but_one = subset[-1] & ~bit
    all_but_two = all_but_one.unsqueeze(-1) & ~bit
    first = log_w + log_q[all_but_one] - log_q[-1]
    second = log_w + log_q[all_but_two] - log_q[all_but_one].unsqueeze(1)
    return first.exp(), second.exp()
