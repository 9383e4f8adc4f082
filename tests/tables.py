"""Sequence models so small that all their sequences can be enumerated.

The first token of a prompt names the row of the batch, and every row has a table of its own: one
backward pass gives as many independent gradients as there are prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from arsm import sequences
from arsm.sequences.ends import Ends, Stop, forbid_ends, live_tokens, padding
from arsm.sequences.model import Decode

CODES = 29


class Table:
    """logits[row, code of the prefix]: tokens [N, L] -> [N, L, V], causal."""

    def __init__(self, rows: int, vocabulary: int, *, banned: int | None = None) -> None:
        generator = torch.Generator().manual_seed(11)
        table = 0.5 * torch.randn(1, CODES, vocabulary, generator=generator, dtype=torch.float64)
        if banned is not None:
            table[:, ::2, banned] = -torch.inf
        self.table = table.repeat(rows, 1, 1).requires_grad_()

    def __call__(self, tokens: Tensor) -> Tensor:
        code, codes = torch.zeros_like(tokens[:, 0]), []
        for token in tokens[:, 1:].unbind(-1):
            codes.append(code)
            code = (code * 5 + token + 1) % CODES
        return self.table[tokens[:, :1], torch.stack([*codes, code], -1)]


class InSlots(sequences.Recompute):
    """A table that is decoded in slots: its cache holds the tokens, so that a wrong row or column
    gives other probabilities.
    """

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.table = table.table

    def slots(self, dtype: torch.dtype | None = None) -> InSlots:
        return self

    def cache(self, rows: int, width: int) -> Tensor:
        return torch.zeros(1, 2, rows, 1, width, 1, dtype=torch.float64)

    def fill(self, cache: Tensor, tokens: Tensor, mask: Tensor | None) -> None:
        cache[0, 0, :, 0, : tokens.shape[1], 0] = tokens.double()

    def decoder(self, cache: Tensor) -> Decode:
        stored = cache[0, 0, :, 0, :, 0]
        row = torch.arange(stored.shape[0])

        def decode(tokens: Tensor, column: Tensor, first: Tensor) -> Tensor:
            stored[row, column] = tokens.double()
            code = torch.zeros_like(tokens)
            for place, token in enumerate(stored.long().unbind(-1)):
                read = (place > first) & (place <= column)
                code = torch.where(read, (code * 5 + token + 1) % CODES, code)
            return self.table.detach()[stored[row, first].long(), code]

        return decode

    def weights(self) -> list[Tensor]:
        return [self.table]

    def decoding(self) -> AbstractContextManager[object]:
        return nullcontext()


def reward(prompts: Tensor, tokens: Tensor) -> Tensor:
    """Of the whole completion and the prompt, far from additive."""
    place = torch.arange(1, tokens.shape[1] + 1)
    mixed = (tokens * place.square()).sum(-1) + prompts[:, 1:].sum(-1)
    return torch.cos(mixed.double() * 1.7) + 3


@dataclass(frozen=True)
class Setting:
    """A model, its prompts and what is drawn from it."""

    vocabulary: int = 3
    max_tokens: int = 3
    eos: Ends = None
    temperature: float = 1.0
    ragged: bool = False
    banned: int | None = None
    kl: float = 0.0
    min_tokens: int = 0
    stop: Stop | None = None

    def live(self, tokens: Tensor) -> Tensor:
        return live_tokens(tokens, self.eos, self.stop, self.min_tokens)

    def prompts(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """[rows, 3]: the row's number, then the same content for all, or two of different lengths
        in turn.
        """
        prompts = torch.tensor([0, 2, 1]).repeat(rows, 1)
        prompts[:, 0] = torch.arange(rows)
        if not self.ragged:
            return prompts, None
        mask = torch.ones_like(prompts, dtype=torch.bool)
        mask[1::2, 2] = False
        return prompts, mask

    def model(self, rows: int) -> sequences.Recompute:
        return sequences.Recompute(Table(rows, self.vocabulary, banned=self.banned))

    def reference(self, rows: int) -> sequences.Recompute:
        table = Table(rows, self.vocabulary, banned=self.banned)
        table.table = 0.3 * table.table.detach()
        return sequences.Recompute(table)

    def log_p(
        self, model: sequences.Model, prompts: Tensor, mask: Tensor | None, tokens: Tensor
    ) -> Tensor:
        logits = (
            model.logits(prompts, tokens) if mask is None else model.logits(prompts, tokens, mask)
        )
        allowed = forbid_ends(logits, torch.arange(tokens.shape[1]), self.eos, self.min_tokens)
        log_p = (allowed / self.temperature).log_softmax(-1)
        log_p = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return torch.where(self.live(tokens), log_p, 0).sum(-1)

    def exact(self) -> Tensor:
        """dE[return]/dtable of rows 0 and 1, by enumeration: [2, CODES, V]."""
        every = torch.tensor(list(product(range(self.vocabulary), repeat=self.max_tokens)))
        live = self.live(every)
        if self.eos is not None or self.stop is not None:
            every = every.masked_fill(~live, padding(self.eos)).unique(dim=0)
        table = Table(2, self.vocabulary, banned=self.banned)
        model, prompts, mask = sequences.Recompute(table), *self.prompts(2)
        total = torch.zeros((), dtype=torch.float64)
        for row in range(2):
            some = prompts[row : row + 1].repeat(len(every), 1)
            some_mask = None if mask is None else mask[row : row + 1].repeat(len(every), 1)
            log_p = self.log_p(model, some, some_mask, every)
            possible = (log_p > -torch.inf).nonzero().squeeze(-1)
            log_p = log_p[possible]
            value = reward(some, every)[possible]
            if self.kl:
                of_reference = self.log_p(self.reference(2), some, some_mask, every)[possible]
                value = value - self.kl * (log_p - of_reference)
            total = total + (log_p.exp() * value).sum()
        return torch.autograd.grad(total, table.table)[0]

    def estimates(
        self,
        strategy: sequences.Strategy,
        rows: int,
        seed: int = 5,
        wrap: Callable[[Table], sequences.Model] = sequences.Recompute,
        slots: int = 1 << 20,
        **options: object,
    ) -> Tensor:
        """[rows // 2, 2, CODES, V] independent estimates."""
        table = Table(rows, self.vocabulary, banned=self.banned)
        prompts, mask = self.prompts(rows)
        out = sequences.estimate(
            strategy,
            wrap(table),
            prompts,
            reward,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            eos=self.eos,
            stop=self.stop,
            temperature=self.temperature,
            mask=mask,
            reference=self.reference(rows) if self.kl else None,
            kl=self.kl,
            generator=torch.Generator().manual_seed(seed),
            rows=slots,
            micro_batch=1 << 20,
            **options,  # pyright: ignore[reportArgumentType]
        )
        out.value.sum().backward()
        assert table.table.grad is not None
        return table.table.grad.unflatten(0, (-1, 2))


SETTINGS = {
    "plain": Setting(),
    "ends": Setting(eos=1),
    "ragged, ends, temperature": Setting(eos=0, ragged=True, temperature=0.7),
    "masked tokens": Setting(vocabulary=4, banned=2, eos=3),
    "four tokens": Setting(vocabulary=2, max_tokens=4, eos=0, temperature=1.5),
    "two ends": Setting(vocabulary=4, eos=[2, 0], temperature=0.8),
    "kl": Setting(eos=2, kl=0.4, temperature=0.8),
}
"""Small models whose sequences can be enumerated."""
