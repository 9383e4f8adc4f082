"""n whole runs of guide and model, for a guide whose choices depend on each other.

An estimator with `paths` needs nothing but independent samples and weights from their
values. The samples may be whole runs, which serve all discrete sites at once:

    gradient of site s = sum_i w_i d ln q(z_is | its parents on run i)
    w = weights(F_1 .. F_n),    F_i = sum of the terms of run i that depend on s

with one w and one F for each row, the plates that s shares with all of these terms. A
chain of T sites costs n runs this way; from one true path, it would ask for 1 + T (n - 1).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from arsm.checks import NotFiniteError
from arsm.pyro.categories import unwrap
from arsm.pyro.sites import (
    ChangedError,
    Follow,
    Key,
    Site,
    elbo_terms,
    plates_of,
    same,
    sample_sites,
    sum_to,
)
from arsm.pyro.true_path import PATHS, Structure, inside, kinds
from arsm.question import attach_paths
from arsm.types import Estimator

Rows = frozenset[tuple[str, int]]
"""Name and dimension of the plates that are rows."""


def fits(estimator: Estimator, structure: Structure) -> bool:
    """Whether whole runs are the way to estimate this program.

    A guide of one stage is better served from one true path, where equal samples share
    a value. A factor in the guide may stand for samples that all runs share.
    """
    by_weights = estimator.paths > 0 and not estimator.weighs_energy
    return by_weights and len(structure.stages) > 1 and not structure.has_factor


class WholePaths:
    """The ELBO from whole runs of guide and model.

    Args:
        structure: that of a tracked run.
        vectorized: run them together, with a plate around model and guide; otherwise
            one after the other.
    """

    def __init__(self, estimator: Estimator, structure: Structure, vectorized: bool) -> None:
        self.estimator = estimator
        self.structure = structure
        self.vectorized = vectorized
        depends = structure.depends
        self.choices = {name for names, _ in structure.stages for name in names}
        self.shared_kl = frozenset(
            name
            for (kind, name), sites in depends.items()
            if kind == "kl" and sites.isdisjoint(self.choices)
        )
        self.scores: dict[str, list[Tensor]] = {name: [] for name in self.choices}
        """ln q [n, *batch] of each discrete site, in parts."""
        self.terms: dict[Key, list[Tensor]] = {key: [] for key in depends}
        """[n, *batch] of each term, in parts."""
        self.sizes: dict[tuple[str, int], int] = {}
        """Sizes of the plates around the discrete sites."""

    def run(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        max_rows: int | None,
    ) -> None:
        """Run guide and model; in parts, where the rows are too many for one run."""
        n = self.estimator.paths
        size = max(1, max_rows // self.structure.largest) if max_rows else n
        if not self.vectorized:
            size = 1
        # sites that come before all choices say nothing about them
        before = frozenset(
            name
            for name, above in self.structure.ancestors.items()
            if name not in self.choices and above.isdisjoint(self.choices)
        )
        common = DrawOnce(before, self.vectorized)
        subsamples: dict[str, Any] = {}

        def sites(program: Callable[..., Any], values: dict[str, Any], count: int) -> Any:
            dim = -1 - self.structure.nesting
            plate = pyro.plate(PATHS, count, dim=dim) if self.vectorized else nullcontext()
            # the tracked run is already validated
            with pyro.validation_enabled(False), Follow(subsamples | values), common, plate:
                return sample_sites(poutine.trace(program).get_trace(*args, **kwargs))

        for start in range(0, n, size):
            count = min(size, n - start)
            in_guide, found = sites(guide, {}, count)
            # a plate is subsampled once for all runs, or their values could not be compared
            subsamples |= found
            values = {name: site["value"] for name, site in in_guide.items()}
            in_model, found = sites(model, values, count)
            subsamples |= found
            self._add(in_guide, in_model, count)

    def _add(self, guide: dict[str, Site], model: dict[str, Site], count: int) -> None:
        """Keep the terms and scores of some runs."""
        self._check(inside(guide), inside(model))
        terms = elbo_terms(
            model,
            guide,
            self.structure.closed,
            None,
            self.shared_kl if self.vectorized else frozenset(),
            self.structure.nesting,
        )
        for key, x, _ in terms:
            self.terms[key].append(self._with_paths(x, count))
        for name in self.choices:
            fn = guide[name]["fn"]
            # without masks: they are for terms, and a masked site is drawn all the same
            log_q = unwrap(fn).log_prob(guide[name]["value"])
            events = log_q.ndim - len(fn.batch_shape)
            log_q = log_q.flatten(-events).sum(-1) if events else log_q
            self.scores[name].append(self._with_paths(log_q, count))

    def _check(self, guide: dict[str, Site], model: dict[str, Site]) -> None:
        """Refuse runs with other sites, plates or kinds of distributions than the tracked one's."""
        tracked = self.structure
        for found, known in ((kinds(guide), tracked.guide), (kinds(model), tracked.model)):
            if found != known:
                changed = [name for name in known | found if found.get(name) != known.get(name)]
                raise ChangedError(
                    f"Site {min(changed, default='')!r} exists, or is of its kind, for some "
                    "samples only; model and guide must have the same sites for all."
                )
        for name in tracked.closed:
            q = guide[name]
            p = model[name]
            if not (same(q["scale"], p["scale"]) and same(q["mask"], p["mask"])):
                raise ChangedError(
                    f"Site {name!r} has the same scale and mask in model and guide for some "
                    "samples only."
                )
        for name in self.choices:
            self.sizes |= {(plate, dim): size for plate, dim, size in plates_of(guide[name])}

    def _with_paths(self, x: Tensor, count: int) -> Tensor:
        """[n, *batch], with as many batch dimensions as there are plates."""
        nesting = self.structure.nesting
        if self.vectorized and x.ndim > nesting:
            return x
        # it ran alone, or does not depend on the plate
        return x.expand(count, *(1,) * (nesting - x.ndim), *x.shape)

    def elbo(self) -> Tensor:
        """The ELBO [] with the gradient of its estimate."""
        terms = {key: _joined(parts) for key, parts in self.terms.items()}
        elbo = torch.zeros(())
        for term in terms.values():
            elbo = elbo + term.sum() / len(term)
        # sites of the same rows have weights of the same shape: one question for all of them
        alike: dict[Rows, list[str]] = {}
        for names, rows in self.structure.stages:
            alike.setdefault(rows, []).extend(names)
        for rows, names in alike.items():
            elbo = elbo + self._credit(terms, rows, names)
        return elbo

    def _credit(self, terms: dict[Key, Tensor], rows: Rows, names: list[str]) -> Tensor:
        """Zero, with the gradient of the discrete sites that have these rows."""
        ordered = sorted(rows, key=lambda plate: plate[1])
        dims = [-1 - self.structure.nesting, *(dim for _, dim in ordered)]
        shape = (self.estimator.paths, *(self.sizes[plate] for plate in ordered))
        depends = self.structure.depends
        moved = [key for key in terms if not depends[key].isdisjoint(names)]
        # sites under `mask(False)` may have no term at all
        if not moved:
            return torch.zeros(())
        # [M, n, *R] in float64, because a GPU may multiply matrices of float32 in less
        values = torch.stack(
            [sum_to(terms[key].detach(), dims).double().expand(shape) for key in moved]
        )
        _check_finite(values, [depends[key] for key in moved], names)
        # each site's F is the sum of the terms that depend on it: a product with zeros and ones
        reaches = [[float(name in depends[key]) for key in moved] for name in names]
        reached = values.new_tensor(reaches) @ values.flatten(1)  # [S, n R]
        log_q = torch.stack(
            [sum_to(_joined(self.scores[name]), dims).expand(shape) for name in names], 1
        )
        totals = reached.view(-1, *shape).movedim(0, 1).to(log_q.dtype)  # [n, S, *R]
        return attach_paths(log_q.new_zeros(log_q.shape[1:]), self.estimator, totals, log_q).sum()


class DrawOnce(Messenger):
    """Give all paths one draw of some sites: those that no choice comes before.

    The samples differ in their choices alone then, and are better baselines for each other.

    Args:
        names: the sites.
        vectorized: whether the first dimension of a draw is that of the paths.
    """

    def __init__(self, names: frozenset[str], vectorized: bool) -> None:
        super().__init__()
        self.names = names
        self.vectorized = vectorized
        self.drawn: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        fn = msg["fn"]
        if name not in self.names or msg["is_observed"] or msg["value"] is not None:
            return
        if name not in self.drawn:
            value = fn(*msg["args"], **msg["kwargs"])
            # of the draws that the plate makes, the first
            self.drawn[name] = value[:1] if self.vectorized else value
        msg["value"] = self.drawn[name].expand(fn.shape())
        msg["done"] = True


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check_finite(values: Tensor, depends: list[frozenset[str]], names: list[str]) -> None:
    """Refuse terms [M, n, *R] that are not finite, naming the sites that they depend on."""
    if bool(values.isfinite().all()):
        return
    finite = values.flatten(1).isfinite().all(1).tolist()
    bad = [sites for sites, is_finite in zip(depends, finite, strict=True) if not is_finite]
    guilty = [name for name in names if any(name in sites for sites in bad)]
    raise NotFiniteError(
        f"ln p - ln q is infinite or NaN for a sample of {', '.join(map(repr, guilty))}; give "
        "every value that the guide can draw a probability above zero in the model."
    )
