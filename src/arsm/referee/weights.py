"""What a trainer's loss multiplies each token's ln p by, read off the gradient that
reaches the model's logits.

A loss that is a function of the tokens' ln p sends c (onehot(y) - p) / temperature to
the logits of a token y. The number c is the token's weight: the referee changes one
thing of a batch at a time and looks at what the weights do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from arsm.referee.language import (
    ANSWERS,
    MAX_TOKENS,
    PAD,
    PROMPTS,
    Objective,
    Seen,
    Setting,
    TrainerBatch,
    TrainerLoss,
    World,
    batch_gradient,
)

Change = Callable[[TrainerBatch], TrainerBatch]
PAIR = Setting("two prompts, three answers", (0, 1), 3, own_reference=True)
LENGTHS_2_3_1 = torch.tensor([[1, 3, 0], [1, 2, 3]])
"""Numbers of answers: (2, 3, 1) tokens for the first prompt, (2, 3, 3) for the second."""
REWARDS = torch.tensor([0.9, -0.3, 0.4, 0.1, 0.7, -0.6])
TEMPERATURES = tuple(round(0.1 * k, 1) for k in range(3, 31))


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

    def log_p(self, temperature: float) -> Tensor:
        """[N, T]: ln p of the tokens at a temperature."""
        log_p = (self.logits / temperature).log_softmax(-1)
        return log_p.gather(-1, self.chosen.unsqueeze(-1)).squeeze(-1)


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
        n = setting.answers
        count = len(setting.prompts) * n
        prompts = [PROMPTS[p] for p in setting.prompts for _ in range(n)]
        answers = [
            ANSWERS[p][int(z)] for p, row in zip(setting.prompts, numbers, strict=True) for z in row
        ]
        places: dict[tuple[int, ...], list[int]] = {}
        for i in range(count):
            places.setdefault((*prompts[i], *answers[i]), []).append(i)
        used = dict.fromkeys(places, 0)
        tokens = torch.full((count, MAX_TOKENS), torch.nan, dtype=torch.float64)
        total = torch.zeros(count, MAX_TOKENS, dtype=torch.float64)
        logits = torch.zeros(*tokens.shape, self.world.table.shape[-1], dtype=torch.float64)
        chosen = torch.zeros(tokens.shape, dtype=torch.int64)
        inside = after = misfit = 0.0
        p = (self.world.table / temperature).softmax(-1)
        for one in seen:
            scaled = self.sign * count * one.gradient.double()
            for row in range(len(one.tokens)):
                ids = one.tokens[row].tolist()
                key = tuple(t for t in ids if t != PAD)
                if key not in places:
                    continue  # not a whole answer
                # equal answers are told apart by their order, in passes over some of the rows as
                # well
                i = places[key][used[key] % len(places[key])]
                used[key] += 1
                start = next(t for t, token in enumerate(ids) if token != PAD)
                first = start + len(prompts[i]) - 1
                last = first + len(answers[i])
                inside = max(inside, float(scaled[row, :first].abs().max()) if first else 0.0)
                after = max(
                    after, float(scaled[row, last:].abs().max()) if last < len(ids) else 0.0
                )
                for t, token in enumerate(answers[i]):
                    score = -p[one.states[row, first + t]] / temperature
                    score[token] += 1 / temperature
                    square = float(score.square().sum())
                    if square < 1e-8:
                        continue
                    gradient = scaled[row, first + t]
                    weight = float((gradient * score).sum()) / square
                    total[i, t] += weight
                    tokens[i, t] = total[i, t]
                    logits[i, t] = self.world.table[one.states[row, first + t]]
                    chosen[i, t] = token
                    size = float(gradient.norm())
                    if size > 1e-5:
                        misfit = max(misfit, float((gradient - weight * score).norm()) / size)
        lengths = torch.tensor([len(a) for a in answers])
        return Weights(tokens, lengths, inside, after, misfit, logits, chosen)

    def slopes(self, rewards: Tensor = REWARDS, step: float = 0.02) -> Tensor:
        """[N, N]: how the weight of row i's first token changes with row j's reward."""
        base = self.weights(rewards=rewards).tokens[:, 0]
        found = []
        for j in range(len(rewards)):
            moved = rewards.clone()
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
