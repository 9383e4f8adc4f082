"""Pyro's distributions over categories: their logits, their values as categories, and
KL divergences.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from pyro import distributions as dist
from torch import Tensor
from torch.distributions import (
    ExpTransform,
    SigmoidTransform,
    StickBreakingTransform,
    kl_divergence,
)

from arsm.categorical import one_hot

FAMILIES = "Categorical, OneHotCategorical or Bernoulli"
"""The distributions over categories, for sentences."""
WRAPPERS = (dist.Independent, dist.MaskedDistribution, dist.ExpandedDistribution)
INVERTIBLE = (ExpTransform, SigmoidTransform, StickBreakingTransform)
"""Transforms without parameters that leave a KL divergence as it is."""


@lru_cache(maxsize=1024)
def _family(kind: type) -> type | None:
    """The class of ours that a distribution belongs to, None for all others.

    Pyro's distributions answer `isinstance` slowly, and every site of every run asks.
    """
    known = (*WRAPPERS, dist.Bernoulli, dist.Categorical, dist.OneHotCategorical)
    return next((each for each in known if issubclass(kind, each)), None)


def unwrap(fn: Any) -> Any:
    """The distribution inside `to_event`, `mask` and `expand`."""
    return unwrap(fn.base_dist) if _family(type(fn)) in WRAPPERS else fn


def logits_of(fn: Any) -> Tensor | None:
    """[*batch, *event, C] of a distribution over categories, None for any other; a
    one-hot vector is one variable.
    """
    base = unwrap(fn)
    family = _family(type(base))
    if family is dist.Bernoulli:
        # a Bernoulli's log odds are those of category 1 against 0
        logits = torch.stack([torch.zeros_like(base.logits), base.logits], -1)
        shape = fn.shape()
    elif family is dist.Categorical:
        logits = base.logits
        shape = fn.shape()
    elif family is dist.OneHotCategorical:
        logits = base.logits
        shape = fn.shape()[:-1]
    else:
        return None
    # `expand` and plates leave the parameters small
    return logits.expand(*shape, logits.shape[-1])


def to_categories(fn: Any, value: Tensor) -> Tensor:
    """A value of the distribution as categories [*batch, *event] int64."""
    return value.argmax(-1) if isinstance(unwrap(fn), dist.OneHotCategorical) else value.long()


def to_value(fn: Any, z: Tensor, like: Tensor) -> Tensor:
    """Categories [..., *batch, *event] as a value of the distribution, with the type of
    another value.
    """
    base = unwrap(fn)
    return (
        one_hot(z, base.logits.shape[-1], like.dtype)
        if isinstance(base, dist.OneHotCategorical)
        else z.to(like.dtype)
    )


def kl(q: Any, p: Any, nesting: int | None = None) -> Tensor | None:
    """KL(q || p) [*batch] in closed form; None if there is none.

    Args:
        nesting: number of batch dimensions to keep where the KL is the same for all paths;
            for categories, it is found for the first path only.
    """
    if isinstance(unwrap(q), dist.Delta):
        # Pyro's own KL leaves out a Delta's density: in an automatic guide, the Jacobian of its
        # transform
        point = q.rsample()
        return q.log_prob(point) - p.log_prob(point)
    # Pyro's own KL applies both masks to both distributions
    if _masks(q) or _masks(p):
        return None
    log_q = logits_of(q)
    log_p = logits_of(p)
    if log_q is None or log_p is None:
        # pairs without a formula are common, and mean a term by samples
        try:
            return kl_divergence(q, p) if _known(unwrap(q)) else None
        except NotImplementedError:
            return None
    if log_q.shape[-1] != log_p.shape[-1] or _events(q) != _events(p):
        return None
    # all paths have the same logits: one of them saves the others' work
    if nesting is not None:
        log_q = log_q[0] if len(q.batch_shape) > nesting else log_q
        log_p = log_p[0] if len(p.batch_shape) > nesting else log_p
    log_q = log_q.log_softmax(-1)
    log_p = log_p.log_softmax(-1)
    # an impossible category of q adds nothing; torch's own KL would give it a gradient of NaN
    ratio = (log_q - log_p).masked_fill(log_q == -torch.inf, 0)
    return (log_q.exp() * ratio).flatten(-1 - _events(q)).sum(-1)


def _known(fn: Any) -> bool:
    """Whether PyTorch's KL from this distribution can be trusted.

    That of a transformed one compares the transforms' current values and takes every
    transform for a bijection; that of a Wishart disagrees with its own log
    probabilities.
    """
    if isinstance(fn, torch.distributions.TransformedDistribution):
        return all(isinstance(transform, INVERTIBLE) for transform in fn.transforms)
    return not isinstance(fn, dist.Wishart)


def _events(fn: Any) -> int:
    """Event dimensions, not counting that of a one-hot vector."""
    return len(fn.event_shape) - isinstance(unwrap(fn), dist.OneHotCategorical)


def _masks(fn: Any) -> bool:
    return isinstance(fn, dist.MaskedDistribution) or (
        isinstance(fn, WRAPPERS) and _masks(fn.base_dist)
    )
