"""Gradients that a program loses under Pyro's provenance tracking."""

from __future__ import annotations

import torch
from pyro import distributions as dist
from pyro import poutine
from pyro.ops.provenance import detach_provenance
from torch import Tensor

from arsm.driver import graph_nodes
from arsm.pyro.categories import unwrap
from arsm.pyro.sites import Follow, Site, sample_sites
from arsm.pyro.true_path import TruePath

LOST = (
    "Site {!r} loses a parameter's gradient under Pyro's provenance tracking, as a custom "
    "torch.autograd.Function does; use plain torch operations there."
)


def check_guide(path: TruePath) -> None:
    """Refuse a guide that loses gradients between its sites."""
    below = {name: site for name, site in path.guide_sites.items() if path.ancestors[name]}
    if not below:
        return
    values = {name: detach_provenance(site["value"]) for name, site in path.guide_sites.items()}

    def again() -> dict[str, Site]:
        with Follow(path.subsamples | values):
            trace = poutine.trace(path.guide).get_trace(*path.args, **path.kwargs)
            return sample_sites(trace)[0]

    def log_q(name: str, sites: dict[str, Site]) -> Tensor:
        fn = unwrap(sites[name]["fn"])
        return detach_provenance(fn.v if isinstance(fn, dist.Delta) else fn.log_prob(values[name]))

    first, second = again(), again()
    for name in below.keys() & first.keys() & second.keys():
        kept = leaves_of(log_q(name, second))
        if loses_gradient(log_q(name, below), log_q(name, first), kept):
            raise ValueError(LOST.format(name))


def loses_gradient(tracked: Tensor, plain: Tensor, kept: set[Tensor] | None) -> bool:
    """Whether a site's value has fewer gradients, or others, with provenance tracking
    than without.

    Args:
        kept: the leaf tensors that count; all if None.
    """
    found = leaves_of(plain)
    leaves = list(found if kept is None else found & kept)
    if not leaves:
        return False
    if not leaves_of(tracked).issuperset(leaves):
        return True
    # another value has another gradient: that is refused elsewhere, with its own words
    if not _close(tracked, plain.reshape(tracked.shape)):
        return False
    pair = [torch.autograd.grad(x.sum(), leaves, retain_graph=True) for x in (tracked, plain)]
    return not all(_close(a.to_dense(), b.to_dense()) for a, b in zip(*pair, strict=True))


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding, relative to the largest entry."""
    scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


def leaves_of(x: Tensor) -> set[Tensor]:
    """The leaf tensors that get a gradient from x."""
    return {
        leaf for node in graph_nodes(x) if (leaf := getattr(node, "variable", None)) is not None
    }
