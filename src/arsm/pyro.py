r"""`arsm.pyro.ELBO`: the library's sampling estimators as a loss for `pyro.infer.SVI`.

    ELBO = E_q[sum_i t_i],    t_i = ln p or -ln q of a site, or -KL(q || p) where the site's prior allows it

One run of guide and model, the true path, gives all terms and, by Pyro's provenance tracking, the sites that each term
depends on. The guide's discrete sites fall into stages: sites that do not depend on each other and have the same rows.
Given the true values of all sites that do not depend on the stage, its gradient is the problem of `arsm.estimate`,

    phi [*R, K, C],    f(z)_r = sum over row r of the terms that depend on z

R are the plates that the stage shares with all of these terms; its other dimensions are variables. The queries of all
stages are paths of a second run, with a plate around model and guide. On a path of stage t the sites that depend on t
are drawn again, discrete ones with the noise of the true path as in `arsm.estimate_layers`; all others keep their
true values. Scales and masks belong to the terms. A term's own gradient (parameters of the model, reparameterised
sites, a KL) is autograd's, averaged over the live queries of the first stage that the term depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro import distributions as dist
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.infer.util import is_validation_enabled
from pyro.ops.provenance import detach_provenance, get_provenance, track_provenance
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from pyro.util import check_model_guide_match, check_site_shape, warn_if_nan
from torch import Tensor
from torch.distributions import kl_divergence

from arsm.categorical import one_hot
from arsm.driver import attach, check_estimator
from arsm.evaluate import NotFiniteError
from arsm.noise import argmin_sample, dirichlet, given_winner
from arsm.types import Estimator

Program = Callable[..., Any]
"""A Pyro model or guide."""
Site = dict[str, Any]
"""A node of a Pyro trace."""
Plates = frozenset[tuple[str, int, int]]
"""Name, dimension and size of the vectorised plates around a site."""
Key = tuple[str, str]
"""A term: "p", "q" or "kl", and its site."""

WRAPPERS = (dist.Independent, dist.MaskedDistribution, dist.ExpandedDistribution)
STRAIGHT_THROUGH = (
    dist.OneHotCategoricalStraightThrough,
    dist.RelaxedOneHotCategoricalStraightThrough,
    dist.RelaxedBernoulliStraightThrough,
)


class ELBO(pyro.infer.ELBO):
    """The negative ELBO, with an estimator for the gradients of the guide's discrete sites.

        svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), loss=arsm.pyro.ELBO(arsm.RLOO(8)))

    Guide sites are Categorical, OneHotCategorical or Bernoulli (also after `to_event`, `expand` or `mask`), or
    reparameterised. Model and guide must allow a plate around them, as for `Trace_ELBO(vectorize_particles=True)`. A
    plate is subsampled once per step, for all samples together.

    Args:
        estimator: one that only evaluates f and can start from a given sample: RLOO, ARSM, LocalExpectation, ...
    """

    def __init__(self, estimator: Estimator) -> None:
        check_estimator(estimator)
        name = type(estimator).__name__
        if estimator.needs_gradient:
            raise ValueError(
                f"{name} differentiates the model in relaxed samples, which Pyro's discrete sites do not take; use an "
                "estimator that only evaluates the model, such as RLOO(8) or ARSM()."
            )
        if estimator.target != "mean":
            raise ValueError(f"{name} estimates a multi-sample bound, not the ELBO; use one such as RLOO(8) or ARSM().")
        if estimator.deterministic or not estimator.given_sample:
            raise ValueError(
                f"{name} cannot start from the sample that the guide drew; use one such as RLOO(8) or ARSM(), or "
                "pyro.infer.TraceEnum_ELBO for the exact gradient."
            )
        super().__init__()
        self.estimator = estimator

    def _get_trace(
        self, model: Program, guide: Program, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[poutine.Trace, poutine.Trace]:
        path = TruePath(model, guide, args, kwargs)
        return path.model_trace, path.guide_trace

    def loss(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> float:
        """-ELBO from one sample."""
        with torch.no_grad():
            return _minus(sum(term.value.sum() for term in TruePath(model, guide, args, kwargs).terms.values())).item()

    def differentiable_loss(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> Tensor:
        """-ELBO [], whose backward gives every parameter of model and guide its gradient estimate."""
        path = TruePath(model, guide, args, kwargs)
        stages = [Stage(self.estimator, *found) for found in path.stages()]
        others = OtherPaths(path, stages)
        elbo = sum(term.value.sum() for term in path.terms.values() if not any(stage.moves(term) for stage in stages))
        for t, stage in enumerate(stages):
            moved = {key for key, term in path.terms.items() if stage.moves(term)}
            new = {key for key in moved if not any(stage.moves(path.terms[key]) for stage in stages[:t])}
            elbo = elbo + stage.value(others.terms(t, new), others.terms(t, moved))
        return _minus(elbo)

    def loss_and_grads(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> float:
        """-ELBO; adds the estimate of its gradient to the parameters' `grad`."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        if loss.requires_grad:
            loss.backward(retain_graph=self.retain_graph)
        return loss.item()


def _minus(elbo: Tensor | float) -> Tensor:
    loss = -torch.as_tensor(elbo)
    warn_if_nan(loss, "loss")
    return loss


# ---------------------------------------------------------------- the true path


@dataclass(frozen=True, eq=False)
class Term:
    """A summand of the ELBO on the true path."""

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

    def value(self, z: Tensor) -> Tensor:
        """Categories [...] as values of the site."""
        like = self.site["value"]
        hot = isinstance(_unwrap(self.site["fn"]), dist.OneHotCategorical)
        return one_hot(z, self.logits.shape[-1], like.dtype) if hot else z.to(like.dtype)

    def rows(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """[*batch, *event, ...] -> [*R, K, ...]."""
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
    """One run of guide and model: the sites, the terms and what depends on what."""

    def __init__(self, model: Program, guide: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(poutine.unwrap(guide), Messenger):
            raise ValueError("The guide is a messenger that traces the model itself; write it as a function instead.")
        self.model, self.guide, self.args, self.kwargs = model, guide, args, kwargs
        with Track():
            self.guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
            replayed = poutine.replay(model, trace=self.guide_trace)
            self.model_trace = poutine.trace(replayed).get_trace(*args, **kwargs)
        self.subsamples = _subsamples(self.guide_trace) | _subsamples(self.model_trace)
        self.guide_sites, self.model_sites = _samples(self.guide_trace), _samples(self.model_trace)
        _refuse(self.guide_sites, self.model_sites)
        if is_validation_enabled():
            check_model_guide_match(self.model_trace, self.guide_trace)
        sites = [*self.guide_sites.values(), *self.model_sites.values()]
        self.nesting = max((len(site["fn"].batch_shape) for site in sites), default=0)

        self.ancestors: dict[str, frozenset[str]] = {}
        for name, site in self.guide_sites.items():
            parents = get_provenance(site["fn"].log_prob(site["value"])) - {name}
            self.ancestors[name] = self._with_ancestors(parents)
        self.closed = frozenset(name for name in self.guide_sites if self._has_closed_form(name))
        self.terms = {
            key: Term(detach_provenance(value), _plates(site), self._with_ancestors(get_provenance(value)))
            for key, value, site in _terms(self.model_sites, self.guide_sites, self.closed)
        }
        self.choices = {
            name: Choice(site, detach_provenance(logits), _categories(site["fn"], detach_provenance(site["value"])))
            for name, site in self.guide_sites.items()
            if (logits := _logits(site["fn"])) is not None
        }

    def _with_ancestors(self, names: frozenset[str]) -> frozenset[str]:
        return names.union(*(self.ancestors[name] for name in names))

    def _has_closed_form(self, name: str) -> bool:
        """Whether E[ln p - ln q] of this site, given the sites that do not depend on it, is a KL that torch knows."""
        if name not in self.model_sites:
            return False
        q, p = self.guide_sites[name], self.model_sites[name]
        if not (_plates(q) == _plates(p) and _same(q["scale"], p["scale"]) and _same(q["mask"], p["mask"])):
            return False
        kl = _kl(q["fn"], p["fn"])
        used = get_provenance([kl, q["scale"], q["mask"], p["scale"], p["mask"]])
        return kl is not None and name not in self._with_ancestors(used)

    def stages(self) -> list[tuple[dict[str, Choice], Plates]]:
        """The discrete sites with the same rows and the same number of discrete sites above them in a chain."""
        depth: dict[str, int] = {}
        groups: dict[tuple[int, Plates], dict[str, Choice]] = {}
        for name, choice in self.choices.items():
            depth[name] = 1 + max((depth[above] for above in self.ancestors[name] if above in depth), default=0)
            shared = [term.plates for term in self.terms.values() if name in term.depends]
            groups.setdefault((depth[name], _plates(choice.site).intersection(*shared)), {})[name] = choice
        return [(choices, plates) for (_, plates), choices in sorted(groups.items(), key=lambda item: item[0][0])]


class Track(Messenger):
    """Mark the values of latent sites with the site's name."""

    def _pyro_post_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and not isinstance(msg["fn"], _Subsample):
            msg["value"] = track_provenance(detach_provenance(msg["value"]), frozenset({msg["name"]}))


class Follow(Messenger):
    """Give sites their values: a tensor, or a function of the site's distribution."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and (value := self.values.get(msg["name"])) is not None:
            msg["value"] = value if isinstance(value, Tensor) else value(msg["fn"])
            msg["done"] = True


# ---------------------------------------------------------------- the estimator's paths


class Stage:
    """Discrete sites that one set of queries moves together."""

    def __init__(self, estimator: Estimator, choices: dict[str, Choice], plates: Plates) -> None:
        self.estimator, self.choices = estimator, choices
        ordered = sorted(plates, key=lambda plate: plate[1])
        self.dims, self.sizes = [plate[1] for plate in ordered], [plate[2] for plate in ordered]
        parts = [choice.rows(choice.logits, self.dims) for choice in choices.values()]
        most = max(part.shape[-1] for part in parts)
        pad = torch.nn.functional.pad
        self.logits = torch.cat([pad(part, (0, most - part.shape[-1]), value=-torch.inf) for part in parts], -2)
        self.widths = [part.shape[-2] for part in parts]
        z = torch.cat([choice.rows(choice.z, self.dims) for choice in choices.values()], -1)
        logits = self.logits.detach()
        self.queries = estimator.ask(logits, estimator.noise(logits, z=z))
        number = torch.arange(self.queries.same_as.shape[0], device=z.device)
        asked = (self.queries.same_as.flatten(1) == number.unsqueeze(-1)).any(-1)
        self.asked = [0, *(number[1:][asked[1:]].tolist())]
        self.live = len([m for m in self.asked if m < self.queries.weight.shape[0]])

    def moves(self, term: Term) -> bool:
        """Whether the term depends on a site of this stage."""
        return not term.depends.isdisjoint(self.choices)

    def points(self, queries: list[int]) -> dict[str, Tensor]:
        """Each site's categories [n, *batch, *event] at n queries."""
        parts = self.queries.points[queries].split(self.widths, -1)
        return {
            name: choice.from_rows(part, self.dims)
            for (name, choice), part in zip(self.choices.items(), parts, strict=True)
        }

    def value(self, new: Tensor, moved: Tensor) -> Tensor:
        """[]: the sum of the terms `new` with the gradient of the terms `moved`, [n, *R] at the queries asked."""
        same_as = self.queries.same_as
        if not bool(moved.isfinite().all()):
            raise NotFiniteError(
                f"ln p - ln q is infinite or NaN for a sample of {', '.join(map(repr, self.choices))}; give every value "
                "that the guide can draw a probability above zero in the model."
            )
        place = torch.zeros(same_as.shape[0], dtype=torch.int64, device=same_as.device)
        place[self.asked] = torch.arange(len(self.asked), device=same_as.device)
        values = moved.detach().gather(0, place[same_as])
        live = new[: self.live].gather(0, place[same_as[: self.queries.weight.shape[0]]])
        gradient = self.estimator.tell(self.logits.detach(), self.queries, values)
        assert gradient is not None  # only estimators that need f's gradient tell nothing
        masked = self.logits == -torch.inf
        value = self.estimator.value(self.queries, live)
        return attach(value, self.logits.masked_fill(masked, 0), gradient.masked_fill(masked, 0)).sum()


class OtherPaths:
    """The terms on the paths of all queries but the true ones."""

    def __init__(self, path: TruePath, stages: list[Stage]) -> None:
        self.path, self.stages = path, stages
        self.above = {name: {t for t in range(len(stages)) if above & set(stages[t].choices)} for name, above in path.ancestors.items()}
        self.noise = {
            name: given_winner(choice.logits, choice.z, dirichlet(choice.logits))
            for name, choice in path.choices.items()
            if self.above[name]
        }
        asked = [(t, m) for t, stage in enumerate(stages) for m in stage.asked[1:]]
        live = [(t, m) for t, m in asked if m in stages[t].asked[: stages[t].live]]
        rest = [query for query in asked if query not in live]
        self.runs = [(live, self._run(live) if live else {})]
        with torch.no_grad():
            self.runs.append((rest, self._run(rest) if rest else {}))

    def terms(self, t: int, keys: set[Key]) -> Tensor:
        """Their sum at the queries that stage t asked for, [n, *R]."""
        stage, particles = self.stages[t], -1 - self.path.nesting
        zero = stage.logits.new_zeros(1, *stage.sizes)
        parts = [sum((_rows(self.path.terms[key].value, stage.dims) for key in keys), zero)]
        for queries, terms in self.runs:
            if mine := [i for i, (s, _) in enumerate(queries) if s == t]:
                start = zero.expand(len(mine), *stage.sizes)
                parts.append(sum((_rows(terms[key], stage.dims, particles)[mine] for key in keys), start))
        return torch.cat(parts)

    def _run(self, queries: list[tuple[int, int]]) -> dict[Key, Tensor]:
        path = self.path
        values = dict(path.subsamples)
        for name in path.guide_sites:
            values[name] = lambda fn, name=name: self._value(name, queries, fn)
        plate = pyro.plate("arsm_paths", len(queries), dim=-1 - path.nesting)
        if any(self.above.values()):
            with Follow(values), plate:
                guide_sites = _samples(poutine.trace(path.guide).get_trace(*path.args, **path.kwargs))
        else:
            guide_sites = {
                name: site | {"value": self._value(name, queries, None)} for name, site in path.guide_sites.items()
            }
        values = path.subsamples | {name: site["value"] for name, site in guide_sites.items()}
        with Follow(values), plate:
            model_sites = _samples(poutine.trace(path.model).get_trace(*path.args, **path.kwargs))
        return self._check(queries, {key: detach_provenance(x) for key, x, _ in _terms(model_sites, guide_sites, path.closed)})

    def _value(self, name: str, queries: list[tuple[int, int]], fn: Any) -> Tensor:
        """A guide site's values on the paths of these queries, from its distribution where it is drawn again."""
        site, choice = self.path.guide_sites[name], self.path.choices.get(name)
        batch = len(site["fn"].batch_shape)
        value = self._lift(choice.z if choice else detach_provenance(site["value"]), batch)
        value = value.expand(len(queries), *value.shape[1:])
        again = torch.tensor([t in self.above[name] for t, _ in queries], device=value.device)
        if bool(again.any()):
            drawn = fn() if choice is None else argmin_sample(_logits(fn), self._lift(self.noise[name], batch))
            value = torch.where(again.view(-1, *(1,) * (value.ndim - 1)), drawn, value)
        if choice is None:
            return value
        for t, stage in enumerate(self.stages):
            mine = [i for i, (s, _) in enumerate(queries) if s == t]
            if mine and name in stage.choices:
                points = stage.points([queries[i][1] for i in mine])[name]
                value = value.index_copy(0, torch.tensor(mine, device=value.device), self._lift(points, batch, 1))
        return choice.value(value)

    def _lift(self, x: Tensor, batch: int, lead: int = 0) -> Tensor:
        """[*batch, ...] -> [1, *batch, ...], or [n, *batch, ...] kept, where batch gets as many dimensions as plates."""
        first = x.shape[:1] if lead else (1,)
        return x.reshape(*first, *(1,) * (self.path.nesting - batch), *x.shape[lead:])

    def _check(self, queries: list[tuple[int, int]], terms: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Refuse a model or guide whose sites change, that no plate fits around, or whose ways Pyro lost."""
        if terms.keys() != self.path.terms.keys():
            name = sorted(terms.keys() ^ self.path.terms.keys())[0][1]
            raise ValueError(f"Site {name!r} exists for some samples only; model and guide must have the same sites always.")
        for key, x in terms.items():
            term = self.path.terms[key]
            fixed = [i for i, (t, _) in enumerate(queries) if not self.stages[t].moves(term)]
            if len(fixed) < len(queries) and x.shape[: x.ndim - self.path.nesting] != (len(queries),):
                raise ValueError(
                    f"Site {key[1]!r} has the shape {list(x.shape)} for {len(queries)} samples at once; write model and "
                    "guide so that a plate fits around them, as for Trace_ELBO(vectorize_particles=True)."
                )
            if fixed and is_validation_enabled():
                x = x[fixed] if x.ndim > self.path.nesting else x
                if not torch.allclose(x, term.value.expand_as(x), rtol=1e-3, atol=1e-3):
                    raise ValueError(
                        f"Site {key[1]!r} changes with a discrete site although Pyro's provenance tracking finds no way "
                        "between them; use plain torch operations (no compiled or scripted code, no dropout) there."
                    )
        return terms


# ---------------------------------------------------------------- sites


def _samples(trace: poutine.Trace) -> dict[str, Site]:
    """Sample sites, without the subsamples of plates."""
    return {
        name: dict(site)
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not isinstance(site["fn"], _Subsample)
    }


def _subsamples(trace: poutine.Trace) -> dict[str, Tensor]:
    """The indices that each plate drew."""
    return {
        name: site["value"]
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and isinstance(site["fn"], _Subsample)
    }


def _plates(site: Site) -> Plates:
    return frozenset((frame.name, frame.dim, frame.size) for frame in site["cond_indep_stack"] if frame.vectorized)


def _terms(
    model_sites: dict[str, Site], guide_sites: dict[str, Site], closed: frozenset[str]
) -> Iterator[tuple[Key, Tensor, Site]]:
    """Every summand of the ELBO [*batch], scaled and masked."""
    for name, site in model_sites.items():
        if name in closed:
            kl = _kl(guide_sites[name]["fn"], site["fn"])
            yield ("kl", name), scale_and_mask(-kl, site["scale"], site["mask"]), site
        else:
            yield ("p", name), _log_prob(site), site
    for name, site in guide_sites.items():
        if name not in closed:
            log_q = _log_prob(site)
            # the expected gradient of a discrete site's own ln q is zero
            yield ("q", name), -(log_q if _logits(site["fn"]) is None else log_q.detach()), site


def _log_prob(site: Site) -> Tensor:
    return scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"], site["mask"])


def _rows(x: Tensor, dims: list[int], particles: int | None = None) -> Tensor:
    """Sum over all dimensions but these plates' and the particles'."""
    others = [dim for dim in range(-x.ndim, 0) if dim not in dims and dim != particles]
    return x.sum(others) if others else x


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or torch.equal(detach_provenance(a), detach_provenance(b))
    return type(a) is type(b) and a == b


def _refuse(guide_sites: dict[str, Site], model_sites: dict[str, Site]) -> None:
    """Refuse sites that the ELBO cannot be estimated with."""
    for name, site in guide_sites.items():
        kind = type(_unwrap(site["fn"])).__name__
        if site["is_observed"] and not site["infer"].get("_deterministic"):
            raise ValueError(f"Guide site {name!r} is observed; observe it in the model, or leave it out of the guide.")
        if isinstance(_unwrap(site["fn"]), STRAIGHT_THROUGH):
            raise ValueError(f"Guide site {name!r} is {kind}, whose gradient is biased; use Categorical or Bernoulli.")
        if not site["is_observed"] and _logits(site["fn"]) is None and not site["fn"].has_rsample:
            raise ValueError(
                f"Guide site {name!r} is {kind}, which is neither reparameterised nor Categorical, OneHotCategorical or "
                "Bernoulli; use one of these, or pyro.infer.TraceGraph_ELBO."
            )
    for name, site in model_sites.items():
        if not site["is_observed"] and name not in guide_sites:
            raise ValueError(
                f"Model site {name!r} is neither observed nor in the guide; sample it in the guide, or sum it out with "
                "pyro.infer.TraceEnum_ELBO."
            )


# ---------------------------------------------------------------- distributions over categories


def _unwrap(fn: Any) -> Any:
    """The distribution inside `to_event`, `mask` and `expand`."""
    return _unwrap(fn.base_dist) if isinstance(fn, WRAPPERS) else fn


def _logits(fn: Any) -> Tensor | None:
    """[*batch, *event, C] of a distribution over categories, None for any other; a one-hot event counts as an index."""
    base = _unwrap(fn)
    if isinstance(base, dist.Bernoulli):
        logits, shape = torch.stack([torch.zeros_like(base.logits), base.logits], -1), fn.shape()
    elif isinstance(base, dist.Categorical):
        logits, shape = base.logits, fn.shape()
    elif isinstance(base, dist.OneHotCategorical):
        logits, shape = base.logits, fn.shape()[:-1]
    else:
        return None
    return logits.expand(*shape, logits.shape[-1])


def _categories(fn: Any, value: Tensor) -> Tensor:
    """A site's value as categories [*batch, *event] int64."""
    return value.argmax(-1) if isinstance(_unwrap(fn), dist.OneHotCategorical) else value.long()


def _kl(q: Any, p: Any) -> Tensor | None:
    """KL(q || p) [*batch] in closed form, None where there is none."""
    log_q, log_p = _logits(q), _logits(p)
    if log_q is None or log_p is None:
        try:
            return kl_divergence(q, p)
        except NotImplementedError:
            return None
    if _masks(q) or _masks(p) or log_q.shape[-1] != log_p.shape[-1]:
        return None
    log_q, log_p = log_q.log_softmax(-1), log_p.log_softmax(-1)
    ratio = (log_q - log_p).masked_fill(log_q == -torch.inf, 0)
    terms = (log_q.exp() * ratio).sum(-1)
    events = log_q.ndim - 1 - len(q.batch_shape)
    return terms.sum(tuple(range(-events, 0))) if events else terms


def _masks(fn: Any) -> bool:
    return isinstance(fn, dist.MaskedDistribution) or (isinstance(fn, WRAPPERS) and _masks(fn.base_dist))
