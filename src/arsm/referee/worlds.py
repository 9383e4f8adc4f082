"""Batches of answers as a trainer's loss gets them, from a language model that can be enumerated;
and the exact gradient of what the loss claims to follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from arsm.referee.language import (
    ANSWERS,
    END,
    IMPOSSIBLE,
    MAX_TOKENS,
    PAD,
    PLACES,
    PROMPTS,
    LanguageModel,
    Seen,
    random_table,
)

REWARDS = ((0.6, -0.5, 0.9, 0.1), (-0.4, 0.8, -0.2, 0.5))


@dataclass(frozen=True, eq=False)
class TrainerBatch:
    """A batch as a trainer of language models has it: B prompts with n answers each, in
    N = B n rows.

    Rows of one prompt stand together. Answers were drawn by the sampler at
    `temperature`.
    """

    model: Callable[..., Tensor]
    """`model(tokens [N, L], attention_mask [N, L]) -> logits [N, L, V]`, with the graph
    to what is trained.
    """
    prompts: Tensor
    """[N, P] int64, padded on the left."""
    prompt_mask: Tensor
    """[N, P] int64."""
    completions: Tensor
    """[N, T] int64, padded on the right; the end token is part of an answer."""
    mask: Tensor
    """[N, T] int64, 1 at an answer's tokens."""
    rewards: Tensor
    """[N]."""
    group: Tensor
    """[N] int64, the number of the prompt in the batch."""
    answers: int
    """n."""
    sampler_log_p: Tensor
    """[N, T]: ln p of the tokens under the sampler; 0 at padding."""
    reference_log_p: Tensor
    """[N, T]: ln p of the tokens under the reference; 0 at padding."""
    reference_model: Callable[..., Tensor]
    """The reference, called as the model is."""
    temperature: float = 1.0
    beta: float = 0.0
    max_tokens: int = MAX_TOKENS
    pad: int = PAD
    end: int = END

    def logits(self) -> Tensor:
        """[N, T, V]: the model's logits of the answers' tokens, not divided by the temperature."""
        # one pass over prompt and answer; the logits of a token stand one position before it
        tokens = torch.cat([self.prompts, self.completions], 1)
        mask = torch.cat([self.prompt_mask, self.mask], 1)
        return self.model(tokens, mask)[:, self.prompts.shape[1] - 1 : -1]

    def log_p(self, temperature: float | None = None) -> Tensor:
        """[N, T]: the model's ln p of the answers' tokens, with its graph; at padding
        whatever the model says there.
        """
        scaled = self.logits() / (self.temperature if temperature is None else temperature)
        return scaled.log_softmax(-1).gather(-1, self.completions.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class Objective:
    """The claim of a loss: it follows the gradient of E[reward] - beta KL(model ||
    reference), averaged over the prompts.

    Both are those of whole answers, at the temperature at which answers are drawn.
    """

    beta: float = 0.0
    """Weight of the divergence from the reference."""
    temperature: float = 1.0
    """The sampler's temperature, and that of the distribution that is trained."""
    stale: bool = False
    """Whether answers come from an older model than the one trained; their ln p under
    it are known.
    """

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive, but is {self.temperature}.")


@dataclass(frozen=True, eq=False)
class Setting:
    """One experiment: which prompts, how many answers each, which rewards."""

    name: str
    prompts: tuple[int, ...]
    answers: int
    role: str = ""
    """"f", "f/20", "20f", "f+100" or "0" for the family of rewards; empty outside of it."""
    scale: float = 1.0
    constant: float = 0.0
    padding: int = 0
    """Columns of padding behind the longest answer."""
    prompt_padding: int = 0
    """Columns of padding before the longest prompt."""
    own_reference: bool = False
    """Whether the reference is the model itself: the divergence is then 0."""

    @property
    def sizes(self) -> str:
        return f"{len(self.prompts)}, {self.answers}"

    def rewards(self) -> Tensor:
        """[prompts, answers of a prompt] float64."""
        found = torch.tensor([REWARDS[p] for p in self.prompts], dtype=torch.float64)
        return self.scale * found + self.constant


SETTINGS = (
    Setting("two prompts, two answers", (0, 1), 2),
    Setting("three answers", (0,), 3, "f"),
    Setting("the same reward / 20", (0,), 3, "f/20", scale=0.05),
    Setting("the same 20 rewards", (0,), 3, "20f", scale=20.0),
    Setting("the same reward + 100", (0,), 3, "f+100", constant=100.0),
    Setting("the same with reward 0", (0,), 3, "0", scale=0.0),
    Setting("a longer prompt", (1,), 2),
    Setting("more padding", (0,), 2, padding=2, prompt_padding=1),
    Setting("four answers", (0,), 4),
)
NEUTRAL = tuple(
    Setting(f"{s.name}, reference = model", s.prompts, s.answers, own_reference=True)
    for s in SETTINGS
    if not s.role
)
"""For objectives with a divergence: the same without one."""


@dataclass(eq=False)
class World:
    """The tables of one audit, and everything that is known about them by enumeration."""

    objective: Objective
    table: Tensor = field(default_factory=lambda: random_table(1))
    """[STATES, V] float64: what is trained."""
    reference: Tensor = field(default_factory=lambda: random_table(2))
    sampler: Tensor = field(init=False)

    def __post_init__(self) -> None:
        step = torch.zeros_like(self.table)
        if self.objective.stale:
            step = 0.5 * random_table(3).clamp_min(-5)
        # impossible tokens stay so, or the sampler would draw answers that are not in the list
        self.sampler = self.table + step.masked_fill(self.table <= IMPOSSIBLE / 2, 0.0)

    @property
    def dtype(self) -> torch.dtype:
        return torch.get_default_dtype()

    def answer_log_p(self, table: Tensor) -> Tensor:
        """[prompts, answers, T]: ln p of every answer's tokens, 0 behind the end."""
        rows, tokens, live = PLACES
        return (table / self.objective.temperature).log_softmax(-1)[rows, tokens] * live

    def truth(self, setting: Setting) -> Tensor:
        """[STATES, V] float64: the gradient of the objective."""
        table = self.table.clone().requires_grad_()
        with torch.enable_grad():
            chosen = list(setting.prompts)
            log_p = self.answer_log_p(table)[chosen].sum(-1)
            reference = table if setting.own_reference else self.reference
            # of whole answers: the sum over tokens is taken before the expectation
            divergence = log_p - self.answer_log_p(reference).detach()[chosen].sum(-1)
            # the gradient of a divergence from itself is 0, whichever of the two is detached
            value = setting.rewards() - self.objective.beta * divergence
            # by enumeration: the gradient goes through the probabilities and the divergence
            expectation = (log_p.exp() * value).sum(-1).mean()
        return torch.autograd.grad(expectation, table)[0]

    def outcomes(self, setting: Setting) -> tuple[Tensor, Tensor]:
        """Every batch of a setting as numbers of answers [batches, B, n], and its
        probability [batches].
        """
        count = len(setting.prompts)
        n = setting.answers
        numbers = torch.tensor(list(product(range(len(ANSWERS[0])), repeat=count * n))).view(
            -1, count, n
        )
        q = self.answer_log_p(self.sampler).sum(-1).exp()[list(setting.prompts)]  # [B, answers]
        rows = torch.arange(count).view(1, -1, 1)
        return numbers, q[rows, numbers].flatten(1).prod(-1)

    def batch(
        self,
        setting: Setting,
        numbers: Tensor,
        table: Tensor,
        rewards: Tensor | None = None,
        seen: list[Seen] | None = None,
    ) -> TrainerBatch:
        """The batch of the answers with these numbers [B, n]; `table` is the one that
        the loss differentiates.
        """
        rows = _rows(
            setting.prompts,
            setting.padding,
            setting.prompt_padding,
            tuple(map(tuple, numbers.tolist())),
        )
        width = rows.completions.shape[1]

        def log_p(of: Tensor) -> Tensor:
            found = self.answer_log_p(of)[rows.prompt, rows.answer]
            # the batch is as wide as its own longest answer and its padding
            return torch.nn.functional.pad(found, (0, max(0, width - MAX_TOKENS)))[:, :width].to(
                self.dtype
            )

        if rewards is None:
            rewards = setting.rewards()[rows.group, rows.answer]
        # the difference of the sampler from the model is kept where the model is moved
        moved = table.detach().double()
        sampler = log_p(moved + self.sampler - self.table)
        reference = moved if setting.own_reference else self.reference
        return TrainerBatch(
            LanguageModel(table, seen),
            rows.prompts,
            rows.prompt_mask,
            rows.completions,
            rows.mask,
            rewards.to(self.dtype),
            rows.group,
            setting.answers,
            sampler,
            log_p(reference),
            LanguageModel(reference.to(self.dtype)),
            self.objective.temperature,
            self.objective.beta,
        )


class _Answers(NamedTuple):
    """The part of a batch that depends on neither rewards nor models."""

    prompts: Tensor
    prompt_mask: Tensor
    completions: Tensor
    mask: Tensor
    group: Tensor
    prompt: Tensor
    """[N]: the number of the prompt among all of them."""
    answer: Tensor
    """[N]: the number of the answer among the prompt's."""


# the same batches are asked for with many rewards and models
@lru_cache(maxsize=4096)
def _rows(
    prompts: tuple[int, ...],
    padding: int,
    prompt_padding: int,
    numbers: tuple[tuple[int, ...], ...],
) -> _Answers:
    n = len(numbers[0])
    asked = [PROMPTS[p] for p in prompts for _ in range(n)]
    answers = [ANSWERS[p][z] for p, row in zip(prompts, numbers, strict=True) for z in row]
    left = max(map(len, asked)) + prompt_padding
    width = max(map(len, answers)) + padding
    ids = torch.tensor([[PAD] * (left - len(p)) + list(p) for p in asked])
    completions = torch.tensor([[*a, *[PAD] * (width - len(a))] for a in answers])
    lengths = torch.tensor([len(a) for a in answers])
    mask = (torch.arange(width) < lengths.unsqueeze(-1)).long()
    group = torch.arange(len(prompts)).repeat_interleave(n)
    return _Answers(
        ids,
        (ids != PAD).long(),
        completions,
        mask,
        group,
        torch.tensor(prompts)[group],
        torch.tensor(numbers).flatten(),
    )


TrainerLoss = Callable[[TrainerBatch], Tensor]


def mean_gradient(loss: TrainerLoss, world: World, setting: Setting, sign: int = 1) -> Tensor:
    """[STATES, V] float64: the mean of the loss's gradient over all batches of a setting."""
    numbers, probability = world.outcomes(setting)
    total = torch.zeros_like(world.table)
    # one call per batch, as a trainer makes them: what a loss mixes inside a batch stays visible
    for chosen, weight in zip(numbers, probability.tolist(), strict=True):
        total += weight * sign * batch_gradient(loss, world, setting, chosen)
    return total


def batch_gradient(
    loss: TrainerLoss,
    world: World,
    setting: Setting,
    numbers: Tensor,
    table: Tensor | None = None,
    rewards: Tensor | None = None,
    seen: list[Seen] | None = None,
) -> Tensor:
    """[STATES, V] float64: the gradient of one batch's loss."""
    # float64 tables, and a loss in the type that its author computes in
    leaf = (world.table if table is None else table).to(world.dtype).requires_grad_()
    with torch.enable_grad():
        value = loss(world.batch(setting, numbers, leaf, rewards, seen))
    check_scalar(value)
    if not value.requires_grad:
        return torch.zeros_like(world.table)
    (found,) = torch.autograd.grad(value, [leaf], allow_unused=True)
    if not bool(value.isfinite()) or (found is not None and not bool(found.isfinite().all())):
        given = world.batch(setting, numbers, leaf, rewards).rewards.tolist()
        raise FloatingPointError(f"the loss or its gradient is not finite at the rewards {given}")
    return torch.zeros_like(world.table) if found is None else found.detach().double()


def check_scalar(value: object) -> None:
    """Refuse what backward could not be called on."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1:
        return
    found = f"the shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise TypeError(f"The loss must return a floating scalar tensor, but returned {found}.")
