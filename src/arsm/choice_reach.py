"""The losses that a choice reaches, by what it declares, and a test of that: change one
choice, and see which losses move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from arsm.choice import Choice
    from arsm.choice_run import Run

Reach = Literal["row", "later", "own"]
"""The losses that a choice can change."""


@dataclass(frozen=True, eq=False)
class Made:
    """One call of a Choice."""

    choice: Choice
    z: Tensor
    """[N, K], [N, k] or [N, T, k]."""
    logits: Tensor
    """[N, K, C]."""

    def changed(self, position: int) -> Tensor:
        """z with another choice at one position: the most probable category that was
        not chosen instead of the one that was, or instead of the first of a set.
        """
        z = self.z.clone()
        here = z[:, position]
        members = here.unsqueeze(-1) if self.choice.k is None else here
        others = self.logits[:, position].scatter(-1, members, -torch.inf)
        # a row without another category keeps its choice
        free = others.amax(-1) > -torch.inf
        if self.choice.k is None:
            z[:, position] = torch.where(free, others.argmax(-1), here)
        else:
            new = torch.where(free, others.argmax(-1), here[:, 0])
            z[:, position] = torch.cat([new.unsqueeze(-1), here[:, 1:]], -1).sort(-1).values
        return z


def sum_of_reaching(log_q: Tensor, reach: Reach, values: Tensor) -> Tensor:
    """For each loss, ln q of the choices that reach it: log_q [N, K] -> [N] or [N, T],
    as the values are.
    """
    if values.ndim == 1:
        return log_q.sum(-1)
    positions = values.shape[-1]
    if reach == "row":
        return log_q.sum(-1, keepdim=True).expand(-1, positions)
    _require_positions(log_q.shape[-1], reach, positions)
    # a loss is reached by the choices up to its position: a cumulative sum
    return log_q.cumsum(-1) if reach == "later" else log_q


def reaches(count: int, reach: Reach, positions: int, device: torch.device) -> Tensor:
    """Whether a loss is reached by a choice: [T, K] bool, for K choices."""
    if reach == "row":
        return torch.ones(positions, count, dtype=torch.bool, device=device)
    _require_positions(count, reach, positions)
    square = torch.ones(positions, positions, dtype=torch.bool, device=device)
    return square.tril() if reach == "later" else square.tril().triu()


def _require_positions(count: int, reach: Reach, positions: int) -> None:
    if count != positions:
        raise ValueError(
            f"Choice(reach={reach!r}) got logits for {count} positions, but the loss function "
            f"returned losses for {positions}; they must be the same."
        )


def check_reach(
    run: Run, function: Callable[..., Tensor], batch: tuple[Tensor, ...], made: list[Made]
) -> None:
    """Raise if a choice moves a loss, or the logits of a later choice, beyond its reach.

    All other choices are held, so that a loss moves only where it depends on the
    changed one directly; by way of later choices it does so through their logits.
    """
    chosen = [each.z for each in made]
    before, logits = run.replay(function, batch, chosen)
    for number, each in enumerate(made):
        if each.choice.reach == "row":
            continue
        count = each.logits.shape[1]
        # the ends and the middle: one pass for each position would take too long
        for position in sorted({0, count // 2, count - 1}):
            others = [*chosen[:number], each.changed(position), *chosen[number + 1 :]]
            after, seen = run.replay(function, batch, others)
            _require_still(each, position, before, after, "the loss")
            for place in range(number + 1, len(made)):
                # a choice with other positions has none to compare with
                if made[place].logits.shape[1] == count:
                    _require_still(each, position, logits[place], seen[place], "a later choice")


def _require_still(made: Made, position: int, before: Tensor, after: Tensor, what: str) -> None:
    """Require equal values [N, T, ...] at the positions that a choice does not reach."""
    where = torch.arange(before.shape[1], device=before.device)
    beyond = where < position if made.choice.reach == "later" else where != position
    finite = before.isfinite() & after.isfinite()  # masked logits
    difference = torch.where(finite, after - before, 0.0).abs()
    scale = torch.where(finite, before, 0.0).abs().amax().clamp_min(1e-3)
    moved = difference.flatten(2).amax(-1) if before.ndim > 2 else difference
    # half of the digits: rounding moves the last few, a dependence moves far more
    moved = (moved.amax(0) > scale * torch.finfo(before.dtype).eps ** 0.5) & beyond
    if not bool(moved.any()):
        return
    wider = 'reach="later" or reach="row"' if made.choice.reach == "own" else 'reach="row"'
    raise ValueError(
        f"A Choice(reach={made.choice.reach!r}) reaches further than it says: another choice at "
        f"position {position} changed {what} at position {int(moved.nonzero()[0])}; declare "
        f"{wider}, or change the model so that it is true."
    )
