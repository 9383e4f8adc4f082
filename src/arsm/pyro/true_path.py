"""One run of guide and model: the terms of the ELBO, their dependences, and the stages
of the discrete sites.

The first run of a program tracks these dependences. Without validation, later runs take
them from the first, as long as sites, plates and kinds of distributions are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

from pyro import poutine
from pyro.infer.util import is_validation_enabled
from pyro.ops.provenance import detach_provenance, get_provenance
from pyro.poutine.messenger import Messenger
from pyro.util import check_model_guide_match, check_site_shape
from torch import Tensor

from arsm.pyro.categories import kl, logits_of, to_categories, unwrap
from arsm.pyro.sites import (
    ChangedError,
    Key,
    Plates,
    Site,
    Track,
    elbo_terms,
    is_score,
    parameters_behind,
    plates_of,
    refuse,
    same,
    sample_sites,
)

PATHS = "arsm_paths"
"""Name of the plate of the paths."""
Program = Callable[..., Any]
"""A Pyro model or guide."""


@dataclass(frozen=True, eq=False)
class Term:
    """A term of the ELBO on the true path."""

    value: Tensor
    """[*batch], scaled and masked."""
    plates: Plates
    depends: frozenset[str]
    """The guide's sites that it depends on, directly or through other sites."""


@dataclass(frozen=True, eq=False)
class DiscreteSite:
    """A discrete site of the guide on the true path."""

    site: Site
    logits: Tensor
    """[*batch, *event, C], attached."""
    z: Tensor
    """[*batch, *event] int64."""

    def rows(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """[*batch, *event, ...] -> [*R, K, ...], where R are the plates with these dimensions."""
        # plates count from the right of the batch, and the events stand behind it
        moved = x.movedim(self._places(dims), tuple(range(len(dims))))
        return moved.reshape(*moved.shape[: len(dims)], -1, *x.shape[self.z.ndim :])

    def from_rows(self, z: Tensor, dims: Sequence[int]) -> Tensor:
        """[n, *R, K] -> [n, *batch, *event]."""
        places = self._places(dims)
        rest = [size for place, size in enumerate(self.z.shape) if place not in places]
        z = z.reshape(*z.shape[: len(dims) + 1], *rest)
        return z.movedim(tuple(range(1, len(dims) + 1)), tuple(place + 1 for place in places))

    def _places(self, dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(len(self.site["fn"].batch_shape) + dim for dim in dims)


Kinds = dict[str, tuple[Any, ...]]
"""The parts of a program's sites that its dependences may vary with."""


@dataclass(frozen=True, eq=False)
class Structure:
    """The part of a tracked run that later runs need not find again."""

    guide: Kinds
    model: Kinds
    nesting: int
    """Number of batch dimensions."""
    largest: int
    """Number of rows of the largest site."""
    ancestors: dict[str, frozenset[str]]
    closed: frozenset[str]
    depends: dict[Key, frozenset[str]]
    stages: list[tuple[list[str], frozenset[tuple[str, int]]]]
    """Names of the sites, and name and dimension of the plates that are rows."""
    has_factor: bool
    """Whether a factor in the guide stands for samples drawn without a
    reparameterisation.
    """


def kinds(sites: dict[str, Site]) -> Kinds:
    """The kind of each site: its distribution, its plates and whether it is observed."""
    return {
        name: (
            type(unwrap(site["fn"])),
            site["is_observed"],
            [(frame.name, frame.dim) for frame in site["cond_indep_stack"]],
        )
        for name, site in sites.items()
    }


class TruePath:
    """Guide and model at the guide's own samples.

    Args:
        max_plate_nesting: number of plates' dimensions to make room for, infinite for as
            many as there are.
        structure: that of an earlier run. The guide alone runs then; the terms at its
            samples are found with those of the other paths.
    """

    def __init__(
        self,
        model: Program,
        guide: Program,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        max_plate_nesting: float = inf,
        structure: Structure | None = None,
    ) -> None:
        self.model = model
        self.guide = guide
        self.args = args
        self.kwargs = kwargs
        self.terms: dict[Key, Term] = {}
        if structure is None:
            self._run(max_plate_nesting)
        else:
            self._run_guide(structure)
        self.choices = {
            name: DiscreteSite(
                site,
                detach_provenance(logits),
                to_categories(site["fn"], detach_provenance(site["value"])),
            )
            for name, site in self.guide_sites.items()
            if (logits := logits_of(site["fn"])) is not None
        }
        if structure is None:
            structure = Structure(
                kinds(self.guide_sites),
                kinds(self.model_sites),
                self.nesting,
                self.largest,
                self.ancestors,
                self.closed,
                {key: term.depends for key, term in self.terms.items()},
                self._stages(),
                any(map(is_score, self.guide_sites.values())),
            )
        self.structure = structure

    def _run(self, max_plate_nesting: float) -> None:
        """Run guide and model, and find which terms depend on which sites."""
        if isinstance(poutine.unwrap(self.guide), Messenger):
            raise ValueError(
                "The guide is a messenger that traces the model itself; write it as a function "
                "instead."
            )
        # the model replays the guide's marked values, and hands their marks on to its own terms
        with Track():
            self.guide_trace = poutine.trace(self.guide).get_trace(*self.args, **self.kwargs)
            replayed = poutine.replay(self.model, trace=self.guide_trace)
            self.model_trace = poutine.trace(replayed).get_trace(*self.args, **self.kwargs)
        self.guide_sites, in_guide = sample_sites(self.guide_trace)
        self.model_sites, in_model = sample_sites(self.model_trace)
        self.subsamples: dict[str, Any] = in_guide | in_model
        refuse(self.model_sites, self.guide_sites)
        sites = [*self.guide_sites.values(), *self.model_sites.values()]
        if is_validation_enabled():
            check_model_guide_match(self.model_trace, self.guide_trace)
            for site in sites:
                log_prob = detach_provenance(site["fn"].log_prob(site["value"]))
                # Pyro looks at the batch shape of the log probability, which need not be the site's
                check_site_shape({**site, "log_prob": log_prob}, max_plate_nesting)  # pyright: ignore[reportArgumentType]
        batches = [site["fn"].batch_shape for site in sites]
        room = 0 if max_plate_nesting == inf else int(max_plate_nesting)
        self.nesting = max(room, *map(len, batches), 0)
        self.largest = max(map(prod, batches), default=1)

        self.ancestors: dict[str, frozenset[str]] = {}
        # in the order in which the guide draws them: ancestors of ancestors are known already
        for name, site in self.guide_sites.items():
            # also of the unmasked one: under `mask(False)` the log probability is a plain zero
            log_probs = [fn.log_prob(site["value"]) for fn in (site["fn"], unwrap(site["fn"]))]
            parents = get_provenance([log_probs, site["scale"], site["mask"]])
            parents = (parents | parameters_behind(site)) - {name}
            self.ancestors[name] = self._with_ancestors(parents)
        self.closed = frozenset(name for name in self.guide_sites if self._is_closed(name))
        for key, value, site in elbo_terms(self.model_sites, self.guide_sites, self.closed):
            found = get_provenance(value)
            if key[0] != "kl":
                found |= parameters_behind(site)
            self.terms[key] = Term(
                detach_provenance(value), plates_of(site), self._with_ancestors(found)
            )

    def _run_guide(self, structure: Structure) -> None:
        """Run the guide alone, with the dependences of an earlier run."""
        self.guide_trace = poutine.trace(self.guide).get_trace(*self.args, **self.kwargs)
        self.guide_sites, self.subsamples = sample_sites(self.guide_trace)
        if kinds(self.guide_sites) != structure.guide:
            raise ChangedError
        self.nesting = structure.nesting
        batches = [prod(site["fn"].batch_shape) for site in self.guide_sites.values()]
        # a larger batch of data than before is no other structure
        self.largest = max(structure.largest, *batches, 1)
        self.ancestors = structure.ancestors
        self.closed = structure.closed

    def meet(self, model_sites: dict[str, Site], subsamples: dict[str, Any]) -> None:
        """Take the model's sites from the run that evaluates the guide's own samples."""
        model_sites = inside(model_sites)
        if kinds(model_sites) != self.structure.model:
            raise ChangedError
        for name in self.closed:
            q = self.guide_sites[name]
            p = model_sites[name]
            # one KL stands for both terms, so that both must be counted alike
            if not (same(q["scale"], p["scale"]) and same(q["mask"], p["mask"])):
                raise ChangedError
        self.model_sites = model_sites
        self.subsamples = subsamples | self.subsamples

    def meet_terms(self, terms: dict[Key, Tensor]) -> None:
        """Take the terms [n, *batch] of the run whose first path is the true one."""
        for key, x in terms.items():
            # a term that does not depend on the plate has no dimension of it
            alone = x.ndim <= self.nesting
            site = (self.guide_sites if key[0] == "q" else self.model_sites)[key[1]]
            self.terms[key] = Term(
                x if alone else x[0], plates_of(site), self.structure.depends[key]
            )

    def score(self) -> Tensor | float:
        """The score term of the guide's factors with has_rsample=False: the value is
        zero, the gradient that of ln q times all terms of a row.
        """
        total: Tensor | float = 0.0
        for site in filter(is_score, self.guide_sites.values()):
            own = plates_of(site)
            log_q = detach_provenance(site["fn"].log_prob(site["value"]))
            if site["mask"] is not None:
                log_q = log_q * site["mask"]
            credit = log_q.new_zeros(())
            for term in self.terms.values():
                # rows of a shared plate are independent: each gets the credit of its own terms
                shared = {dim for _, dim, _ in own & term.plates}
                others = [dim for dim in range(-term.value.ndim, 0) if dim not in shared]
                value = term.value.detach()
                credit = credit + (value.sum(others, keepdim=True) if others else value)
            total = total + (credit * (log_q - log_q.detach())).sum()
        return total

    def _with_ancestors(self, names: frozenset[str]) -> frozenset[str]:
        return names.union(*(self.ancestors[name] for name in names))

    def _is_closed(self, name: str) -> bool:
        """Whether E[ln p - ln q] of this site, given all sites that do not depend on
        it, is a known KL.
        """
        if name not in self.model_sites:
            return False
        q = self.guide_sites[name]
        p = self.model_sites[name]
        # deterministic ones
        if q["is_observed"] or p["is_observed"]:
            return False
        if not (
            plates_of(q) == plates_of(p)
            and same(q["scale"], p["scale"])
            and same(q["mask"], p["mask"])
        ):
            return False
        # equal for these samples only, perhaps
        if get_provenance([q["scale"], q["mask"], p["scale"], p["mask"]]):
            return False
        divergence = kl(q["fn"], p["fn"])
        # a prior that depends on the site's own value is no prior of it
        return divergence is not None and name not in self._with_ancestors(
            get_provenance(divergence)
        )

    def stages(self) -> list[tuple[dict[str, DiscreteSite], Plates]]:
        """Discrete sites that do not depend on each other and have the same rows, and
        the plates of these rows.

        A stage comes after those that it depends on.
        """
        found: list[tuple[dict[str, DiscreteSite], Plates]] = []
        for names, rows in self.structure.stages:
            choices = {name: self.choices[name] for name in names}
            around = plates_of(self.choices[names[0]].site)
            found.append((choices, frozenset(plate for plate in around if plate[:2] in rows)))
        return found

    def _stages(self) -> list[tuple[list[str], frozenset[tuple[str, int]]]]:
        depth: dict[str, int] = {}
        groups: dict[tuple[int, Plates], list[str]] = {}
        for name, choice in self.choices.items():
            # sites of one depth cannot depend on each other
            depth[name] = 1 + max(
                (depth[above] for above in self.ancestors[name] if above in depth), default=0
            )
            # rows of f: the plates that the site shares with every term that depends on it
            shared = [term.plates for term in self.terms.values() if name in term.depends]
            # a site under `mask(False)` has no term that says so
            shared += [
                plates_of(site)
                for below, site in self.guide_sites.items()
                if name in self.ancestors[below]
            ]
            rows = plates_of(choice.site).intersection(*shared)
            groups.setdefault((depth[name], rows), []).append(name)
        return [
            (names, frozenset((plate, dim) for plate, dim, _ in rows))
            for (_, rows), names in sorted(groups.items(), key=lambda group: group[0][0])
        ]


def inside(sites: dict[str, Site]) -> dict[str, Site]:
    """The sites without the plate of the paths around them."""
    return {
        name: {
            **site,
            "cond_indep_stack": [f for f in site["cond_indep_stack"] if f.name != PATHS],
        }
        for name, site in sites.items()
    }
