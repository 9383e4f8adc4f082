r"""Credit in the logits of the whole vocabulary, for estimators without `weights` and
for critics, in parts.

Such an estimator reads all V logits of a state; its noise, its queries and its gradient
are as large. None of them is kept. The live states are cut into blocks, whose logits
come from passes over the true sequences, and the estimator's question is posed in every
block as often as it is needed:

1. to count what it asks for, and to list it,
2. with a budget, keep-probabilities or a chance: again, to list what is played of it,
3. in the backward pass, to turn the returns into a gradient.

Each time it is the same question: of a block the generator's state before its noise is
kept, not the noise. An estimator's noise has a static shape, so a block whose logits
are known for some states only, since others belong to another micro-batch, has the same
noise there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from arsm import policy
from arsm.checks import check_logits
from arsm.question import Others, Question, pose
from arsm.sequences.batch import Batch
from arsm.sequences.credit import versions_of
from arsm.types import Estimator

CELLS = 1 << 20
"""Most logits of a block. An estimator makes up to twenty tensors of that size, 8 MB
each in float64.
"""

Critic = Callable[[Tensor, Tensor], Tensor]
"""`critic(prompts [n, P], tokens [n, T]) -> h [n, T, V]`."""
Chance = Callable[[Batch, policy.Rollouts], Tensor]
"""`chance(batch, rollouts) -> rho [R]`, in (0, 1]."""


class Block(NamedTuple):
    """Consecutive live states with their logits."""

    start: int
    """The number of live states before it."""
    states: Tensor
    """[s] int64: their indices in [M T]."""
    logits: Tensor
    """[s, 1, V]: the logits that the tokens were drawn from."""


class PlayedQueries(NamedTuple):
    """The rollouts that an estimator asks for in S live states, as far as they are played.

    Attributes:
        weight: [S] float64: each state's weight in the gradient.
        place: [R] int64: the live state of each rollout, ascending.
        query: [R] int64: which of the estimator's queries it answers.
        action: [R] int64: its first token.
        chance: [R] float64: the probability with which it was played.
        guess: [R] float64: the critic's h of it; 0 without a critic.
        share: [R] float64: its share in the value of its state.
        own: [S] float64: the share of the true token in that value.
        known: [S] float64: what the critic's h of all rollouts add to it.
    """

    weight: Tensor
    place: Tensor
    query: Tensor
    action: Tensor
    chance: Tensor
    guess: Tensor
    share: Tensor
    own: Tensor
    known: Tensor


class _ChosenRollouts(NamedTuple):
    """The choice of rollouts."""

    chance: Chance | None
    weight: Tensor
    """[S]."""
    counts: Tensor
    """[S]: what is asked in every live state."""
    whole: Tensor
    """[M, T]: the weights of all states."""

    def rollouts(self, block: Block, others: Others, log_prob: Tensor) -> policy.Rollouts:
        """The rollouts of a block, as a chance gets them."""
        width = self.whole.shape[1]
        state = block.states[others.row]
        stop = block.start + block.states.shape[0]
        return policy.Rollouts(
            episode=state // width,
            step=state % width,
            action=others.point,
            query=others.query,
            weight=self.whole,
            played=block.states,
            row=others.row,
            pseudo_actions=self.counts[block.start : stop],
            parts=(),
            log_prob=log_prob,
        )


class Vocabulary:
    """The questions of an estimator in the live states of a batch, posed block by block."""

    def __init__(self, estimator: Estimator, batch: Batch, critic: Critic | None) -> None:
        self.estimator = estimator
        self.batch = batch
        self.critic = critic
        self.states = batch.mask.flatten().nonzero().squeeze(-1)
        """[S]: indices of the live states in [M T]."""
        # the same noise is drawn again in backward, from a state that only a generator has
        self.generator = batch.generator or _seeded(batch.tokens.device)
        self.before: list[Tensor] = []
        """The generator's state before the noise of each block."""
        self.size = 0
        """States per block, known with the first logits."""
        self._vocabulary = 0

    # ---------------------------------------------------------------- what is asked

    def ask(self, budget: int | None, keep: Tensor | None, chance: Chance | None) -> PlayedQueries:
        """Pose every question, and list the rollouts that are played."""
        everything = budget is None and keep is None and chance is None
        counts = []
        listed = []
        for block in self._blocks():
            question = self._first(block)
            others = question.others()
            counts.append(torch.bincount(others.row, minlength=block.states.shape[0]))
            # what is left out by a budget or by chance may be as large as the logits of all states
            if everything:
                listed.append(self._list(block, question, others))
        # a budget is spent over all blocks: nothing is chosen before all are counted
        counted = torch.cat(counts)
        weight = policy.step_weights(
            counted, self.states, self.batch.mask.shape, budget, keep, self.generator
        )
        if not everything:
            plan = _ChosenRollouts(chance, weight, counted, self.whole(weight, 0))
            for block in self._blocks():
                question = self._again(block.start // self.size, block.states, block.logits)
                others = _kept(question.others(), weight[block.start :])
                listed.append(self._list(block, question, others, plan))
        joined = {name: torch.cat([part[name] for part in listed]) for name in listed[0]}
        return PlayedQueries(weight, **joined)

    def _list(
        self,
        block: Block,
        question: Question,
        others: Others,
        plan: _ChosenRollouts | None = None,
    ) -> dict[str, Tensor]:
        """The rollouts of one block that are played: its part of `PlayedQueries`, but for the
        weight.
        """
        shares = question.shares()
        share = shares[others.query, others.row]
        action = others.point.squeeze(-1)
        # the true token is the first query; a view would keep the shares of all queries
        own = shares[0].clone()
        known = torch.zeros_like(own)
        listed = {
            "place": others.row + block.start,
            "query": others.query,
            "action": action,
            "chance": torch.ones_like(share),
            "guess": torch.zeros_like(share),
            "share": share,
        }
        if plan is not None and plan.chance is not None:
            log_p = block.logits.squeeze(-2).double().log_softmax(-1)
            rollouts = plan.rollouts(block, others, log_p[others.row, action])
            listed["chance"] = checked_chance(plan.chance(self.batch, rollouts), action.shape)
            if self.critic is not None:
                listed["guess"] = self.guesses(block.states)[others.row, action].double()
            known = known.index_add(0, others.row, share * listed["guess"])
            # one coin per rollout, tossed once: the gradient only knows what was played
            coin = tossed(listed["chance"], self.generator)
            listed = {name: each[coin] for name, each in listed.items()}
        return {**listed, "own": own, "known": known}

    def whole(self, x: Tensor, rest: float) -> Tensor:
        """Numbers of the live states [S] as [M, T], the others' being `rest`."""
        shape = self.batch.mask.shape
        every = torch.full((shape.numel(),), rest, dtype=x.dtype, device=x.device)
        return every.index_put((self.states,), x).view(shape)

    def value_parts(self, asked: PlayedQueries, rollout_returns: Tensor) -> tuple[Tensor, Tensor]:
        """V_t = own_t Q_t + others_t of `Branch`, both [M, T], from the rollouts' returns [R]."""
        # R' - h of a rollout that was played; h of all of them is in `known`
        gained = (rollout_returns - asked.guess) / asked.chance
        others = asked.known.index_add(0, asked.place, asked.share * gained)
        # without rollouts a state's value is Q_t
        branched = asked.weight > 0
        own = torch.where(branched, asked.own, 1)
        return self.whole(own, 1), self.whole(torch.where(branched, others, 0), 0)

    # ---------------------------------------------------------------- the gradient

    def gradient(
        self,
        asked: PlayedQueries,
        returns: Tensor,
        rollout_returns: Tensor,
        states: Tensor,
        logits: Tensor,
    ) -> Tensor:
        """The gradient in the scaled logits of some states, [n, V].

        Args:
            asked: what was played.
            returns: [M T]: the returns of the true sequences from each state on.
            rollout_returns: [R].
            states: [n] int64: indices of the states in [M T]; others than live ones have no
                gradient.
            logits: [n, V]: their logits, which the tokens were drawn from.
        """
        whole = torch.zeros_like(logits)
        # live states ascend: a search tells which of them each state is, if any
        place = torch.searchsorted(self.states, states).clamp_max(self.states.shape[0] - 1)
        live = (self.states[place] == states).nonzero().squeeze(-1)
        number = place[live] // self.size
        for each in number.unique().tolist():
            some = live[number == each]
            whole[some] = self._of_block(
                each, asked, returns, rollout_returns, place[some], logits[some]
            )
        return whole

    def _of_block(
        self,
        number: int,
        asked: PlayedQueries,
        returns: Tensor,
        rollout_returns: Tensor,
        place: Tensor,
        logits: Tensor,
    ) -> Tensor:
        """The gradient [n, V] in some states of one block: `place` [n] among the live states."""
        start = number * self.size
        states = self.states[start : start + self.size]
        here = place - start
        # states of another micro-batch stand in with logits of 0
        whole = logits.new_zeros(states.shape[0], 1, logits.shape[-1])
        whole[here] = logits.unsqueeze(-2)
        question = self._again(number, states, whole)

        edges = torch.tensor([start, start + states.shape[0]], device=place.device)
        first, last = torch.searchsorted(asked.place, edges).tolist()
        some = slice(first, last)
        answered = Others(
            asked.place[some] - start, asked.query[some], asked.action[some].unsqueeze(-1)
        )
        true = returns[states]
        values = rollout_returns[some]
        h = None
        if self.critic is not None:
            h = self.guesses(states)
            tokens = self.batch.tokens.flatten()[states]
            true = true - h.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            values = values - h[answered.row, asked.action[some]]
        values = values / asked.chance[some]
        # less its guess, a rollout that chance left out counts as 0
        every = question.spread_others(answered, values, true, rest=0.0)
        weight = asked.weight[start : start + states.shape[0]]
        gradient = question.credit(every, weight).gradient
        assert gradient is not None  # only estimators that need f's gradient return None
        gradient = gradient.squeeze(-2)[here].detach().to(logits.dtype)
        if h is not None:
            # what the critic knows without a rollout: the mean of its guesses is taken exactly
            p = logits.softmax(-1)
            h = h[here]
            gradient += p * (h - (p * h).sum(-1, keepdim=True))
        return gradient

    @torch.no_grad()
    def guesses(self, states: Tensor) -> Tensor:
        """The critic's h [n, V] in some states [n] of [M T]."""
        assert self.critic is not None
        width = self.batch.tokens.shape[1]
        # the critic reads whole sequences: each once, however many of its states are asked for
        rows, place = (states // width).unique(return_inverse=True)
        here = place * width + states % width
        prompts = self.batch.prompts[rows]
        tokens = self.batch.tokens[rows]
        if hasattr(self.critic, "headed"):
            # as a model's: a mask only where there is padding
            mask = self.batch.prompt_mask
            padded = () if mask is None else (mask[rows],)
            whole = self.critic.headed(prompts, tokens, *padded)  # pyright: ignore[reportFunctionMemberAccess]
            h = whole.head(whole.hidden.flatten(0, 1)[here])
            expected = [whole.vocabulary]
            returned = list(h.shape[1:])
        else:
            h = self.critic(prompts, tokens)
            expected = [*tokens.shape, self._vocabulary]
            returned = list(h.shape)
            h = h.flatten(0, 1)[here] if returned == expected else h
        if returned != expected or not bool(h.isfinite().all()):
            raise ValueError(
                f"critic must return finite values {expected}, one per token of the vocabulary, "
                f"but returned {returned}{' with NaN or infinities' * (returned == expected)}."
            )
        return h

    # ---------------------------------------------------------------- questions

    def _blocks(self) -> Iterator[Block]:
        """All blocks, by one pass over the true sequences."""
        start = filled = 0
        buffer: Tensor | None = None
        for some in self.batch.parts():
            for _, logits in self.batch.logits_of(some, self.batch.mask):
                self._vocabulary = logits.shape[-1]
                self.size = max(1, CELLS // self._vocabulary)
                # blocks and passes are cut differently: a block may need two passes, or a pass fill
                # many blocks
                while logits.shape[0]:
                    if buffer is None:
                        left = self.states.shape[0] - start
                        buffer = logits.new_empty(min(self.size, left), self._vocabulary)
                    taken = logits[: buffer.shape[0] - filled]
                    logits = logits[taken.shape[0] :]
                    buffer[filled : filled + taken.shape[0]] = taken
                    filled += taken.shape[0]
                    if filled == buffer.shape[0]:
                        yield self._block(start, buffer)
                        start = start + filled
                        filled = 0
                        buffer = None

    def _block(self, start: int, logits: Tensor) -> Block:
        scaled = logits if self.batch.temperature == 1 else logits / self.batch.temperature
        return Block(start, self.states[start : start + logits.shape[0]], scaled.unsqueeze(-2))

    def _first(self, block: Block) -> Question:
        """The question in a block, with new noise."""
        check_logits(block.logits, read=True)
        self.before.append(self.generator.get_state())
        return self._pose(block.states, block.logits, self.generator)

    def _again(self, number: int, states: Tensor, logits: Tensor) -> Question:
        """The question in a block, with the noise that it had."""
        generator = torch.Generator(logits.device)
        generator.set_state(self.before[number])
        return self._pose(states, logits, generator)

    def _pose(self, states: Tensor, logits: Tensor, generator: torch.Generator) -> Question:
        true = self.batch.tokens.flatten()[states].unsqueeze(-1)
        return pose(self.estimator, logits, z=true, generator=generator)


@dataclass(frozen=True, eq=False)
class LogitCredit:
    """The gradient in the logits of all tokens, computed for some states when it is wanted.

    Attributes:
        vocabulary: Poses the questions.
        asked: The rollouts that were played.
        returns: [M, T]: the returns of the true sequences.
        rollout_returns: [R].
        factor: [M, T]: by which each state's gradient is multiplied; None for 1.
    """

    vocabulary: Vocabulary
    asked: PlayedQueries
    returns: Tensor
    rollout_returns: Tensor
    factor: Tensor | None = None
    _versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_versions", versions_of(self.vocabulary.critic))

    def credited(self) -> Tensor:
        """[M, T] bool: the states that may have a credit."""
        batch = self.vocabulary.batch
        # a critic has something to say in every state, rollouts or not
        if self.vocabulary.critic is not None:
            return batch.mask
        return self.vocabulary.whole(self.asked.weight, 0) > 0

    def scaled(self, factor: Tensor) -> LogitCredit:
        """With every state's gradient multiplied by a factor [M, T]."""
        return replace(self, factor=factor if self.factor is None else self.factor * factor)

    @torch.no_grad()
    def __call__(self, logits: Tensor, row: Tensor, step: Tensor) -> Tensor:
        """The gradient [n, V] in the logits [n, V], before temperature, of states row [n]
        and step [n].
        """
        if versions_of(self.vocabulary.critic) != self._versions:
            raise RuntimeError(
                "The critic was changed between sequences.estimate and backward, which computes "
                "the gradient with it; call backward before the critic learns."
            )
        batch = self.vocabulary.batch
        states = row * batch.tokens.shape[1] + step
        scaled = logits.detach()
        scaled = scaled if batch.temperature == 1 else scaled / batch.temperature
        gradient = self.vocabulary.gradient(
            self.asked, self.returns.flatten(), self.rollout_returns, states, scaled
        )
        # the estimator saw scaled logits: the chain rule for those before temperature
        gradient = gradient.div_(batch.temperature)
        if self.factor is None:
            return gradient
        return gradient * self.factor[row, step].unsqueeze(-1).to(gradient.dtype)


def checked_chance(chance: Tensor, shape: torch.Size) -> Tensor:
    """Probabilities [R] float64 in (0, 1], one per rollout."""
    if chance.shape != shape or not bool(((chance > 0) & (chance <= 1)).all()):
        raise ValueError(
            f"chance must return {list(shape)} probabilities in (0, 1], one per rollout."
        )
    return chance.double()


def tossed(chance: Tensor, generator: torch.Generator | None) -> Tensor:
    """[R] bool: which rollouts are played."""
    return torch.empty_like(chance).uniform_(generator=generator) < chance


def _kept(others: Others, weight: Tensor) -> Others:
    """Without the queries of states that are left out."""
    kept = weight[others.row] > 0
    return Others(others.row[kept], others.query[kept], others.point[kept])


def _seeded(device: torch.device) -> torch.Generator:
    """A generator whose state can be kept, seeded by the default one."""
    # from the default generator, so that torch.manual_seed still decides
    seed = int(torch.randint(2**62, (), device=device))
    return torch.Generator(device).manual_seed(seed)
