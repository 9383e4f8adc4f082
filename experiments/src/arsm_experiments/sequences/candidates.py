r"""Ways to give credit that might enter the library, as strategies of `arsm.sequences`.

`Branch` throws three things away: the tokens that its rollouts sampled, what the other answers to a
question saw in the same state, and what a learned critic knows without a rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from arsm import policy
from arsm.estimators.rloo import RLOO
from arsm.sequences import Batch, Prefixes, TokenCredit
from arsm.sequences.heads import Headed
from arsm.sequences.strategies import back_up, backed_up, value_parts
from arsm_experiments.sequences.rivals import ValueModel

Value = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`value(prompts [N, P], tokens [N, T], mask) -> v(s_t) [N, T]`, before token t."""


@dataclass(frozen=True)
class OwnTokens:
    r"""`Branch`, and credit for the branches' own tokens.

    With n_tc the draws of token c in state s_t of the true sequence y, the credit at step u is

        w_u g_u  +  sum_{t < u} sum_{c != y_t} w_t share (n_tc / n) (R_tc - b_tc) x_u(branch t, c),
        w_0 = 1,    w_{t+1} = w_t (1 - share (1 - n_{t y_t} / n))

    where g_u is that of `Branch`, R_tc a branch's return and x_u(branch) the score of its token.

    The n draws of a state have one distribution, and every path goes on by the policy: given s_t,
    the credit at step u along a draw chosen at random has the mean of the true path's. So with

        Z_t = (1 - share) Z_{t+1} + share (n_{t y_t} Z_{t+1} + sum_{c != y_t} n_tc q_u(branch)) / n

    and Z_u = g_u, every Z_t has that mean, and Z_0 is the credit above. A state whose draws all
    agree moves no weight. Constant weights, evenly over all states, would also be unbiased, but of
    little use: in most states of a good model all draws are the true token.

    The baseline b_tc must not depend on what the branch draws from u on, given s_t and its draws:
    the mean return of the draws in s_t of other tokens, or a learned `value` of s_u. After a fatal
    mistake R_tc is surely 0, and the first leaves the noise -V(s_t) x_u, the second hardly any.
    (A second rollout per token, to be compared with the first, costs more than it tells.)
    """

    size: int = 8
    """n."""
    share: float = 0.25
    value: Value | None = None

    unbiased = True
    samples = None
    plays_every_draw = True

    @property
    def draws(self) -> int:
        return self.size

    def check(self, logits: Tensor) -> None:
        """Nothing to check."""

    def credit(self, batch: Batch) -> TokenCredit:
        estimator = RLOO(self.size)
        plan = policy.plan_draws(estimator, batch.draws, batch.mask, None, None, batch.generator)
        row, step, action = plan.episode, plan.step, plan.action.squeeze(-1)
        branches = batch.play(Prefixes(row, step, action, batch.tokens))
        tried = branches.returns.to(batch.returns.dtype)
        own, others = value_parts(estimator, plan, batch.returns, tried)
        returns = back_up(own, others, batch)
        left = self._left(batch)
        weights = policy.weights(estimator, plan, returns, tried) * left.unsqueeze(-1)

        # With one branch, credit T along the true path and B along the branch, the best part of B
        # is cov(T, T - B) / var(T - B). B has one token per state where T compares n, and so n
        # times the noise: that is 1 / (n + 1) if both paths call for the same gradient, and 1 / 2
        # if the paths differ by far more than the noise.
        equal = (batch.draws[row, step] == plan.action).to(returns.dtype).mean(-1)
        moved = self.share * left[row, step] * equal
        if self.value is None:
            mean = (own * returns + others)[row, step]
            b = ((mean - equal * tried) / (1 - equal)).unsqueeze(-1)
        else:
            mask = None if batch.prompt_mask is None else batch.prompt_mask[row]
            with torch.no_grad():
                b = self.value(batch.prompts[row], branches.tokens, mask).to(returns.dtype)
        along = moved.unsqueeze(-1) * (tried.unsqueeze(-1) - b)
        after = torch.arange(batch.tokens.shape[1], device=row.device) > step.unsqueeze(-1)
        # the first token of a branch has its credit in the true sequence's state
        along = along.masked_fill(~after, 0)
        return TokenCredit(batch.draws, weights, True, branches=branches, along=along)

    def _left(self, batch: Batch) -> Tensor:
        """w [M, T]."""
        agree = (batch.draws == batch.tokens.unsqueeze(-1)).to(batch.returns.dtype).mean(-1)
        kept = 1 - self.share * (1 - agree)
        return torch.cat([torch.ones_like(kept[:, :1]), kept[:, :-1].cumprod(-1)], -1)


@dataclass(frozen=True)
class SharedPrefixes:
    r"""`Branch` from a `group` of G true answers, where equal prefixes of a question are one state.

    In a state s that g of the answers reach, all N = g n draws have one distribution: each answer's
    own token and its n - 1 others. Draw i has

        w_si = (g / G) (Q(a_i) - mean_{j != i} Q(a_j)) / N

    Equal tokens share one value Q(c): that of the true answers that took c, r + V of the state that
    they reach, if any did; else the return of one rollout. V_s = mean_j Q(a_j), from the last step
    to the first. Each Q(c) has the right mean given all draws in s, and the answers that reach s
    were chosen before them.

    The state with g of the G answers has that part of the gradient, so that draws in proportion to
    g are also the best way to spend them.
    """

    size: int = 4
    """n: draws per answer and state, its own token included."""
    group: int = 2

    unbiased = True

    @property
    def samples(self) -> int:
        return self.group

    @property
    def draws(self) -> int:
        return self.size

    def check(self, logits: Tensor) -> None:
        """Nothing to check."""

    def credit(self, batch: Batch) -> TokenCredit:
        of_prompt = (-1, self.group)
        draws, mask = (x.unflatten(0, of_prompt) for x in (batch.draws, batch.mask))
        together = self.together(draws[..., 0], mask)  # [N, G, G, T]
        speaker = self._speakers(draws, together)  # [N, G, T, n]

        # a token that no answer took and nobody drew before is played, once per state
        place = torch.arange(self.size * self.group, device=draws.device)
        place = place.view(self.size, self.group).T.unsqueeze(1)  # [G, 1, n], as in `_speakers`
        plays = (speaker == place) & mask.unsqueeze(-1)
        row, step, draw = (plays & (place >= self.group)).flatten(0, 1).nonzero().unbind(-1)
        action = batch.draws[row, step, draw]
        branches = batch.play(Prefixes(row, step, action, batch.tokens))
        value = torch.zeros_like(batch.draws, dtype=batch.returns.dtype)
        value = value.index_put((row, step, draw), branches.returns.to(value.dtype))

        returns = batch.returns.unflatten(0, of_prompt)
        every, mean = self._values(value.unflatten(0, of_prompt), returns, mask, together, speaker)
        reached = together.sum(2).unsqueeze(-1)
        weights = (every - mean.unsqueeze(-1)) / (reached * self.size - 1) * reached / self.group
        weights = weights.masked_fill(~mask.unsqueeze(-1), 0).flatten(0, 1)
        # the weights of a state sum to 0 over the answers that reach it, not over one of them
        return TokenCredit(batch.draws, weights, branches=branches)

    @staticmethod
    def together(tokens: Tensor, mask: Tensor) -> Tensor:
        """Whether answers i and j of a prompt are in one state at step t, bool [N, G, G, T]."""
        equal = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).long().cumprod(-1).bool()
        # at the start all are
        before = torch.cat([torch.ones_like(equal[..., :1]), equal[..., :-1]], -1)
        return before & mask.unsqueeze(2) & mask.unsqueeze(1)

    def _speakers(self, draws: Tensor, together: Tensor) -> Tensor:
        """The first of the n G draws of its state that equals each draw, [N, G, T, n]; draw m of
        answer j has the number m G + j, so that the answers' own tokens come first.
        """
        last = self.size * self.group
        first = torch.full_like(draws, last)
        numbered = draws.permute(0, 3, 1, 2).flatten(1, 2).unbind(1)  # n G times [N, T]
        for number, drawn in reversed(list(enumerate(numbered))):
            same = draws == drawn.unsqueeze(1).unsqueeze(-1)
            here = together[:, :, number % self.group].unsqueeze(-1)
            first = torch.where(same & here, number, first)
        # behind the end there is no state
        return first.clamp_max(last - 1)

    def _values(
        self, value: Tensor, returns: Tensor, mask: Tensor, together: Tensor, speaker: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Q of every draw [N, G, T, n], and V [N, G, T]; `value` has the rollouts' returns."""
        every, mean = torch.zeros_like(value), torch.zeros_like(returns)
        steps = returns.shape[-1]
        for t in reversed(range(steps)):
            true = returns[..., t]
            if t + 1 < steps:
                cost = true - returns[..., t + 1]
                true = torch.where(mask[..., t + 1], cost + mean[..., t + 1], true)
            here = torch.cat([true.unsqueeze(-1), value[..., t, 1:]], -1)  # [N, G, n]
            numbered = here.transpose(1, 2).flatten(1)
            every[..., t, :] = numbered.gather(1, speaker[..., t, :].flatten(1)).view_as(here)
            same = together[..., t].to(true.dtype)
            total = (same @ every[..., t, :].sum(-1, keepdim=True)).squeeze(-1)
            mean[..., t] = total / (self.size * same.sum(-1)).clamp_min(1)
        return every, mean


@dataclass(frozen=True)
class BranchOrValue:
    r"""`Branch` in the states that a coin chooses, a learned value v(s_t) in all others.

        g_t = Branch's where the coin says so,    else (Q_t - v(s_t)) x_t

    Q_t is backed up from the rollouts that follow. Every state has credit, and a prompt needs one
    true sequence where `Branch(coin=...)` compares several.
    """

    value: Value
    coin: Callable[[Batch], Tensor]
    """The probability [M, T] that a state is branched, from what is known before its draws."""
    size: int = 8

    unbiased = True
    samples = None

    @property
    def draws(self) -> int:
        return self.size

    def check(self, logits: Tensor) -> None:
        """Nothing to check."""

    def credit(self, batch: Batch) -> TokenCredit:
        chance = self.coin(batch)
        tossed = torch.empty_like(chance, dtype=torch.float64).uniform_(generator=batch.generator)
        chosen = batch.mask & (tossed < chance)
        returns, branches = batch.returns, None
        weights = torch.zeros_like(batch.draws, dtype=returns.dtype)
        if bool(chosen.any()):
            estimator = RLOO(self.size)
            plan = policy.plan_draws(estimator, batch.draws, chosen, generator=batch.generator)
            action = plan.action.squeeze(-1)
            branches = batch.play(Prefixes(plan.episode, plan.step, action, batch.tokens))
            tried = branches.returns.to(returns.dtype)
            returns = backed_up(estimator, plan, batch, tried)
            weights = policy.weights(estimator, plan, returns, tried)
        with torch.no_grad():
            v = self.value(batch.prompts, batch.tokens, batch.prompt_mask).to(returns.dtype)
        weights[..., 0] = torch.where(batch.mask & ~chosen, returns - v, weights[..., 0])
        return TokenCredit(batch.draws, weights, branches=branches)


class TokenHead(nn.Module):
    """Logits w . x + e_c . A x of every token c from hidden states x, with the policy's embeddings
    e_c as they are: a token that was hardly ever drawn shares what is known of tokens like it.
    """

    embedding: Tensor

    def __init__(self, embedding: Tensor) -> None:
        super().__init__()
        width = embedding.shape[1]
        self.state, self.tokens = nn.Linear(width, 1), nn.Linear(width, width, bias=False)
        self.register_buffer("embedding", embedding.detach().clone(), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[S, D] -> [S, V]."""
        return self.state(hidden) + self.tokens(hidden) @ self.embedding.T

    def taken(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Those of some tokens alone, [N, T, D], [N, T] -> [N, T]."""
        mixed = self.tokens(hidden) * self.embedding[tokens]
        return self.state(hidden).squeeze(-1) + mixed.sum(-1)


class TokenCritic(ValueModel):
    """h_t(c), the chance of success after token c in state t: a `critic` for `Branch`.

    It is a copy of the model's layers with a `TokenHead`, and learns like a `ValueModel`, from the
    tokens that were taken. [N, T, V] exists at no time.
    """

    def headed(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Headed:
        """The pass up to the head, which `Branch` applies to some states at a time."""
        hidden, head = self._hidden(prompts, tokens, mask), self.head
        assert isinstance(head, TokenHead)
        return Headed(hidden, lambda some: head(some).sigmoid(), head.embedding.shape[0])

    def _new_head(self, embedding: Tensor) -> nn.Module:
        return TokenHead(embedding)

    def _logits(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Of the tokens that were taken, [N, T]."""
        assert isinstance(self.head, TokenHead)
        return self.head.taken(self._hidden(prompts, tokens, mask), tokens)
