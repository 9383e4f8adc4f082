"""The run of guide and model on the paths of all queries, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pyro
import torch
from pyro import distributions as dist
from pyro import poutine
from pyro.infer.util import is_validation_enabled
from pyro.ops.provenance import detach_provenance
from torch import Tensor

from arsm.noise import argmin_sample, race_noise
from arsm.pyro.categories import logits_of, to_value, unwrap
from arsm.pyro.lost_gradients import LOST, check_guide, leaves_of, loses_gradient
from arsm.pyro.sites import Follow, Key, Site, elbo_terms, sample_sites, sum_to
from arsm.pyro.stages import Stage
from arsm.pyro.true_path import PATHS, DiscreteSite, Program, Term, TruePath

Query = tuple[int | None, int]
"""A stage and one of its queries; no stage for the true path."""
TRUE: Query = (None, 0)

REMEDY = (
    "write model and guide as for Trace_ELBO(vectorize_particles=True): sum and index from the "
    "right, index by samples with pyro.ops.indexing.Vindex, decide with torch.where; or run sample "
    "by sample with vectorize_particles=False"
)


class NotInPlateError(ValueError):
    """Model or guide does not work with a plate around it."""


class OtherPaths:
    """The terms on the paths of all queries.

    Args:
        vectorized: run the queries together, with a plate around model and guide;
            otherwise one after the other.
    """

    def __init__(self, path: TruePath, stages: list[Stage], vectorized: bool = True) -> None:
        self.path = path
        self.stages = stages
        self.vectorized = vectorized
        self.above = {
            name: {t for t, stage in enumerate(stages) if not above.isdisjoint(stage.choices)}
            for name, above in path.ancestors.items()
        }
        """The stages that each guide site depends on; it is drawn again on their paths."""
        self.noise = _noise_given_winners(
            {name: choice for name, choice in path.choices.items() if self.above[name]}
        )
        self.runs: list[tuple[list[Query], dict[Key, Tensor]]] = []

    def run(self, max_rows: int | None) -> None:
        """Evaluate all queries, the live ones with their graph."""
        # the model has not run yet where the structure was known
        live: list[Query] = [] if self.path.terms else [TRUE]
        rest: list[Query] = []
        for t, stage in enumerate(self.stages):
            for m in stage.asked[1:]:
                (live if m < stage.live else rest).append((t, m))
        size = max(1, max_rows // self.path.largest) if max_rows else max(1, len(live), len(rest))
        if not self.vectorized:
            size = 1
        # live queries first: the first run is the one that meets the model
        self.runs += [(part, self._run(part)) for part in _chunks(live, size)]
        with torch.no_grad():
            self.runs += [(part, self._run(part)) for part in _chunks(rest, size)]

    def check(self) -> bool:
        """Refuse a program with other values or gradients for two copies of the true
        path, beside other samples.

        Returns whether there were other samples of all stages that ever ask for any.
        """
        check_guide(self.path)
        # the sample that differs most is the one most likely to show a wrong index
        others = [(t, stage.farthest()) for t, stage in enumerate(self.stages)]
        # two copies of the true path: a plate of size 1 would be broadcast, and hide mistakes
        runs = [[TRUE, TRUE, *others]] if self.vectorized else [[TRUE], *([q] for q in others)]
        first, *_ = [self._run(queries) for queries in runs]
        lost = {key: self._loses(key, x) for key, x in first.items()}
        if any(lost.values()):
            # tensors that the program itself makes, and makes again in every run, are no parameters
            again = self._run(runs[0])
            for key in [key for key, is_lost in lost.items() if is_lost]:
                if self._loses(key, first[key], leaves_of(again[key])):
                    raise ValueError(LOST.format(key[1]))
        points = [stage.points for stage in self.stages]
        return all(
            len(x) == 1 or bool((x[m] != x[0]).any())
            for x, (_, m) in zip(points, others, strict=True)
        )

    def _loses(self, key: Key, x: Tensor, kept: set[Tensor] | None = None) -> bool:
        copy = x if x.ndim <= self.path.nesting else x[0]
        return loses_gradient(self.path.terms[key].value, copy, kept)

    def terms(self, t: int, keys: set[Key]) -> Tensor:
        """The sum of these terms at the queries that stage t asked for: [n, *R]."""
        stage = self.stages[t]
        paths = -1 - self.path.nesting
        zero = stage.logits.new_zeros(1, *stage.sizes)
        parts: list[Tensor] = []
        # query 0 is the true path, which either ran before or is the first of these runs
        if not any(TRUE in queries for queries, _ in self.runs):
            true = (sum_to(self.path.terms[key].value, stage.dims) for key in keys)
            parts.append(sum(true, zero))
        for queries, terms in self.runs:
            mine = [i for i, (s, _) in enumerate(queries) if s == t or s is None]
            if mine:
                total = zero.expand(len(queries), *stage.sizes)
                for key in keys:
                    total = total + sum_to(terms[key], [paths, *stage.dims])
                parts.append(total if len(mine) == len(queries) else total[mine])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, queries: list[Query]) -> dict[Key, Tensor]:
        """The terms that change with these queries, [n, *batch]; under validation also
        those that must not change.
        """
        path = self.path
        # the structure was known, and the model has not run yet
        first = not path.terms
        checking = not first and queries[0] == TRUE
        fits = _must_fit if checking and self.vectorized else nullcontext
        guide = self._guide_sites(queries, fits)
        with fits():
            values = {name: site["value"] for name, site in guide.items()}
            model, subsamples = self._trace(path.model, values, len(queries))
        if first:
            path.meet(model, subsamples)
        self._check_sites(guide, model)
        wanted = None if first else self._wanted(queries, checking)
        shared = self._shared() if first and self.vectorized else frozenset[str]()
        with fits():
            found = elbo_terms(model, guide, path.closed, wanted, shared, path.nesting)
            terms = {key: self._with_paths(detach_provenance(x)) for key, x, _ in found}
        if first:
            path.meet_terms(terms)
        else:
            self._check(queries, terms)
        return terms

    def _trace(
        self, program: Program, values: dict[str, Any], paths: int
    ) -> tuple[dict[str, Site], dict[str, Tensor]]:
        """Sites and subsamples of model or guide at these values of the guide's sites."""
        path = self.path
        plate = nullcontext()
        if self.vectorized:
            plate = pyro.plate(PATHS, paths, dim=-1 - path.nesting)
        # the true path is already validated
        with pyro.validation_enabled(False), Follow(path.subsamples | values), plate:
            return sample_sites(poutine.trace(program).get_trace(*path.args, **path.kwargs))

    def _guide_sites(
        self, queries: list[Query], fits: Callable[[], AbstractContextManager[None]]
    ) -> dict[str, Site]:
        """The guide's sites on the paths of these queries."""
        known = self.path.guide_sites
        # the guide runs again only where a site is drawn again: one that depends on another
        if any(self.above.values()):
            values = {name: partial(self._value, name, queries) for name in known}
            with fits():
                return self._trace(self.path.guide, values, len(queries))[0]
        return {name: site | {"value": self._value(name, queries)} for name, site in known.items()}

    def _check_sites(self, guide: dict[str, Site], model: dict[str, Site]) -> None:
        """Require the sites of the true path."""
        path = self.path
        changed = (guide.keys() ^ path.guide_sites.keys()) | (
            model.keys() ^ path.model_sites.keys()
        )
        if changed:
            raise ValueError(
                f"Site {min(changed)!r} exists for some samples only; model and guide must have "
                "the same sites for all."
            )

    def _wanted(self, queries: list[Query], checking: bool) -> set[Key]:
        """The terms that change with these queries; all of them where others are checked."""
        terms = self.path.terms
        if checking or is_validation_enabled():
            return set(terms)
        return {k for k, term in terms.items() if any(self._moves(t, term) for t, _ in queries)}

    def _shared(self) -> frozenset[str]:
        """The closed sites whose KL depends on no discrete site."""
        choices = self.path.choices.keys()
        return frozenset(
            name
            for (kind, name), depends in self.path.structure.depends.items()
            if kind == "kl" and depends.isdisjoint(choices)
        )

    def _with_paths(self, x: Tensor) -> Tensor:
        """[n, *batch]: a path that ran alone has no dimension of its own."""
        if self.vectorized:
            return x
        return x.reshape(1, *(1,) * (self.path.nesting - x.ndim), *x.shape)

    def _moves(self, t: int | None, term: Term) -> bool:
        return t is not None and self.stages[t].moves(term)

    def _value(self, name: str, queries: list[Query], fn: Any = None) -> Tensor:
        """A guide site's value on the paths of these queries; fn, its distribution,
        where it is drawn again.
        """
        site = self.path.guide_sites[name]
        choice = self.path.choices.get(name)
        batch = len(site["fn"].batch_shape)
        value = self._widen(
            (choice.z if choice else detach_provenance(site["value"])).unsqueeze(0), batch
        )
        value = value.expand(len(queries), *value.shape[1:])
        # on the paths of a stage that the site depends on, it is drawn again; elsewhere it stays
        if any(again := [t in self.above[name] for t, _ in queries]):
            drawn = self._drawn(name, fn)
            chosen = torch.tensor(again, device=value.device).view(-1, *(1,) * (value.ndim - 1))
            value = torch.where(chosen, drawn, value)
        if choice is None:
            return value if self.vectorized else value[0]
        # on the paths of its own stage, the query says which category
        for t, stage in enumerate(self.stages):
            mine = [i for i, (s, _) in enumerate(queries) if s == t]
            if mine and name in stage.choices:
                points = self._widen(stage.at(name, [queries[i][1] for i in mine]), batch)
                value = value.index_copy(0, torch.tensor(mine, device=value.device), points)
        value = to_value(site["fn"], value, detach_provenance(site["value"]))
        return value if self.vectorized else value[0]

    def _drawn(self, name: str, fn: Any) -> Tensor:
        """A guide site drawn again, with the noise of the true path where that is
        known: categories, or a value.
        """
        site = self.path.guide_sites[name]
        if name in self.noise:
            logits = logits_of(fn)
            assert logits is not None  # the site was discrete on the true path
            return argmin_sample(
                logits, self._widen(self.noise[name].unsqueeze(0), len(site["fn"].batch_shape))
            )
        now = unwrap(fn)
        then = unwrap(site["fn"])
        # Normal sites only: other noise cannot be read off the value, and fresh noise is right too
        if not isinstance(now, dist.Normal):
            return fn()
        noise = detach_provenance((site["value"] - then.loc) / then.scale).detach()
        return now.loc + now.scale * self._widen(noise.unsqueeze(0), len(site["fn"].batch_shape))

    def _widen(self, x: Tensor, batch: int) -> Tensor:
        """[n, *batch, ...] with as many batch dimensions as there are plates."""
        if not self.vectorized:
            return x
        return x.reshape(x.shape[0], *(1,) * (self.path.nesting - batch), *x.shape[1:])

    def _check(self, queries: list[Query], terms: dict[Key, Tensor]) -> None:
        """Refuse a model or guide that does not work inside a plate, or whose
        dependences Pyro cannot see.
        """
        for key, x in terms.items():
            term = self.path.terms[key]
            # a term that does not depend on the plate has no dimension of it
            alone = x.ndim <= self.path.nesting
            # paths that met in an index leave more or fewer values than one batch per path
            paired = x.numel() != term.value.numel() * (1 if alone else len(queries))
            wrong = [] if paired else self._changed(queries, x, term)
            moved = any(self._moves(t, term) for t, _ in queries)
            if paired or any(queries[i][0] is None for i in wrong) or (alone and moved):
                raise self._runs_differ(key[1])
            if wrong:
                raise ValueError(
                    f"Site {key[1]!r} changes with a discrete site although Pyro's provenance "
                    "tracking finds no way between them; use plain torch operations there, "
                    "nothing compiled or scripted."
                )

    def _changed(self, queries: list[Query], x: Tensor, term: Term) -> list[int]:
        """The paths, by their place in the queries, on which a term must not change but does."""
        if not (is_validation_enabled() or TRUE in queries):
            return []
        fixed = [i for i, (t, _) in enumerate(queries) if not self._moves(t, term)]
        if not fixed:
            return []
        same = x.expand(len(fixed), *x.shape) if x.ndim <= self.path.nesting else x[fixed]
        # float32 sums over plates round differently inside a plate
        close = torch.isclose(
            same, term.value.expand_as(same), rtol=1e-3, atol=1e-3, equal_nan=True
        )
        right = close.reshape(len(fixed), -1).all(-1).tolist()
        return [i for i, agrees in zip(fixed, right, strict=True) if not agrees]

    def _runs_differ(self, name: str) -> ValueError:
        """The error of a site whose log probabilities on the true path are not those of before."""
        if not self.vectorized:
            return ValueError(
                f"Site {name!r} has other log probabilities when it is run again; leave "
                "out dropout and other noise outside pyro.sample."
            )
        return NotInPlateError(
            f"Site {name!r} has other log probabilities in a plate than alone; {REMEDY}; "
            "no dropout."
        )


def _noise_given_winners(choices: dict[str, DiscreteSite]) -> dict[str, Tensor]:
    """The noise of each site's race, given its true sample; sites of one shape together."""
    # one kernel per shape: a chain of many sites has one
    groups: dict[Any, list[str]] = {}
    for name, choice in choices.items():
        groups.setdefault((choice.logits.shape, choice.logits.dtype), []).append(name)
    found: dict[str, Tensor] = {}
    for names in groups.values():
        logits = torch.stack([choices[name].logits.detach() for name in names])
        z = torch.stack([choices[name].z for name in names])
        found.update(zip(names, race_noise(logits, z=z), strict=True))
    return found


@contextmanager
def _must_fit() -> Iterator[None]:
    """Say that an error of the program is one inside a plate: alone, it has run before."""
    try:
        yield
    except Exception as error:
        # Pyro adds a table of shapes
        words = str(error).split("\n")[0]
        raise NotInPlateError(
            f"Model or guide fails with a plate around it ({words}); {REMEDY}."
        ) from error


def _chunks(queries: list[Query], size: int) -> list[list[Query]]:
    return [queries[i : i + size] for i in range(0, len(queries), size)]
