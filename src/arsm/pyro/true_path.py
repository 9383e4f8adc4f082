"""One run of guide and model: the terms of the ELBO, their dependences, and the stages of the discrete sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from pyro import poutine
from pyro.infer.util import is_validation_enabled
from pyro.ops.provenance import detach_provenance, get_provenance
from pyro.poutine.messenger import Messenger
from pyro.util import check_model_guide_match
from torch import Tensor

from arsm.pyro.categories import kl, logits_of, to_categories, unwrap
from arsm.pyro.sites import Key, Plates, Site, Track, elbo_terms, plates_of, refuse, same, sample_sites

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
class Choice:
    """A discrete site of the guide on the true path."""

    site: Site
    logits: Tensor
    """[*batch, *event, C], attached."""
    z: Tensor
    """[*batch, *event] int64."""

    def rows(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """[*batch, *event, ...] -> [*R, K, ...], where R are the plates with these dimensions."""
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


class TruePath:
    """Guide and model at the guide's own samples."""

    def __init__(self, model: Program, guide: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(poutine.unwrap(guide), Messenger):
            raise ValueError("The guide is a messenger that traces the model itself; write it as a function instead.")
        self.model, self.guide, self.args, self.kwargs = model, guide, args, kwargs
        with Track():
            self.guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
            replayed = poutine.replay(model, trace=self.guide_trace)
            self.model_trace = poutine.trace(replayed).get_trace(*args, **kwargs)
        self.guide_sites, in_guide = sample_sites(self.guide_trace)
        self.model_sites, in_model = sample_sites(self.model_trace)
        self.subsamples: dict[str, Any] = in_guide | in_model
        refuse(self.model_sites, self.guide_sites)
        if is_validation_enabled():
            check_model_guide_match(self.model_trace, self.guide_trace)
        batches = [site["fn"].batch_shape for site in [*self.guide_sites.values(), *self.model_sites.values()]]
        self.nesting = max(map(len, batches), default=0)
        self.largest = max(map(prod, batches), default=1)

        self.ancestors: dict[str, frozenset[str]] = {}
        for name, site in self.guide_sites.items():
            # also of the unmasked one: under `mask(False)` the log probability is a plain zero
            log_probs = [fn.log_prob(site["value"]) for fn in (site["fn"], unwrap(site["fn"]))]
            parents = get_provenance([log_probs, site["scale"], site["mask"]]) - {name}
            self.ancestors[name] = self._with_ancestors(parents)
        self.closed = frozenset(name for name in self.guide_sites if self._is_closed(name))
        self.terms: dict[Key, Term] = {
            key: Term(detach_provenance(value), plates_of(site), self._with_ancestors(get_provenance(value)))
            for key, value, site in elbo_terms(self.model_sites, self.guide_sites, self.closed)
        }
        self.choices = {
            name: Choice(site, detach_provenance(logits), to_categories(site["fn"], detach_provenance(site["value"])))
            for name, site in self.guide_sites.items()
            if (logits := logits_of(site["fn"])) is not None
        }

    def _with_ancestors(self, names: frozenset[str]) -> frozenset[str]:
        return names.union(*(self.ancestors[name] for name in names))

    def _is_closed(self, name: str) -> bool:
        """Whether E[ln p - ln q] of this site, given all sites that do not depend on it, is a known KL."""
        if name not in self.model_sites:
            return False
        q, p = self.guide_sites[name], self.model_sites[name]
        if q["is_observed"] or p["is_observed"]:  # deterministic ones
            return False
        if not (plates_of(q) == plates_of(p) and same(q["scale"], p["scale"]) and same(q["mask"], p["mask"])):
            return False
        if get_provenance([q["scale"], q["mask"], p["scale"], p["mask"]]):  # equal for these samples only, perhaps
            return False
        divergence = kl(q["fn"], p["fn"])
        return divergence is not None and name not in self._with_ancestors(get_provenance(divergence))

    def stages(self) -> list[tuple[dict[str, Choice], Plates]]:
        """Discrete sites that do not depend on each other and have the same rows, and the plates of these rows.

        A stage comes after those that it depends on.
        """
        depth: dict[str, int] = {}
        groups: dict[tuple[int, Plates], dict[str, Choice]] = {}
        for name, choice in self.choices.items():
            depth[name] = 1 + max((depth[above] for above in self.ancestors[name] if above in depth), default=0)
            shared = [term.plates for term in self.terms.values() if name in term.depends]
            # a site under `mask(False)` has no term that says so
            shared += [plates_of(site) for below, site in self.guide_sites.items() if name in self.ancestors[below]]
            groups.setdefault((depth[name], plates_of(choice.site).intersection(*shared)), {})[name] = choice
        return [(choices, plates) for (_, plates), choices in sorted(groups.items(), key=lambda group: group[0][0])]
