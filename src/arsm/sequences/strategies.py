r"""How credit is given: `Branch` token by token, `Group` sequence by sequence.

With y_t the tokens, G_t the return from step t on and x_t = onehot(y_t) - p_t the score in the logits phi_t,

    dJ/dtheta = E[ sum_t sum_c g_tc dphi_tc/dtheta ],    g_t = (G_t - b_t) x_t

for any baseline b_t that does not depend on y_t or anything drawn after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from arsm import policy
from arsm.sequences.batch import Attach, Batch, Branches
from arsm.sequences.decode import Prefixes
from arsm.types import Estimator


@dataclass(frozen=True, eq=False)
class Branch:
    r"""Credit token by token: go back to a state, take another token that the estimator asks for, play on, compare.

    At step t the estimator's queries other than y_t are each taken after y_{<t} and followed by the model to the end.
    `policy.gradient` turns the returns into q_t. Equal tokens share one rollout, and a state whose queries all agree
    costs nothing. With w_t = 1 where a state is branched and 0 elsewhere, or 1/keep and 0,

        g_t = w_t q_t + (1 - w_t) (Q_t - b_t) x_t

    Q_t estimates the return after y_t. It is not the true sequence's return alone: with r_t the cost of token t,

        Q_t = r_t + V_{t+1},    V_t = the estimator's value of state t, from Q_t and its rollouts' returns

    from the last step to the first; V_t = Q_t where no rollouts were played. A budget picks states by what was drawn in
    them, which would bias V_t; there Q_t is the true return.

    With a `critic` h_t(c), any guess of the return after token c in state t that does not depend on the draws there,

        g_tc = the above, from returns less their h  +  p_tc (h_tc - sum_m p_tm h_tm),    b_t = 0

    which has the same mean, and less variance the better h is. The last term needs no rollout.
    """

    estimator: Estimator
    """Any that `policy.plan` takes, such as `arsm.RLOO(8)`."""
    budget: int | None = None
    """Most rollouts of one call, spent by a random walk over all states; None for no limit."""
    keep: float | Tensor | None = None
    """The probability with which a state's branches are played, a number or [N, T]."""
    critic: Callable[[Tensor, Tensor], Tensor] | None = None
    """`critic(prompts [N, P], tokens [N, T]) -> h [N, T, V]`."""
    samples: int | None = None
    """True sequences per prompt; None for one. With at least 2, b_t is the token baseline of `Group`; else 0."""
    where: Callable[[Batch], Tensor] | None = None
    """`where(batch) -> [N, T] bool`: the states to branch; None for all. Entry [i, t] may depend on the prompt, on the
    tokens of sequence i before step t and on the other sequences, but on nothing drawn at step t or later."""

    def __post_init__(self) -> None:
        if self.budget is not None and (self.keep is not None or self.where is not None):
            raise ValueError("Branch takes a budget, or keep-probabilities and where, but got both; leave one out.")
        keep = torch.as_tensor(1.0 if self.keep is None else self.keep)
        if not bool(((keep > 0) & (keep <= 1)).all()):
            raise ValueError(f"keep must lie in (0, 1], but is {float(keep.min())} to {float(keep.max())}.")
        if self.samples is not None and (not isinstance(self.samples, int) or self.samples < 2):
            raise ValueError(f"samples must be at least 2, or None for one, but is {self.samples}.")

    @property
    def unbiased(self) -> bool:
        return self.estimator.unbiased

    def check(self, logits: Tensor) -> None:
        """Plan one state per prompt: what cannot be planned is refused here, before anything is sampled."""
        state = logits.detach()[:, None, None]
        policy.plan(
            self.estimator, state, state.argmax(-1), budget=self.budget, generator=torch.Generator(state.device)
        )

    def surrogate(self, batch: Batch) -> tuple[Tensor, Branches]:
        logits = batch.scaled_logits().unsqueeze(-2)
        plan = self._plan(batch, logits)
        action = plan.action.squeeze(-1)
        branches = batch.play(Prefixes(plan.episode, plan.step, action, batch.tokens))
        tried = branches.returns
        returns = batch.returns if self.budget is not None else backed_up(self.estimator, plan, batch, tried)
        h = None if self.critic is None else self._guess(batch)
        if h is not None:
            returns = returns - h.gather(-1, batch.tokens.unsqueeze(-1)).squeeze(-1)
            tried = tried - h[plan.episode, plan.step, action]
        credit = policy.gradient(self.estimator, logits, plan, returns, tried).squeeze(-2)
        p = logits.squeeze(-2).softmax(-1)
        unbranched = (self._unbranched(batch, plan) * self._advantage(batch, returns)).to(p.dtype).unsqueeze(-1)
        credit = (credit - unbranched * p).scatter_add_(-1, batch.tokens.unsqueeze(-1), unbranched)
        if h is not None:
            known = p * (h - (p * h).sum(-1, keepdim=True))
            credit += known.masked_fill(~batch.mask.unsqueeze(-1), 0)
        credit = credit.detach().div_(batch.temperature)
        return Attach.apply(batch.logits, credit), branches  # pyright: ignore[reportReturnType]

    def _plan(self, batch: Batch, logits: Tensor) -> policy.Rollouts:
        keep = None
        if self.keep is not None:
            keep = torch.as_tensor(self.keep, dtype=torch.float64, device=logits.device).expand(batch.tokens.shape)
        plan = policy.plan(
            self.estimator,
            logits,
            batch.tokens.unsqueeze(-1),
            mask=batch.mask,
            budget=self.budget,
            keep=keep,
            generator=batch.generator,
        )
        if self.where is None:
            return plan
        where = self.where(batch)
        if where.dtype != torch.bool or where.shape != batch.mask.shape:
            raise ValueError(
                f"where must return bool {list(batch.mask.shape)}, but returned {where.dtype} {list(where.shape)}."
            )
        chosen = where[plan.episode, plan.step]
        parts = {name: getattr(plan, name)[chosen] for name in ("episode", "step", "action", "query", "row")}
        return replace(plan, **parts, weight=plan.weight.masked_fill(~where, 0))

    def _unbranched(self, batch: Batch, plan: policy.Rollouts) -> Tensor:
        """[N, T]: 1 - w_t. With nothing to subtract from Q_t, states that a coin or a budget leaves out get nothing."""
        if self.samples is None and self.critic is None and self.where is None:
            return torch.zeros_like(plan.weight)
        return (1 - plan.weight).masked_fill(~batch.mask, 0)

    def _advantage(self, batch: Batch, returns: Tensor) -> Tensor:
        """[N, T]: Q_t - b_t."""
        if self.samples is None or self.critic is not None:
            return returns
        returns = returns.unflatten(0, (-1, self.samples))
        return (returns - token_baseline(batch, returns)).flatten(0, 1)

    def _guess(self, batch: Batch) -> Tensor:
        assert self.critic is not None
        with torch.no_grad():
            h = self.critic(batch.prompts, batch.tokens)
        if h.shape != batch.logits.shape or not bool(h.isfinite().all()):
            raise ValueError(
                f"critic must return finite values {list(batch.logits.shape)}, one per token of the vocabulary, but "
                f"returned {list(h.shape)}{'' if h.shape != batch.logits.shape else ' with NaN or infinities'}."
            )
        return h


def backed_up(estimator: Estimator, plan: policy.Rollouts, batch: Batch, tried: Tensor) -> Tensor:
    """Q_t [N, T] of `Branch`, from the returns [R] of the plan's rollouts."""
    own, others = _value_parts(estimator, plan, batch.returns, tried)
    q = batch.returns.clone()
    for t in reversed(range(q.shape[1] - 1)):
        value = own[:, t + 1] * q[:, t + 1] + others[:, t + 1]
        cost = batch.returns[:, t] - batch.returns[:, t + 1]
        q[:, t] = torch.where(batch.mask[:, t + 1], cost + value, batch.returns[:, t])
    return q


def _value_parts(estimator: Estimator, plan: policy.Rollouts, returns: Tensor, tried: Tensor) -> tuple[Tensor, Tensor]:
    """V_t = own_t Q_t + others_t, both [N, T]: the weight of the queries that agree with y_t, and what the rest add."""
    own, others = torch.ones_like(returns).flatten(), torch.zeros_like(returns).flatten()
    start = 0
    for queries in plan.queries:
        live, stop = queries.weight.shape[0], start + queries.same_as.shape[1]
        first, last = torch.searchsorted(plan.row, torch.tensor([start, stop], device=plan.row.device)).tolist()
        answered = plan.query[first:last], plan.row[first:last] - start
        values = returns.new_zeros(queries.same_as.shape).index_put(answered, tried[first:last].to(returns.dtype))
        place, start = plan.played[start:stop], stop
        own[place] = estimator.value(queries, (queries.same_as[:live] == 0).to(returns.dtype))
        others[place] = estimator.value(queries, values.gather(0, queries.same_as)[:live])
    branched = plan.weight > 0
    return own.view_as(branched).where(branched, 1), others.view_as(branched).where(branched, 0)


def token_baseline(batch: Batch, returns: Tensor) -> Tensor:
    """[N, n, T]: sum_{j != i} W_jt G_jt / sum_{j != i} W_jt, and the plain mean where the others have no W."""
    p = batch.scaled_logits().softmax(-1)
    of_token = p.gather(-1, batch.tokens.unsqueeze(-1)).squeeze(-1)
    energy = 1 - 2 * of_token + p.square().sum(-1)  # |x_t|^2
    weight = energy.masked_fill(~batch.mask, 0).cumsum(-1).view_as(returns).to(returns.dtype)
    total = weight.sum(1, keepdim=True) - weight
    baseline = ((weight * returns).sum(1, keepdim=True) - weight * returns) / total
    plain = (returns.sum(1, keepdim=True) - returns) / (returns.shape[1] - 1)
    return torch.where(total > 0, baseline, plain)


@dataclass(frozen=True)
class Group:
    r"""Credit for whole sequences, compared with the n - 1 others of the same prompt.

    | | g_it / x_it | unbiased |
    |---|---|---|
    | `Group(n)`: leave-one-out (RLOO) | G_it - mean_{j != i} G_jt | yes |
    | `Group(n, baseline="token")`: optimal token baseline | G_it - sum_{j != i} W_jt G_jt / sum_{j != i} W_jt | yes |
    | `Group(n, baseline="mean")`: Dr. GRPO | G_it - mean_j G_jt | up to the factor (n - 1)/n |
    | `Group(n, normalise="std")`: GRPO | (G_it - mean_j G_jt) / (std_j G_jt + 1e-4) | no |

    W_jt = sum_{s <= t} |x_js|^2. References: Kool, van Hoof and Welling, 2019; Li and others, Optimal token baseline,
    2025; Liu and others, Understanding R1-Zero-like training, 2025; Shao and others, DeepSeekMath, 2024, here without
    its division by the sequence's length.
    """

    n: int
    """Sequences per prompt."""
    normalise: Literal["std"] | None = None
    baseline: Literal["leave-one-out", "token", "mean"] | None = None
    """The default is "leave-one-out", or "mean" with `normalise`."""

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or self.n < 2:
            raise ValueError(f"Group compares at least 2 sequences per prompt, but n = {self.n}.")
        if self.normalise not in (None, "std"):
            raise ValueError(f'normalise must be "std" or None, but is {self.normalise!r}.')
        if self.baseline not in (None, "leave-one-out", "token", "mean"):
            raise ValueError(f'baseline must be "leave-one-out", "token" or "mean", but is {self.baseline!r}.')
        if self.normalise == "std" and self.baseline not in (None, "mean"):
            raise ValueError(f'normalise="std" subtracts the mean, but baseline is {self.baseline!r}; leave it out.')

    @property
    def samples(self) -> int:
        return self.n

    @property
    def unbiased(self) -> bool:
        return self.normalise is None and self.baseline != "mean"

    def check(self, logits: Tensor) -> None:
        """Nothing to check: a group fits every model."""

    def surrogate(self, batch: Batch) -> tuple[Tensor, None]:
        returns = batch.returns.unflatten(0, (-1, self.n))  # [N, n, T]
        others = self.n - 1
        if self.normalise == "std":
            centred = returns - returns.mean(1, keepdim=True)
            advantage = centred / (returns.std(1, keepdim=True) + 1e-4)
        elif self.baseline == "mean":
            advantage = returns - returns.mean(1, keepdim=True)
        elif self.baseline == "token":
            advantage = returns - token_baseline(batch, returns)
        else:
            advantage = (returns - returns.mean(1, keepdim=True)) * self.n / others
        surrogate = (advantage.flatten(0, 1).to(batch.logits.dtype) * batch.log_probs()).sum(-1)
        return surrogate - surrogate.detach(), None
