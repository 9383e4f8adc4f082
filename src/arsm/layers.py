r"""`estimate_layers`: T stochastic layers, one below the other.

    E[f(z_1, ..., z_T)],    z_t ~ Cat(softmax(phi_t)),    phi_t a function of z_1, ..., z_{t-1}

For layer t this is `estimate` with f_t(z_t) = f(z_t and a draw of the layers below it) in the place of f, given the
true z_{1:t-1}: f_t is random, but its expectation is the one wanted. At the true sample, f_t's draw is the true path
itself, which the estimators of the layers below make, so that one value carries the gradients of all layers and f at
the true path is evaluated once.

All paths of a row run the same races: below a pseudo vector the samples are argmin(ln pi - phi) with the noise of the
(first) true path, so that they differ by what the pseudo vector changes and not by chance. Given that noise f_t is a
fixed function, whatever it is, hence the estimate is unbiased. An estimator need not say which noise led to its true
sample: `given_winner` draws it from the sample. Only a layer whose own estimator relaxes z draws afresh.

Reference: Yin, Yue and Zhou, ARSM, ICML 2019, algorithm 2. There the layers below are drawn afresh for every pair
(c, j), which costs more and has more variance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.driver import check_estimator, estimate
from arsm.estimators.average import bounds
from arsm.evaluate import Evaluation
from arsm.noise import argmin_sample, dirichlet, given_winner
from arsm.types import Estimate, Estimator

Layer = Callable[..., Tensor]
"""`layer(zs, *context) -> logits [N, K_t, C_t]`, zs being the samples of the layers above, [N, K] each."""


@dataclass(frozen=True, eq=False)
class LayersEstimate:
    """What `arsm.estimate_layers` returns."""

    value: Tensor
    """[N]: f at the true path. Its backward gives every layer's logits their estimate, and the parameters of the layers
    and of f, and the context, their gradient."""
    layers: tuple[Estimate, ...]
    """Each layer's own estimate, the top layer's first; `layers[t].z` is the true path. Below an estimator with several
    live queries a layer has one row for each of them that was evaluated."""


def estimate_layers(
    estimators: Estimator | list[Estimator] | tuple[Estimator, ...],
    layers: Sequence[Layer],
    f: Callable[..., Tensor],
    *context: Tensor,
    generator: torch.Generator | None = None,
    evaluation: Evaluation = "packed",
    max_rows: int | None = 1024,
    frozen: bool = False,
) -> LayersEstimate:
    """Estimate E[f(z_1, ..., z_T)] and its gradient in every layer's logits.

    Args:
        estimators: one for all layers, or one for each.
        layers: from the top, `layers[t](zs, *context) -> logits [N, K_t, C_t]`, row by row; zs holds the samples of the
            layers above, int64 [N, K] each, or floating [N, K, C] from an estimator that `needs_gradient`.
        f: `f(zs, logits, *context) -> [N]`, row by row, with the samples and the detached logits of all layers.
        context: tensors [N, ...]; layers and f receive the rows that belong to each path.
        generator: where the noise comes from.
        evaluation: as for `arsm.estimate`.
        max_rows: as for `arsm.estimate`.
        frozen: as for `arsm.estimate`; the layers learn all the same.

    An estimator with L live queries starts L paths below each of its rows: give `RLOO` a small `live`, and all
    layers together cost the sum of their evaluations. `Exact` enumerates everything below.
    """
    depth = len(layers)
    chosen = list(estimators) if isinstance(estimators, (list, tuple)) else [estimators] * depth
    for estimator in chosen:
        check_estimator(estimator)
    if depth == 0 or len(chosen) != depth:
        raise ValueError(
            "estimate_layers needs at least one layer, and one estimator for all or for each, but has "
            f"{depth} layers and {len(chosen)} estimators."
        )
    for estimator in chosen if depth > 1 else []:
        if bounds(estimator):
            raise ValueError(
                f"{type(estimator).__name__} bounds f by several samples, which cannot be done layer by layer; use "
                "arsm.estimate_bound."
            )
    made: list[list[Estimate]] = [[] for _ in layers]

    def descend(zs: list[Tensor], logits: list[Tensor], *rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The estimate of everything below zs: [N], attached; and its true path's noise [N, K, C] of each layer."""
        t = len(zs)
        below = layer_logits(layers[t], t, zs, rows)
        noises: list[list[Tensor]] = []  # of each chunk of the true rows, which come first

        def value_of(z: Tensor, row: Tensor, *passed: Tensor) -> Tensor:
            path, known, own = [*passed[:t], z], list(passed[t : 2 * t + 1]), passed[2 * t + 1 :]
            if t + 1 < depth and torch.is_grad_enabled():
                value, noise = descend(path, known, *own)
                noises.append(noise)
                return value
            common = [torch.cat(parts).index_select(0, row) for parts in zip(*noises, strict=True)]
            return f(*_complete(path, known, common, own), *own)

        passed = (torch.arange(below.shape[0], device=below.device), *zs, *logits, below.detach(), *rows)
        out = estimate(
            chosen[t],
            below,
            value_of,
            *passed,
            generator=generator,
            evaluation=evaluation,
            max_rows=max_rows,
            frozen=frozen and t + 1 == depth,
        )
        made[t].append(out)
        if t == 0:
            return out.value, []
        z = out.z.reshape(below.shape[0], -1, below.shape[1])[:, 0]
        own = given_winner(below, z, dirichlet(below, generator))
        return out.value, [own, *(torch.cat(parts)[: below.shape[0]] for parts in zip(*noises, strict=True))]

    def _complete(
        zs: list[Tensor], logits: list[Tensor], common: list[Tensor], rows: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Draw the layers below zs, with this noise where there is any."""
        for t, noise in itertools.zip_longest(range(len(zs), depth), common):
            below = layer_logits(layers[t], t, zs, rows).detach()
            zs, logits = [*zs, _draw(chosen[t], below, noise, generator)], [*logits, below]
        return zs, logits

    learning = torch.is_grad_enabled()
    with torch.enable_grad():  # by which a true path is told from a pseudo one
        value, _ = descend([], [], *context)
    return LayersEstimate(value if learning else value.detach(), tuple(_merge(parts) for parts in made))


def _draw(estimator: Estimator, logits: Tensor, noise: Tensor | None, generator: torch.Generator | None) -> Tensor:
    """A sample as the estimator's own true path has it, relaxed where that is."""
    if estimator.needs_gradient:
        return estimator.ask(logits, estimator.noise(logits, generator)).points[0]
    return argmin_sample(logits, dirichlet(logits, generator) if noise is None else noise)


def layer_logits(layer: Layer, t: int, zs: list[Tensor], rows: tuple[Tensor, ...]) -> Tensor:
    """What layer t gives for its paths, refused if it is no [N, K, C]."""
    logits = layer(zs, *rows)
    known = (*zs, *rows)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or (known and logits.shape[0] != known[0].shape[0]):
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        expected = known[0].shape[0] if known else "N"
        raise ValueError(
            f"Layer {t} must return logits [{expected}, K, C], one row for each path, but returned {found}."
        )
    return logits


def _merge(parts: list[Estimate]) -> Estimate:
    """One layer's estimates, which its rows' chunks gave."""
    if len(parts) == 1:
        return parts[0]
    info = {
        "asked": parts[0].info["asked"],
        "distinct": torch.cat([part.info["distinct"] for part in parts]),
        "finite": torch.cat([part.info["finite"] for part in parts]),
    }
    gradients = [part.grad for part in parts if part.grad is not None]
    mean_rows = sum(part.value.shape[0] for part in parts) / len(parts)
    losses = [
        part.estimator_loss * (part.value.shape[0] / mean_rows) for part in parts if part.estimator_loss is not None
    ]
    return Estimate(
        value=torch.cat([part.value for part in parts]),
        z=torch.cat([part.z for part in parts]),
        grad=torch.cat(gradients) if gradients else None,
        info=info,
        estimator_loss=torch.stack(losses).mean() if losses else None,
    )
