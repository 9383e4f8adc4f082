"""The estimator's queries, stage by stage, and the run of guide and model that evaluates them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pyro
import torch
from pyro import distributions as dist
from pyro import poutine
from pyro.infer.util import is_validation_enabled
from pyro.ops.provenance import detach_provenance
from torch import Tensor

from arsm.checks import NotFiniteError
from arsm.driver import graph_nodes
from arsm.noise import argmin_sample, race_noise
from arsm.pyro.categories import logits_of, to_value, unwrap
from arsm.pyro.sites import Follow, Key, Plates, Site, elbo_terms, sample_sites
from arsm.pyro.true_path import Choice, Program, Term, TruePath
from arsm.question import attach, pose
from arsm.types import Estimator

Query = tuple[int | None, int]
"""A stage and one of its queries; no stage for the true path."""

REMEDY = (
    "write model and guide as for Trace_ELBO(vectorize_particles=True): sum and index from the right, index by samples "
    "with pyro.ops.indexing.Vindex, decide with torch.where"
)


class Stage:
    """Discrete sites whose gradient is one problem: logits phi [*R, K, C], padded by impossible categories."""

    def __init__(self, estimator: Estimator, choices: dict[str, Choice], plates: Plates) -> None:
        self.choices = choices
        ordered = sorted(plates, key=lambda plate: plate[1])
        self.dims, self.sizes = [plate[1] for plate in ordered], [plate[2] for plate in ordered]
        parts = [choice.rows(choice.logits, self.dims) for choice in choices.values()]
        self.widths = [part.shape[-2] for part in parts]
        most = max(part.shape[-1] for part in parts)
        pad = torch.nn.functional.pad
        self.logits = torch.cat([pad(part, (0, most - part.shape[-1]), value=-torch.inf) for part in parts], -2)
        z = torch.cat([choice.rows(choice.z, self.dims) for choice in choices.values()], -1)
        self.question = pose(estimator, self.logits.detach(), z=z)
        self.asked = self.question.asked_queries()
        """The queries that some row needs, the true sample first."""

    @property
    def points(self) -> Tensor:
        """[M, *R, K]: the categories of all sites at every query."""
        return self.question.queries.points

    @property
    def live(self) -> int:
        """Number of leading queries that keep their graph."""
        return self.question.queries.weight.shape[0]

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

    def value(self, own: Tensor, moved: Tensor) -> Tensor:
        """[]: the value of the terms `own` with the gradient of the terms `moved`, [n, *R] at the queries asked."""
        if not bool(moved.isfinite().all()):
            raise NotFiniteError(
                f"ln p - ln q is infinite or NaN for a sample of {', '.join(map(repr, self.choices))}; give every "
                "value that the guide can draw a probability above zero in the model."
            )
        gradient = self.question.credit(self.question.spread_queries(self.asked, moved.detach()).all).gradient
        assert gradient is not None  # only estimators that need f's gradient return None
        value = self.question.value(self.question.spread_queries(self.asked, own).live)
        return attach(value, self.logits, gradient).sum()


class OtherPaths:
    """The terms on the paths of all queries except the true samples."""

    def __init__(self, path: TruePath, stages: list[Stage]) -> None:
        self.path, self.stages = path, stages
        self.above = {
            name: {t for t, stage in enumerate(stages) if not above.isdisjoint(stage.choices)}
            for name, above in path.ancestors.items()
        }
        """The stages that each guide site depends on; it is drawn again on their paths."""
        self.noise = {
            name: race_noise(choice.logits.detach(), z=choice.z)
            for name, choice in path.choices.items()
            if self.above[name]
        }
        self.runs: list[tuple[list[Query], dict[Key, Tensor]]] = []

    def run(self, max_rows: int | None) -> None:
        """Evaluate all queries, the live ones with their graph."""
        live: list[Query] = []
        rest: list[Query] = []
        for t, stage in enumerate(self.stages):
            for m in stage.asked[1:]:
                (live if m < stage.live else rest).append((t, m))
        size = max(1, max_rows // self.path.largest) if max_rows else max(1, len(live), len(rest))
        self.runs += [(part, self._run(part)) for part in _chunks(live, size)]
        with torch.no_grad():
            self.runs += [(part, self._run(part)) for part in _chunks(rest, size)]

    def check(self) -> bool:
        """Refuse a program with other values or gradients for two copies of the true path, beside other samples.

        Returns whether there were other samples of all stages that ever ask for any.
        """
        self._check_guide()
        others = [(t, stage.farthest()) for t, stage in enumerate(self.stages)]
        for key, x in self._run([(None, 0), (None, 0), *others]).items():
            copy = x if x.ndim <= self.path.nesting else x[0]
            _check_gradient(key[1], self.path.terms[key].value, copy)
        points = [stage.points for stage in self.stages]
        return all(len(x) == 1 or bool((x[m] != x[0]).any()) for x, (_, m) in zip(points, others, strict=True))

    def _check_guide(self) -> None:
        """Refuse a guide that loses gradients between its sites."""
        path = self.path
        below = {name: site for name, site in path.guide_sites.items() if path.ancestors[name]}
        if not below:
            return
        values = {name: detach_provenance(site["value"]) for name, site in path.guide_sites.items()}
        with Follow(path.subsamples | values):
            again = sample_sites(poutine.trace(path.guide).get_trace(*path.args, **path.kwargs))[0]
        for name in below.keys() & again.keys():
            tracked, plain = (unwrap(sites[name]["fn"]) for sites in (below, again))
            if isinstance(plain, dist.Delta):
                _check_gradient(name, detach_provenance(tracked.v), plain.v)
            else:
                log_q = detach_provenance(tracked.log_prob(values[name]))
                _check_gradient(name, log_q, plain.log_prob(values[name]))

    def terms(self, t: int, keys: set[Key]) -> Tensor:
        """The sum of these terms at the queries that stage t asked for: [n, *R]."""
        stage, paths = self.stages[t], -1 - self.path.nesting
        zero = stage.logits.new_zeros(1, *stage.sizes)
        parts = [sum((_sum_to(self.path.terms[key].value, stage.dims) for key in keys), zero)]
        for queries, terms in self.runs:
            if mine := [i for i, (s, _) in enumerate(queries) if s == t]:
                start = zero.expand(len(mine), *stage.sizes)
                parts.append(sum((_sum_to(terms[key], [paths, *stage.dims])[mine] for key in keys), start))
        return torch.cat(parts)

    def _run(self, queries: list[Query]) -> dict[Key, Tensor]:
        """The terms that change with these queries, [n, *batch]; under validation also those that must not change."""
        path, validated = self.path, is_validation_enabled()
        fits = _must_fit if queries[0][0] is None else nullcontext

        def sites(program: Program, values: dict[str, Any]) -> dict[str, Site]:
            plate = pyro.plate("arsm_paths", len(queries), dim=-1 - path.nesting)
            # the true path is already validated
            with fits(), pyro.validation_enabled(False), Follow(path.subsamples | values), plate:
                return sample_sites(poutine.trace(program).get_trace(*path.args, **path.kwargs))[0]

        if any(self.above.values()):
            guide = sites(path.guide, {name: partial(self._value, name, queries) for name in path.guide_sites})
        else:
            guide = {name: site | {"value": self._value(name, queries)} for name, site in path.guide_sites.items()}
        model = sites(path.model, {name: site["value"] for name, site in guide.items()})
        if changed := (guide.keys() ^ path.guide_sites.keys()) | (model.keys() ^ path.model_sites.keys()):
            raise ValueError(
                f"Site {min(changed)!r} exists for some samples only; model and guide must have the same sites for all."
            )
        wanted = {k for k, term in path.terms.items() if validated or any(self._moves(t, term) for t, _ in queries)}
        with fits():
            terms = {key: detach_provenance(x) for key, x, _ in elbo_terms(model, guide, path.closed, wanted)}
        self._check(queries, terms)
        return terms

    def _moves(self, t: int | None, term: Term) -> bool:
        return t is not None and self.stages[t].moves(term)

    def _value(self, name: str, queries: list[Query], fn: Any = None) -> Tensor:
        """A guide site's value on the paths of these queries; fn, its distribution, where it is drawn again."""
        site, choice = self.path.guide_sites[name], self.path.choices.get(name)
        batch = len(site["fn"].batch_shape)
        value = self._widen((choice.z if choice else detach_provenance(site["value"])).unsqueeze(0), batch)
        value = value.expand(len(queries), *value.shape[1:])
        if any(again := [t in self.above[name] for t, _ in queries]):
            drawn = self._drawn(name, fn)
            chosen = torch.tensor(again, device=value.device).view(-1, *(1,) * (value.ndim - 1))
            value = torch.where(chosen, drawn, value)
        if choice is None:
            return value
        for t, stage in enumerate(self.stages):
            mine = [i for i, (s, _) in enumerate(queries) if s == t]
            if mine and name in stage.choices:
                points = self._widen(stage.at(name, [queries[i][1] for i in mine]), batch)
                value = value.index_copy(0, torch.tensor(mine, device=value.device), points)
        return to_value(site["fn"], value, detach_provenance(site["value"]))

    def _drawn(self, name: str, fn: Any) -> Tensor:
        """A guide site drawn again, with the noise of the true path where that is known: categories, or a value."""
        site = self.path.guide_sites[name]
        if name in self.noise:
            logits = logits_of(fn)
            assert logits is not None  # the site was discrete on the true path
            return argmin_sample(logits, self._widen(self.noise[name].unsqueeze(0), len(site["fn"].batch_shape)))
        now, then = unwrap(fn), unwrap(site["fn"])
        if not isinstance(now, dist.Normal):
            return fn()
        noise = detach_provenance((site["value"] - then.loc) / then.scale).detach()
        return now.loc + now.scale * self._widen(noise.unsqueeze(0), len(site["fn"].batch_shape))

    def _widen(self, x: Tensor, batch: int) -> Tensor:
        """[n, *batch, ...] with as many batch dimensions as there are plates."""
        return x.reshape(x.shape[0], *(1,) * (self.path.nesting - batch), *x.shape[1:])

    def _check(self, queries: list[Query], terms: dict[Key, Tensor]) -> None:
        """Refuse a model or guide that does not work inside a plate, or whose dependences Pyro cannot see."""
        for key, x in terms.items():
            term = self.path.terms[key]
            fixed = [i for i, (t, _) in enumerate(queries) if not self._moves(t, term)]
            wrong: list[int] = []
            alone = x.ndim <= self.path.nesting  # it does not depend on the plate
            paired = x.numel() != term.value.numel() * (1 if alone else len(queries))  # paths met in an index
            if fixed and not paired:
                same = x.expand(len(fixed), *x.shape) if alone else x[fixed]
                close = torch.isclose(same, term.value.expand_as(same), rtol=1e-3, atol=1e-3, equal_nan=True)
                right = close.reshape(len(fixed), -1).all(-1).tolist()
                wrong = [i for i, agrees in zip(fixed, right, strict=True) if not agrees]
            moved = any(self._moves(t, term) for t, _ in queries)
            if paired or any(queries[i][0] is None for i in wrong) or (alone and moved):
                raise ValueError(
                    f"Site {key[1]!r} has other log probabilities in a plate than alone; {REMEDY}; no dropout."
                )
            if wrong:
                raise ValueError(
                    f"Site {key[1]!r} changes with a discrete site although Pyro's provenance tracking finds no way "
                    "between them; use plain torch operations there, nothing compiled or scripted."
                )


def _check_gradient(name: str, tracked: Tensor, plain: Tensor) -> None:
    """Refuse a site whose value has fewer gradients, or others, with provenance tracking than without."""
    leaves = list(_leaves(plain))
    lost = not _leaves(tracked).issuperset(leaves)
    if leaves and not lost and _close(tracked, plain.reshape(tracked.shape)):
        found, wanted = (torch.autograd.grad(x.sum(), leaves, retain_graph=True) for x in (tracked, plain))
        lost = not all(_close(a.to_dense(), b.to_dense()) for a, b in zip(found, wanted, strict=True))
    if lost:
        raise ValueError(
            f"Site {name!r} loses a parameter's gradient under Pyro's provenance tracking, as a custom "
            "torch.autograd.Function does; use plain torch operations there."
        )


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding, relative to the largest entry."""
    scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


def _leaves(x: Tensor) -> set[Tensor]:
    """The leaf tensors that get a gradient from x."""
    return {leaf for node in graph_nodes(x) if (leaf := getattr(node, "variable", None)) is not None}


@contextmanager
def _must_fit() -> Iterator[None]:
    """Say that an error of the program is one inside a plate: alone, it has run before."""
    try:
        yield
    except Exception as error:
        words = str(error).split("\n")[0]  # Pyro adds a table of shapes
        raise ValueError(f"Model or guide fails with a plate around it ({words}); {REMEDY}.") from error


def _chunks(queries: list[Query], size: int) -> list[list[Query]]:
    return [queries[i : i + size] for i in range(0, len(queries), size)]


def _sum_to(x: Tensor, dims: list[int]) -> Tensor:
    """The sum over all other dimensions."""
    others = [dim for dim in range(-x.ndim, 0) if dim not in dims]
    return x.sum(others) if others else x
