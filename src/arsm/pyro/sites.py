"""The sites of a Pyro trace, the terms that they add to the ELBO, and which sites are refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from pyro import distributions as dist
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.ops.provenance import detach_provenance, get_provenance, track_provenance
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import Distribution, Transform

from arsm.pyro.categories import FAMILIES, kl, logits_of, unwrap

Site = dict[str, Any]
"""A node of a trace."""
Plates = frozenset[tuple[str, int, int]]
"""Name, dimension and size of the vectorised plates around a site."""
Key = tuple[str, str]
"""A term: "p", "q" or "kl", and the name of its site."""

STRAIGHT_THROUGH = (
    dist.OneHotCategoricalStraightThrough,
    dist.RelaxedOneHotCategoricalStraightThrough,
    dist.RelaxedBernoulliStraightThrough,
)


class ChangedError(Exception):
    """A run that does not have the structure of the earlier ones."""


def sample_sites(trace: poutine.Trace) -> tuple[dict[str, Site], dict[str, Tensor]]:
    """The sample sites, and the indices that each plate drew."""
    nodes: dict[str, Site] = {
        name: dict(site) for name, site in trace.nodes.items() if site.get("type") == "sample"
    }
    # a plate's indices are a sample site in Pyro, but no random choice of model or guide
    plates = {
        name: site["value"] for name, site in nodes.items() if isinstance(site["fn"], _Subsample)
    }
    return {name: site for name, site in nodes.items() if name not in plates}, plates


def plates_of(site: Site) -> Plates:
    """The vectorised plates around a site."""
    batch = site["fn"].batch_shape

    def size(frame: Any) -> int:
        # a plate without a size takes that of the site
        if frame.size >= 0:
            return frame.size
        return batch[frame.dim] if len(batch) >= -frame.dim else 1

    return frozenset(
        (frame.name, frame.dim, size(frame))
        for frame in site["cond_indep_stack"]
        if frame.vectorized
    )


def parameters_behind(site: Site) -> frozenset[str]:
    """The sites that the tensors inside a site's distribution depend on.

    An OrderedLogistic writes its probabilities into an empty tensor, where provenance
    tracking loses them.
    """
    return get_provenance(list(vars(unwrap(site["fn"])).values()))


def is_factor(site: Site) -> bool:
    """Whether the site is a `pyro.factor`."""
    return isinstance(unwrap(site["fn"]), dist.Unit)


def is_score(site: Site) -> bool:
    """Whether a guide's site is a factor that stands for samples drawn without a
    reparameterisation.
    """
    return is_factor(site) and not site["fn"].has_rsample


def elbo_terms(
    model: dict[str, Site],
    guide: dict[str, Site],
    closed: frozenset[str],
    wanted: set[Key] | None = None,
    shared: frozenset[str] = frozenset(),
    nesting: int = 0,
) -> Iterator[tuple[Key, Tensor, Site]]:
    """The terms of the ELBO (all, or the given ones), [*batch], scaled and masked; a KL
    for each closed site, once for all paths where they share it.
    """

    def log_prob(site: Site) -> Tensor:
        return scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"], site["mask"])

    for name, site in model.items():
        key = ("kl" if name in closed else "p", name)
        if wanted is not None and key not in wanted:
            continue
        if name in closed:
            divergence = kl(guide[name]["fn"], site["fn"], nesting if name in shared else None)
            # it had one in an earlier run
            if divergence is None:
                raise ChangedError
            yield key, scale_and_mask(-divergence, site["scale"], site["mask"]), site
        else:
            yield key, log_prob(site), site
    for name, site in guide.items():
        if name not in closed and (wanted is None or ("q", name) in wanted):
            log_q = log_prob(site)
            # the expected gradient of a sampled site's own ln q is zero
            sampled = is_score(site) or logits_of(site["fn"]) is not None
            yield ("q", name), -(log_q.detach() if sampled else log_q), site


def same(a: Any, b: Any) -> bool:
    """Whether two scales, or two masks, are equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(detach_provenance(a), detach_provenance(b))
    return type(a) is type(b) and a == b


def sum_to(x: Tensor, dims: list[int]) -> Tensor:
    """The sum over all other dimensions."""
    others = [dim for dim in range(-x.ndim, 0) if dim not in dims]
    return x.sum(others) if others else x


class Track(Messenger):
    """Mark the value of every latent site with the site's name."""

    def _pyro_sample(self, msg: Any) -> None:
        # Marked parameters would cost Beta and Dirichlet the gradient of their draw, and give all
        # rows of an Exponential the same noise.
        if (
            not msg["is_observed"]
            and msg["value"] is None
            and not isinstance(msg["fn"], _Subsample)
        ):
            msg["value"] = _unmarked(msg["fn"])(*msg["args"], **msg["kwargs"])

    def _pyro_post_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and not isinstance(msg["fn"], _Subsample):
            # its own name alone: the site's parents are found by its ln q, and kept in `ancestors`
            msg["value"] = track_provenance(
                detach_provenance(msg["value"]), frozenset({msg["name"]})
            )


def _unmarked(part: Any, copies: dict[int, Any] | None = None) -> Any:
    """A distribution whose parameters, and those of the distributions and transforms in
    it, are not marked.
    """
    # a transform and its inverse point to each other, and would be copied for ever
    copies = {} if copies is None else copies
    if isinstance(part, list):
        return [_unmarked(each, copies) for each in part]
    if not isinstance(part, Distribution | Transform):
        return detach_provenance(part) if isinstance(part, Tensor) else part
    if id(part) not in copies:
        copies[id(part)] = found = copy.copy(part)
        found.__dict__.update(
            {name: _unmarked(value, copies) for name, value in vars(part).items()}
        )
    return copies[id(part)]


class Follow(Messenger):
    """Give latent sites their values: a tensor, or a function of the site's distribution."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and (value := self.values.get(msg["name"])) is not None:
            msg["value"] = value if isinstance(value, Tensor) else value(msg["fn"])
            msg["done"] = True


def refuse(model: dict[str, Site], guide: dict[str, Site]) -> None:
    """Refuse sites that cannot be estimated without bias."""
    for name, site in guide.items():
        kind = type(unwrap(site["fn"])).__name__
        if is_factor(site):
            if "has_rsample" not in vars(unwrap(site["fn"])):
                raise ValueError(
                    f"Guide site {name!r} is a factor without has_rsample; give it True if the "
                    "samples that it belongs to are reparameterised, else False."
                )
            continue
        # pyro.deterministic is an observed site of its own value
        if site["is_observed"] and not site["infer"].get("_deterministic"):
            raise ValueError(
                f"Guide site {name!r} is observed; observe it in the model, or leave it out of the "
                "guide."
            )
        # Pyro says has_rsample of these, so that they must be asked for by name
        if isinstance(unwrap(site["fn"]), STRAIGHT_THROUGH):
            raise ValueError(
                f"Guide site {name!r} is {kind}, whose gradient is biased; use Categorical or "
                "Bernoulli."
            )
        if isinstance(unwrap(site["fn"]), dist.Rejector):
            raise ValueError(
                f"Guide site {name!r} is {kind}, which is reparameterised in part only; use "
                "pyro.infer.Trace_ELBO."
            )
        if not site["is_observed"] and logits_of(site["fn"]) is None and not site["fn"].has_rsample:
            raise ValueError(
                f"Guide site {name!r} is {kind}, which is neither reparameterised nor {FAMILIES}; "
                "use one of these, or pyro.infer.TraceGraph_ELBO."
            )
    for name, site in model.items():
        if not site["is_observed"] and name not in guide:
            raise ValueError(
                f"Model site {name!r} is neither observed nor in the guide; sample it in the "
                "guide, or sum it out with pyro.infer.TraceEnum_ELBO."
            )
