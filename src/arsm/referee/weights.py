"""The weights by which a trainer's loss multiplies the tokens' ln p, read off the gradient
that reaches the model's logits.

A loss that is a function of the tokens' ln p sends c (onehot(y) - p) / temperature to
the logits of a token y. The number c is the token's weight: the referee changes one
thing of a batch at a time and looks at what the weights do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from arsm.referee.language import ANSWERS, MAX_TOKENS, PAD, PROMPTS, Seen
from arsm.referee.worlds import Objective, Setting, TrainerBatch, TrainerLoss, World, batch_gradient

Change = Callable[[TrainerBatch], TrainerBatch]
PAIR = Setting("two prompts, three answers", (0, 1), 3, own_reference=True)
LENGTHS_2_3_1 = torch.tensor([[1, 3, 0], [1, 2, 3]])
"""Numbers of answers: (2, 3, 1) tokens for the first prompt, (2, 3, 3) for the second."""
REWARDS = torch.tensor([0.9, -0.3, 0.4, 0.1, 0.7, -0.6])
TEMPERATURES = tuple(round(0.1 * k, 1) for k in range(3, 31))
NEAR = 2e-3
"""Relative difference below which two weights are the same, at float32."""


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of one batch's tokens, times the number of rows: a correct loss has
    its advantages here.
    """

    tokens: Tensor
    """[N, T]: nan where a token is certain and has no score, and behind the end."""
    lengths: Tensor
    """[N]."""
    prompt: float
    """The largest gradient at a position inside a prompt."""
    after: float
    """The largest gradient at a position behind the end of an answer."""
    misfit: float
    """The largest share of a position's gradient that is not a multiple of the score."""
    logits: Tensor
    """[N, T, V]: the model's, not divided by the temperature; 0 where a weight is nan."""
    chosen: Tensor
    """[N, T] int64: the answers' tokens."""

    @property
    def largest(self) -> float:
        known = self.tokens[self.tokens.isfinite()]
        return float(known.abs().max()) if known.numel() else 0.0

    @property
    def nothing(self) -> float:
        """The size up to which a weight counts as 0."""
        # rewards are of the order 1: a loss whose weights are all tiny has no weights at all
        return NEAR * max(self.largest, 1e-3)

    def left_out(self, other: Weights) -> bool:
        """Whether a first token has a weight in one of two batches and none in the other: a mean
        over tokens makes weights smaller, and leaves none out.
        """
        here = self.tokens[:, 0].abs() <= self.nothing
        there = other.tokens[:, 0].abs() <= self.nothing
        return bool((here != there).any())

    def log_p(self, temperature: float) -> Tensor:
        """[N, T]: ln p of the tokens at a temperature."""
        log_p = (self.logits / temperature).log_softmax(-1)
        return log_p.gather(-1, self.chosen.unsqueeze(-1)).squeeze(-1)


class _Reading:
    """The weights of a batch, collected from the gradients of all passes through the model."""

    def __init__(self, world: World, setting: Setting, numbers: Tensor, temperature: float) -> None:
        n = setting.answers
        self.table = world.table
        self.temperature = temperature
        self.p = (world.table / temperature).softmax(-1)
        self.prompts = [PROMPTS[p] for p in setting.prompts for _ in range(n)]
        self.answers = [
            ANSWERS[p][int(z)] for p, row in zip(setting.prompts, numbers, strict=True) for z in row
        ]
        self.count = len(self.answers)
        # A loss may reorder rows, or pass some of them: rows are found again by their tokens.
        self.places: dict[tuple[int, ...], list[int]] = {}
        for i in range(self.count):
            self.places.setdefault((*self.prompts[i], *self.answers[i]), []).append(i)
        self.used = dict.fromkeys(self.places, 0)
        self.tokens = torch.full((self.count, MAX_TOKENS), torch.nan, dtype=torch.float64)
        self.total = torch.zeros(self.count, MAX_TOKENS, dtype=torch.float64)
        shape = (*self.tokens.shape, world.table.shape[-1])
        self.logits = torch.zeros(shape, dtype=torch.float64)
        self.chosen = torch.zeros(self.tokens.shape, dtype=torch.int64)
        self.inside = 0.0
        self.after = 0.0
        self.misfit = 0.0

    def add(self, ids: list[int], states: Tensor, gradient: Tensor) -> None:
        """One row of one pass: its tokens, the table's rows [L] and the gradient [L, V]."""
        key = tuple(token for token in ids if token != PAD)
        # not a whole answer
        if key not in self.places:
            return
        # equal answers are told apart by their order, in passes over some of the rows as well
        i = self.places[key][self.used[key] % len(self.places[key])]
        self.used[key] += 1
        start = next(t for t, token in enumerate(ids) if token != PAD)
        # the logits of a token stand one position before it
        first = start + len(self.prompts[i]) - 1
        last = first + len(self.answers[i])
        if first:
            self.inside = max(self.inside, float(gradient[:first].abs().max()))
        if last < len(ids):
            self.after = max(self.after, float(gradient[last:].abs().max()))
        for t, token in enumerate(self.answers[i]):
            self._add_token(i, t, token, int(states[first + t]), gradient[first + t])

    def _add_token(self, i: int, t: int, token: int, state: int, gradient: Tensor) -> None:
        score = -self.p[state] / self.temperature
        score[token] += 1 / self.temperature
        square = float(score.square().sum())
        # a certain token has no score, and nothing is known about its weight
        if square < 1e-8:
            return
        weight = float((gradient * score).sum()) / square
        # a loss of several terms may pass the model once for each: their weights add up
        self.total[i, t] += weight
        self.tokens[i, t] = self.total[i, t]
        self.logits[i, t] = self.table[state]
        self.chosen[i, t] = token
        size = float(gradient.norm())
        # of a gradient that is rounding, the direction is rounding too
        if size > 1e-5:
            self.misfit = max(self.misfit, float((gradient - weight * score).norm()) / size)

    def weights(self) -> Weights:
        lengths = torch.tensor([len(answer) for answer in self.answers])
        return Weights(
            self.tokens, lengths, self.inside, self.after, self.misfit, self.logits, self.chosen
        )


class Interrogation:
    """Ask a loss about single batches, without a divergence and with a sampler that is
    the model itself.
    """

    def __init__(self, loss: TrainerLoss, objective: Objective, sign: int) -> None:
        self.loss = loss
        self.sign = sign
        self.world = World(replace(objective, stale=False))

    def weights(
        self,
        *,
        setting: Setting = PAIR,
        numbers: Tensor = LENGTHS_2_3_1,
        rewards: Tensor = REWARDS,
        change: Change | None = None,
        temperature: float | None = None,
    ) -> Weights:
        """The weights of one batch; `change` is made to the batch before the loss sees it."""
        seen: list[Seen] = []
        batch_gradient(
            self._changed(change), self.world, setting, numbers, rewards=rewards, seen=seen
        )
        return self._read(seen, setting, numbers, temperature or self.world.objective.temperature)

    def _changed(self, change: Change | None) -> TrainerLoss:
        return self.loss if change is None else lambda batch: self.loss(change(batch))

    def _read(
        self, seen: list[Seen], setting: Setting, numbers: Tensor, temperature: float
    ) -> Weights:
        reading = _Reading(self.world, setting, numbers, temperature)
        for one in seen:
            # times the number of rows: a trainer's loss is a mean over them
            scaled = self.sign * reading.count * one.gradient.double()
            for row in range(len(one.tokens)):
                reading.add(one.tokens[row].tolist(), one.states[row], scaled[row])
        return reading.weights()

    def slopes(self, rewards: Tensor = REWARDS, step: float = 0.02) -> Tensor:
        """[N, N]: how the weight of row i's first token changes with row j's reward."""
        base = self.weights(rewards=rewards).tokens[:, 0]
        found = []
        for j in range(len(rewards)):
            moved = rewards.clone()
            # small beside the rewards' differences, so that ranks and maxima stay as they are
            moved[j] += step
            found.append((self.weights(rewards=moved).tokens[:, 0] - base) / step)
        return torch.stack(found, 1)

    def rows_share_a_graph(self) -> bool:
        """Whether one row's gradient depends on another row's ln p: a second derivative
        that correct losses lack.
        """
        outputs: list[Tensor] = []
        leaf = self.world.table.to(self.world.dtype).requires_grad_()
        batch = self.world.batch(PAIR, LENGTHS_2_3_1, leaf, REWARDS)
        model = batch.model

        def listening(tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            logits = model(tokens, attention_mask)
            if logits.requires_grad:
                outputs.append(logits)
            return logits

        count = len(REWARDS)
        with torch.enable_grad():
            value = self.loss(replace(batch, model=listening))
            # passes over some of the rows cannot be told apart here
            if not outputs or any(len(out) != count for out in outputs):
                return False
            first = torch.autograd.grad(value, outputs, create_graph=True, allow_unused=True)
            generator = torch.Generator().manual_seed(0)
            # a random direction: no part of the second derivative cancels
            for row in range(count):
                parts = [
                    (g[row] * torch.randn(g[row].shape, generator=generator)).sum()
                    for g in first
                    if g is not None
                ]
                total = torch.stack(parts).sum()
                if not total.requires_grad:
                    return False
                second = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
                others = torch.arange(count) != row
                if any(s is not None and float(s[others].abs().max()) > 1e-5 for s in second):
                    return True
        return False
