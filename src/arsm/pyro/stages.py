"""Discrete sites in stages, and the estimator's questions for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from arsm.checks import NotFiniteError
from arsm.pyro.sites import Plates
from arsm.pyro.true_path import DiscreteSite, Term
from arsm.question import attach, pose
from arsm.types import Estimator


class Stage:
    """Discrete sites whose gradient is one problem: logits phi [*R, K, C], padded by
    impossible categories.
    """

    def __init__(self, choices: dict[str, DiscreteSite], plates: Plates) -> None:
        self.choices = choices
        ordered = sorted(plates, key=lambda plate: plate[1])
        self.dims = [plate[1] for plate in ordered]
        self.sizes = [plate[2] for plate in ordered]
        parts = [choice.rows(choice.logits, self.dims) for choice in choices.values()]
        self.widths = [part.shape[-2] for part in parts]
        # a Bernoulli beside a Categorical: impossible categories make their logits one tensor
        most = max(part.shape[-1] for part in parts)
        pad = torch.nn.functional.pad
        self.logits = torch.cat(
            [pad(part, (0, most - part.shape[-1]), value=-torch.inf) for part in parts], -2
        )
        self.z = torch.cat([choice.rows(choice.z, self.dims) for choice in choices.values()], -1)
        self.posed: Posed
        """The question that this stage is part of, and its place there."""
        self.place = 0

    @property
    def points(self) -> Tensor:
        """[M, *R, K]: the categories of all sites at every query."""
        points = self.posed.question.queries.points
        return points if len(self.posed.stages) == 1 else points[:, self.place]

    @property
    def asked(self) -> list[int]:
        """The queries that some row needs, the true sample first."""
        return self.posed.asked

    @property
    def live(self) -> int:
        """Number of leading queries that keep their graph."""
        return self.posed.question.queries.weight.shape[0]

    def farthest(self) -> int:
        """The query that differs from the true sample in most variables."""
        changed = (self.points != self.points[0]).flatten(1).sum(1).tolist()
        return max(self.asked, key=changed.__getitem__)

    def moves(self, term: Term) -> bool:
        """Whether the term depends on a site of this stage."""
        return not term.depends.isdisjoint(self.choices)

    def at(self, name: str, queries: list[int]) -> Tensor:
        """A site's categories [n, *batch, *event] at n queries."""
        parts = dict(zip(self.choices, self.points[queries].split(self.widths, -1), strict=True))
        return self.choices[name].from_rows(parts[name], self.dims)


class Posed:
    """One question of the estimator for stages of the same shape, which are the rows of
    one batch: a chain of many sites costs little more than one of them.
    """

    def __init__(self, estimator: Estimator, stages: list[Stage]) -> None:
        self.stages = stages
        self.logits = _stacked([stage.logits for stage in stages])
        z = _stacked([stage.z for stage in stages])
        # the guide has drawn z already, so that the noise is drawn given it
        self.question = pose(estimator, self.logits.detach(), z=z)
        self.asked = self.question.asked_queries()
        for place, stage in enumerate(stages):
            stage.posed = self
            stage.place = place

    def value(self, own: list[Tensor], moved: list[Tensor]) -> Tensor:
        """[]: the value of the terms `own` with the gradient of the terms `moved`, [n,
        *R] of each stage at the queries asked.
        """
        for stage, terms in zip(self.stages, moved, strict=True):
            if not bool(terms.isfinite().all()):
                raise NotFiniteError(
                    "ln p - ln q is infinite or NaN for a sample of "
                    f"{', '.join(map(repr, stage.choices))}; give every value that the guide can "
                    "draw a probability above zero in the model."
                )
        values = self.question.spread_queries(self.asked, _stacked(own, 1))
        changes = values.all
        # terms that an earlier stage has counted move the gradient, not the value
        if any(a is not b for a, b in zip(own, moved, strict=True)):
            detached = [terms.detach() for terms in moved]
            changes = self.question.spread_queries(self.asked, _stacked(detached, 1)).all
        gradient = self.question.credit(changes).gradient
        assert gradient is not None  # only estimators that need f's gradient return None
        value = self.question.value(values.live)
        return attach(value, self.logits, gradient).sum()


def pose_stages(
    estimator: Estimator, found: list[tuple[dict[str, DiscreteSite], Plates]]
) -> list[Stage]:
    """The stages, each with its question."""
    stages = [Stage(choices, plates) for choices, plates in found]
    groups: dict[Any, list[Stage]] = {}
    for number, stage in enumerate(stages):
        # Stages share their samples. An estimator that takes one row's baseline from the others
        # would be biased if these were of another stage.
        alike = number if estimator.couples_rows else (stage.logits.shape, stage.logits.dtype)
        groups.setdefault(alike, []).append(stage)
    for group in groups.values():
        Posed(estimator, group)
    return stages


def _stacked(parts: list[Tensor], dim: int = 0) -> Tensor:
    """The parts in a new dimension; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.stack(parts, dim)
