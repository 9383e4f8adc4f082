"""Everything that is known about a trainer's loss that has the wrong gradient: its means, and the
answers to questions about its tokens' weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from arsm.referee.language import AFTER, CONTEXTS, INSIDE, PROMPTS
from arsm.referee.weights import (
    LENGTHS_2_3_1,
    NEAR,
    PAIR,
    REWARDS,
    TEMPERATURES,
    Interrogation,
    Weights,
)
from arsm.referee.worlds import Objective, Setting, TrainerBatch, TrainerLoss


@dataclass(frozen=True, eq=False)
class Mean:
    """A loss's mean gradient in one setting, and what it should be."""

    setting: Setting
    mean: Tensor
    """[STATES, V]."""
    truth: Tensor
    """[STATES, V]."""
    rounding: float

    @property
    def scale(self) -> float:
        """The length along the truth; nan where the truth is 0."""
        square = float(self.truth.square().sum())
        # with the reward 0 the truth is 0, and has no direction that a length could be measured
        # along
        return float((self.mean * self.truth).sum()) / square if square > 1e-12 else float("nan")

    @property
    def direction(self) -> float:
        """The cosine of the angle between the two; nan where either is 0."""
        sizes = float(self.mean.norm() * self.truth.norm())
        return float((self.mean * self.truth).sum()) / sizes if sizes > 1e-12 else float("nan")

    def agrees(self, prediction: Tensor) -> bool:
        return bool(((self.mean - prediction).abs() <= self.rounding).all())


class Evidence:
    """Everything that an explanation may look at; asked for only when it is."""

    def __init__(
        self, loss: TrainerLoss, objective: Objective, means: Sequence[Mean], sign: int
    ) -> None:
        self.loss = loss
        self.objective = objective
        self.means = means
        self.sign = sign
        self.ask = Interrogation(loss, objective, sign)

    @cached_property
    def base(self) -> Weights:
        return self.ask.weights()

    @cached_property
    def by_temperature(self) -> dict[float, Weights]:
        """The weights, if ln p is taken at each temperature."""
        # the objective's own may lie between two points of the grid
        temperatures = sorted({*TEMPERATURES, self.objective.temperature})
        return {t: self.ask.weights(temperature=t) for t in temperatures}

    @cached_property
    def slopes(self) -> Tensor:
        return self.ask.slopes()

    def differs(
        self, other: Weights, rows: Sequence[int] | slice = slice(None), factor: float = 1.0
    ) -> bool:
        """Whether first tokens of these rows have other weights than in the base batch."""
        # first tokens alone: every answer has one, whatever happens to its length
        expected = factor * self.base.tokens[rows, 0]
        difference = (expected - other.tokens[rows, 0]).abs()
        return bool((difference > NEAR * max(self.base.largest * factor, 1e-3)).any())

    @cached_property
    def padding(self) -> bool:
        """Whether columns of padding behind the answers matter."""
        return self.differs(self.ask.weights(setting=replace(PAIR, padding=2)))

    @cached_property
    def prompt_padding(self) -> bool:
        return self.differs(self.ask.weights(setting=replace(PAIR, prompt_padding=2)))

    @cached_property
    def shorter(self) -> Weights:
        """The first answer has 1 token instead of 2; its reward stays."""
        numbers = LENGTHS_2_3_1.clone()
        # answer 0 of the first prompt is the end token alone
        numbers[0, 0] = 0
        return self.ask.weights(numbers=numbers)

    @cached_property
    def own_length(self) -> bool:
        return self.differs(self.shorter, [0])

    @cached_property
    def other_lengths(self) -> bool:
        return self.differs(self.shorter, [1, 2, 3, 4, 5])

    @cached_property
    def prompt_length(self) -> bool:
        """Whether answers of the same lengths and rewards get other weights after a
        longer prompt.
        """
        # answers 1 to 3 have 2, 3 and 3 tokens after either prompt
        numbers = torch.tensor([[1, 2, 3]])
        found = [
            self.ask.weights(
                setting=replace(PAIR, prompts=(p,)), numbers=numbers, rewards=REWARDS[:3]
            )
            for p in range(len(PROMPTS))
        ]
        # an answer that is left out altogether is the mask's matter, not the length's
        if found[0].left_out(found[1]):
            return False
        difference = (found[0].tokens[:, 0] - found[1].tokens[:, 0]).abs().max()
        return float(difference) > found[0].nothing

    @cached_property
    def other_prompts(self) -> bool:
        """Whether the rewards of another prompt's answers matter."""
        rewards = REWARDS.clone()
        # other mean, other deviation and other order than before: no normalisation hides the change
        rewards[3:] = torch.tensor([1.5, -0.2, 0.3])
        return self.differs(self.ask.weights(rewards=rewards), [0, 1, 2])

    @cached_property
    def offset(self) -> bool:
        return self.differs(self.ask.weights(rewards=REWARDS + 1))

    @cached_property
    def not_proportional(self) -> bool:
        """Whether ten times the rewards give other weights than ten times these."""
        # weights that are linear in the rewards, as those of every plain baseline are, pass
        return self.differs(self.ask.weights(rewards=10 * REWARDS), factor=10.0)

    @cached_property
    def graph(self) -> bool:
        return self.ask.rows_share_a_graph()

    def at_ratio(self, ratio: float) -> Weights:
        """The weights where the model finds every token `ratio` times as likely as the
        sampler did.
        """
        # the sampler's ln p moves, not the model's: the scores stay those of the base batch
        shift = float(torch.tensor(ratio).log())

        def change(batch: TrainerBatch) -> TrainerBatch:
            return replace(batch, sampler_log_p=batch.sampler_log_p - shift * batch.mask)

        return self.ask.weights(change=change)

    def depends(self) -> Iterator[str]:
        """Name all that the weights depend on; a baseline may depend on some of it."""
        for words, found in (
            # functions, since each of these asks the loss about further batches, which may fail
            ("the answer's own length", lambda: self.own_length),
            ("the lengths of other answers", lambda: self.other_lengths),
            ("the columns of padding", lambda: self.padding or self.prompt_padding),
            ("the prompt's length", lambda: self.prompt_length),
            ("the rewards of other prompts", lambda: self.other_prompts),
            ("the reward's offset", lambda: self.offset),
            ("the reward's scale, other than in proportion", lambda: self.not_proportional),
        ):
            try:
                if found():
                    yield words
            # somebody else's code may raise anything, here at a batch of no setting
            except Exception:
                continue


def where(means: Sequence[Mean], factor: float = 1.0) -> str:
    """The share of the squared error by position, in words."""
    # members of the family of rewards differ in scale by 400: the largest would hide the others
    error = sum(
        (m.mean - factor * m.truth).square().sum(-1) for m in means if m.setting.role in ("", "f")
    )
    # no mean at all gives the number 0, and no error gives no shares
    if not isinstance(error, Tensor) or not float(error.sum()):
        return ""
    shares: dict[str, float] = {}
    names = ("first token", "second token", "third token")
    for context, row in CONTEXTS.items():
        if row in INSIDE:
            name = "inside the prompt"
        else:
            # the first tokens of the two prompts differ, so that exactly one fits
            prompt = next(p for p in PROMPTS if context[: len(p)] == p)
            name = names[len(context) - len(prompt)]
        shares[name] = shares.get(name, 0.0) + float(error[row])
    shares["behind the end"] = float(error[AFTER])
    total = sum(shares.values())
    return ", ".join(
        # what rounds to 0% is not worth a word
        f"{name} {share / total:.0%}"
        for name, share in shares.items()
        if share / total >= 0.005
    )
