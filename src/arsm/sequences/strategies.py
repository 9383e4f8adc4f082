r"""Strategies: `Branch` gives credit token by token, `Group` sequence by sequence.

With y_t the tokens, G_t the return from step t on and x_t = onehot(y_t) - p_t the score
in the logits phi_t,

    dJ/dtheta = E[ sum_t sum_c g_tc dphi_tc/dtheta ],    g_t = (G_t - b_t) x_t

for any baseline b_t that does not depend on y_t or anything drawn after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arsm import policy
from arsm.capabilities import require
from arsm.draws import SampleNoise
from arsm.estimators.rloo import RLOO
from arsm.question import Others
from arsm.scores import energy
from arsm.sequences.batch import Batch, Branches, TokenCredit
from arsm.sequences.decode import Prefixes
from arsm.sequences.draws import token_probabilities
from arsm.sequences.vocabulary import LogitCredit, Vocabulary, checked_chance, tossed
from arsm.types import Estimator


@dataclass(frozen=True, eq=False)
class Branch:
    r"""Credit token by token: go back to a state, take another token that the estimator
    asks for, play on, compare.

    One true sequence per prompt. At step t the estimator's queries other than y_t are
    each taken after y_{<t} and followed by the model to the end, and their returns are
    turned into g_t. Equal tokens share one rollout, and a state whose queries all agree
    costs nothing. The return after y_t is not the true sequence's alone:

        Q_t = r_t + V_{t+1},
        V_t = the estimator's value of state t, from Q_t and the returns of its rollouts

    from the last step to the first, with r_t the cost of token t, and V_t = Q_t where
    no rollouts were planned. (A budget picks states by what was drawn in them, which
    would bias V_t: there Q_t is the true return.)

    A rollout may be left to chance. Played with probability rho, its return R enters as

        R' = h + (R - h) / rho  if it was played,  else h

    whose mean is that of R. A good rho is small where h is surely right:
    `by_likelihood`.

    With a `critic` h_t(c), any guess of the return after token c in state t that does
    not depend on the draws there,

        g_tc = estimate from returns less their h  +  p_tc (h_tc - sum_m p_tm h_tm)

    which has the same mean, and less variance the better h is. The second term needs no
    rollout and is there for every step, also those that a budget leaves out. Without a
    critic h = 0.

    Long sequences have more states than can be branched. With a `coin`, a prompt has a
    `group` of n true sequences; a state is branched if its coin says so, and the others
    compare with the group, i being the sequence:

        g_it = (Q_it - mean_{j != i} V_j0) x_it / n

    Both credits have the same mean in every state, and the coin does not depend on what
    was drawn there. So nothing is divided by the coin's probability, as `keep` must.

    Attributes:
        estimator: Any that `policy.plan` takes. The default, `arsm.RLOO(8)`, had the
            least variance x tokens over three tasks on SmolLM2, questions drawn afresh
            (results/language_model).
        budget: Most rollouts of one call, spent by a random walk over all states; None
            for no limit.
        keep: The probability with which a state's branches are played, a number or [N,
            T]; its credit is divided by it.
        critic: `critic(prompts [n, P], tokens [n, T]) -> h [n, T, V]`, row by row, for
            some of the sequences at a time; or an object with `headed(prompts, tokens)`
            as models have, whose h are then computed for some states at a time, and
            which gets the mask of padded prompts too, as models do. It is asked again
            in the backward pass and must not learn before.
        chance: `chance(batch, rollouts) -> rho [R]`, in (0, 1]: the probability with
            which each rollout is played. It may depend on everything that is known by
            then, the true sequences' returns included. It is asked for the rollouts of
            some states at a time.
        group: True sequences per prompt; None for one. Needed by `coin`.
        coin: The probability with which a state is branched: a number, or `coin(batch)
            -> [M, T]`, from what is known before the state's draws, such as the state's
            `largest` ln p or its position.
    """

    estimator: Estimator = field(default_factory=lambda: RLOO(8))
    budget: int | None = None
    keep: float | Tensor | None = None
    critic: Callable[[Tensor, Tensor], Tensor] | None = None
    chance: Callable[[Batch, policy.Rollouts], Tensor] | None = None
    group: int | None = None
    coin: float | Callable[[Batch], Tensor] | None = None

    @property
    def samples(self) -> int | None:
        return self.group

    def __post_init__(self) -> None:
        require(
            self.estimator,
            "Branch",
            "nothing_learned",
            instead="use one such as RLOO(8), and a critic to learn",
        )
        if self.budget is not None and self.keep is not None:
            raise ValueError(
                "Branch takes a budget or keep-probabilities, but both were given; leave one out."
            )
        keep = torch.as_tensor(1.0 if self.keep is None else self.keep)
        if not bool(((keep > 0) & (keep <= 1)).all()):
            raise ValueError(
                f"keep must lie in (0, 1], but is {float(keep.min())} to {float(keep.max())}."
            )
        self._check_group()

    def _check_group(self) -> None:
        if self.group is not None and self.group < 2:
            raise ValueError(
                f"Branch compares at least 2 sequences per prompt, but group = {self.group}; leave "
                "it out for one."
            )
        if self.group is not None and not self._from_draws():
            raise ValueError(
                "A group of branched sequences needs an estimator with weights, such as RLOO(8), "
                "and no critic."
            )
        if self.coin is None:
            return
        if self.group is None:
            raise ValueError(
                "coin leaves states without branches, which are compared with other sequences of "
                "the prompt; give group=8, say."
            )
        if self.budget is not None or self.keep is not None:
            raise ValueError("coin chooses the states to branch; leave budget and keep out.")
        if isinstance(self.coin, int | float) and not 0 < self.coin <= 1:
            raise ValueError(f"coin must lie in (0, 1], but is {self.coin}.")

    @property
    def unbiased(self) -> bool:
        return self.estimator.unbiased

    def check(self, logits: Tensor) -> None:
        """Plan one state per prompt: what cannot be planned is refused here, before
        anything is sampled.
        """
        state = logits.detach()[:, None, None]
        policy.plan(
            self.estimator,
            state,
            state.argmax(-1),
            budget=self.budget,
            generator=torch.Generator(state.device),
        )

    @property
    def draws(self) -> int:
        return self.estimator.paths if self._from_draws() else 1

    @property
    def plays_every_draw(self) -> bool:
        """Whether each distinct other draw of every state is played once, whatever else
        happens: such branches may begin while the true sequences are still sampled.
        """
        # by these, what is played depends on more than the draws of the state
        choices = (self.budget, self.keep, self.chance, self.coin)
        return self._from_draws() and all(each is None for each in choices)

    def _from_draws(self) -> bool:
        """Whether n draws of a state are all that its credit needs: no logits of the
        whole vocabulary.
        """
        weighs = (
            self.estimator.paths > 0 and not self.estimator.weighs_energy and self.critic is None
        )
        # of no rows: draws nothing
        return weighs and isinstance(self.estimator.noise(torch.empty(0, 1, 2)), SampleNoise)

    def credit(self, batch: Batch) -> TokenCredit:
        keep = None
        if self.keep is not None:
            device = batch.tokens.device
            keep = torch.as_tensor(self.keep, dtype=torch.float64, device=device).expand(
                batch.tokens.shape
            )
        if self._from_draws():
            return self._credit_draws(batch, keep)
        return self._credit_logits(batch, keep)

    def _credit_draws(self, batch: Batch, keep: Tensor | None) -> TokenCredit:
        """Weights of the n draws of every state."""
        chosen = batch.mask if self.coin is None else batch.mask & self._tossed(batch)
        if not bool(chosen.any()):
            nothing = torch.zeros_like(batch.draws, dtype=batch.returns.dtype)
            weights = self._compare(batch, nothing, chosen, batch.returns, batch.returns[:, 0])
            return TokenCredit(batch.draws, weights)
        plan = policy.plan_draws(
            self.estimator, batch.draws, chosen, self.budget, keep, batch.generator
        )
        tried, branches = self._play(batch, plan)
        returns = (
            batch.returns
            if self.budget is not None
            else backed_up(self.estimator, plan, batch, tried)
        )
        weights = policy.weights(self.estimator, plan, returns, tried)
        if self.group is None:
            return TokenCredit(batch.draws, weights, self.estimator.centred, branches=branches)
        weights = weights / self.group
        if self.coin is None:
            return TokenCredit(batch.draws, weights, self.estimator.centred, branches=branches)
        own, others = value_parts(self.estimator, plan, returns, tried)
        values = own[:, 0] * returns[:, 0] + others[:, 0]
        weights = self._compare(batch, weights, chosen, returns, values)
        # the weights of a compared state do not sum to 0
        return TokenCredit(batch.draws, weights, branches=branches)

    def _tossed(self, batch: Batch) -> Tensor:
        """Which states to branch, bool [M, T]."""
        assert self.coin is not None
        shape = batch.tokens.shape
        chance = self.coin(batch) if callable(self.coin) else torch.tensor(self.coin)
        chance = chance.to(batch.tokens.device, torch.float64).expand(shape)
        if not bool(((chance >= 0) & (chance <= 1)).all()):
            raise ValueError(f"coin must return probabilities {list(shape)} in [0, 1].")
        uniform = torch.empty(shape, dtype=torch.float64, device=chance.device)
        return uniform.uniform_(generator=batch.generator) < chance

    def _compare(
        self, batch: Batch, weights: Tensor, chosen: Tensor, returns: Tensor, values: Tensor
    ) -> Tensor:
        """The weights [M, T, n] with those of the states that were not chosen, from the
        values V_0 [M] of the group's other sequences.
        """
        assert self.group is not None
        of_group = values.view(-1, self.group)
        others = (of_group.sum(-1, keepdim=True) - of_group) / (self.group - 1)
        compared = (returns - others.view(-1, 1)) / self.group
        true = torch.where(batch.mask & ~chosen, compared, weights[..., 0])
        return torch.cat([true.unsqueeze(-1), weights[..., 1:]], -1)

    def _credit_logits(self, batch: Batch, keep: Tensor | None) -> TokenCredit:
        """A gradient in the logits of the whole vocabulary, made when it is wanted."""
        vocabulary = Vocabulary(self.estimator, batch, self.critic)
        asked = vocabulary.ask(self.budget, keep, self.chance)
        state = vocabulary.states[asked.place]
        width = batch.tokens.shape[1]
        branches = batch.play(Prefixes(state // width, state % width, asked.action, batch.tokens))
        tried = branches.returns.to(batch.returns.dtype)
        returns = batch.returns
        if self.budget is None:
            returns = back_up(*vocabulary.value_parts(asked, tried), batch)
        nothing = batch.returns.new_zeros(*batch.tokens.shape, 0)
        gradient = LogitCredit(vocabulary, asked, returns, tried)
        return TokenCredit(batch.draws[..., :0], nothing, gradient=gradient, branches=branches)

    def _play(self, batch: Batch, plan: policy.Rollouts) -> tuple[Tensor, Branches]:
        """R' [R], and the rollouts that were played."""
        action = plan.action.squeeze(-1)
        if self.chance is None:
            branches = batch.play(Prefixes(plan.episode, plan.step, action, batch.tokens))
            return branches.returns, branches
        chance = checked_chance(self.chance(batch, plan), action.shape)
        coin = tossed(chance, batch.generator)
        branches = batch.play(
            Prefixes(plan.episode[coin], plan.step[coin], action[coin], batch.tokens)
        )
        nothing = torch.zeros_like(chance)
        return nothing.index_put((coin,), branches.returns / chance[coin]), branches


def by_likelihood(least: float = 0.002) -> Callable[[Batch, policy.Rollouts], Tensor]:
    r"""A `chance` for rewards that are 0 after a mistake: play a rollout as often as
    its prefix is likely.

        rho = max(least, prod_{s < t} p_s(y_s) / max_c p_s(c)  x  p_t(action) / max_c p_t(c))

    A model that is trained on correct answers gives its own mistakes small
    probabilities. Use it without a critic: a guess h that is off by a little is off by
    h/rho where the rollout is played.
    """
    if not 0 < least <= 1:
        raise ValueError(f"least must lie in (0, 1], but is {least}.")

    def chance(batch: Batch, plan: policy.Rollouts) -> Tensor:
        taken = (batch.log_probs[..., 0] - batch.largest).masked_fill(~batch.mask, 0)
        before = torch.cat([torch.zeros_like(taken[:, :1]), taken[:, :-1]], -1).cumsum(-1)
        here = log_prob_of(batch, plan) - batch.largest[plan.episode, plan.step]
        return (before[plan.episode, plan.step] + here).exp().clamp(least, 1)

    return chance


def log_prob_of(batch: Batch, plan: policy.Rollouts) -> Tensor:
    """ln p [R] of the tokens that the rollouts take first."""
    if plan.log_prob is not None:
        return plan.log_prob
    # they are among the recorded draws
    return batch.log_probs[plan.episode, plan.step, plan.query]


def backed_up(estimator: Estimator, plan: policy.Rollouts, batch: Batch, tried: Tensor) -> Tensor:
    """Q_t [N, T] of `Branch`, from the returns [R] of the plan's rollouts."""
    return back_up(*value_parts(estimator, plan, batch.returns, tried), batch)


def back_up(own: Tensor, others: Tensor, batch: Batch) -> Tensor:
    """Q_t [N, T] from the last step to the first, with V_t = own_t Q_t + others_t."""
    returns = batch.returns
    later = batch.mask[:, 1:]
    cost = returns[:, :-1] - returns[:, 1:]
    # Q_t = a_t Q_{t+1} + b_t, so that a step is one call; after the end Q_t is the return
    a = torch.where(later, own[:, 1:], 0)
    b = torch.where(later, cost + others[:, 1:], returns[:, :-1])
    q = [returns[:, -1]]
    for a_t, b_t in zip(reversed(a.unbind(1)), reversed(b.unbind(1)), strict=True):
        q.append(torch.addcmul(b_t, a_t, q[-1]))
    return torch.stack(q[::-1], 1)


def value_parts(
    estimator: Estimator, plan: policy.Rollouts, returns: Tensor, tried: Tensor
) -> tuple[Tensor, Tensor]:
    """V_t = own_t Q_t + others_t, both [N, T]: the weight of the queries that agree
    with y_t, and what the rest add.
    """
    own = torch.ones_like(returns).flatten()
    others = torch.zeros_like(returns).flatten()

    def of_part(part: policy.PlayedSteps, some: slice, answered: Others) -> tuple[Tensor, Tensor]:
        question = part.pose()
        lives = question.queries.weight.shape[0]
        same_as = question.queries.same_as
        without = question.spread_others(answered, tried[some], torch.zeros_like(own[part.step]))
        return question.value((same_as[:lives] == 0).to(returns.dtype)), question.value(
            without[:lives]
        )

    for part, some, answered in plan.answered():
        own[part.step], others[part.step] = of_part(part, some, answered)
    branched = plan.weight > 0
    return own.view_as(branched).where(branched, 1), others.view_as(branched).where(branched, 0)


@dataclass(frozen=True)
class Group:
    r"""Credit for whole sequences, compared with the n - 1 others of the same prompt.

    With the weights w_i that the estimator makes of the returns G_it of a prompt's n
    sequences,

        g_it = w_it x_it

    | | n w_it | unbiased |
    |---|---|---|
    | `Group(arsm.RLOO(n))`, short `Group(n)` | G_it - mean_{j != i} G_jt | yes |
    | `Group(arsm.OTB(n))` | G_it - sum_{j != i} W_jt G_jt / sum_{j != i} W_jt | yes |
    | `Group(arsm.DrGRPO(n))` | G_it - mean_j G_jt | up to the factor (n - 1)/n |
    | `Group(arsm.GRPO(n))` | (G_it - mean_j G_jt) / (std_j G_jt + 1e-4) | no |

    W_jt = sum_{s <= t} |x_js|^2 makes the optimal token baseline; GRPO is without its
    division by length. The references are the estimators'.

    Attributes:
        estimator: One with `paths`, whose samples are whole sequences; a number n
            stands for `arsm.RLOO(n)`.
    """

    estimator: Estimator

    def __init__(self, estimator: Estimator | int) -> None:
        if isinstance(estimator, int):
            if estimator < 2:
                raise ValueError(
                    f"Group compares at least 2 sequences per prompt, but n = {estimator}."
                )
            estimator = RLOO(estimator)
        require(estimator, "Group", "mean", "paths")
        object.__setattr__(self, "estimator", estimator)

    @property
    def samples(self) -> int:
        return self.estimator.paths

    @property
    def unbiased(self) -> bool:
        return self.estimator.unbiased

    def check(self, logits: Tensor) -> None:
        """Nothing to check: a group fits every model."""

    @property
    def draws(self) -> int:
        return 1

    def credit(self, batch: Batch) -> TokenCredit:
        n = self.samples
        returns = batch.returns.unflatten(0, (-1, n)).movedim(1, 0)  # [n, N, T]
        energies = None
        if self.estimator.weighs_energy:
            energies = self._energy(batch).unflatten(0, (-1, n)).movedim(1, 0)
        weight = self.estimator.weights(returns, energies).movedim(0, 1).flatten(0, 1)  # [M, T]
        return TokenCredit(
            batch.tokens.unsqueeze(-1), weight.masked_fill(~batch.mask, 0).unsqueeze(-1)
        )

    def _energy(self, batch: Batch) -> Tensor:
        """W [M, T]; padding adds nothing."""
        found = torch.zeros_like(batch.returns)
        for some in batch.parts():
            # slices are views: what is written into them is written into the whole
            of_rows = found[some].view(-1)
            tokens = batch.tokens[some].flatten()
            for states, logits in batch.logits_of(some, batch.mask):
                p = token_probabilities(logits, batch.temperature)
                of_rows[states] = energy(p, tokens[states].unsqueeze(0)).squeeze(0).to(found.dtype)
        return found.cumsum(-1)
