r"""`estimate_layers`: T stochastic layers, each depending on those above.

    E[f(z_1, ..., z_T)],    z_t ~ Cat(softmax(phi_t)),    phi_t a function of z_1, ..., z_{t-1}

For layer t this is `estimate` with f_t(z_t) = f(z_t and a draw of the layers below it)
instead of f, given the true z_{1:t-1}: f_t is random, but has the right expectation. At
the true sample, f_t's draw is the true path itself, which the estimators of the layers
below make. One value therefore carries the gradients of all layers, and f at the true
path is evaluated once.

All paths of a row run the same races: below a pseudo vector the samples are argmin(ln
pi - phi) with the noise of the (first) true path, so they differ only where the pseudo
vector makes a difference, not by chance. Given that noise, f_t is a fixed function,
hence the estimate is unbiased. An estimator need not say which noise led to its true
sample: `given_winner` draws it given the sample. Only a layer whose own estimator
relaxes z draws afresh.

Reference: Yin, Yue and Zhou, ARSM, ICML 2019, algorithm 2. There the layers below are
drawn afresh for every pair (c, j), which costs more and has more variance: `afresh`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from arsm.brief import of_parts
from arsm.capabilities import check_estimator, require
from arsm.checks import check_function, check_logits, check_same_rows, describe
from arsm.driver import check_evaluation, estimate_rows
from arsm.noise import argmin_sample, dirichlet, given_winner
from arsm.options import suggests
from arsm.question import Evaluation, pose
from arsm.types import Estimate, Estimator, NoTensor

Layer = Callable[..., Any]
"""`layer(zs, *context) -> logits [N, K_t, C_t]`, zs being the samples of the layers
above, [N, K] each; with a state, `layer(state, zs, *context) -> (logits, state)`."""


@dataclass(frozen=True, eq=False)
class LayersEstimate(NoTensor):
    """The result of `arsm.estimate_layers`.

    Attributes:
        value: [N]: f at the true path. Its backward gives every layer's logits their
            estimate, and the parameters of the layers and of f, and the context, their
            gradient.
        layers: Each layer's own estimate, the top layer's first; `layers[t].z` is the
            true path and `layers[t].logits` what it was drawn from. Below an estimator
            with several live queries a layer has one row for each of them that was
            evaluated.
    """

    value: Tensor
    layers: tuple[Estimate, ...]

    def __repr__(self) -> str:
        return of_parts(self, value=self.value, layers=self.layers)


@dataclass(frozen=True, eq=False)
class Path:
    """N rows of context, the samples of the layers so far, and the state below the last one."""

    context: tuple[Tensor, ...]
    zs: tuple[Tensor, ...] = ()
    """[N, K_t] of each layer so far."""
    logits: tuple[Tensor, ...] = ()
    """[N, K_t, C_t] of each layer so far, detached."""
    state: Any = None
    """Tensors [N, ...] in tuples, lists or dicts; None if the layers carry none."""

    def select(self, rows: Tensor) -> Path:
        """Select rows, possibly repeated."""

        def pick(x: Tensor) -> Tensor:
            return x.index_select(0, rows)

        return Path(
            tuple(map(pick, self.context)),
            tuple(map(pick, self.zs)),
            tuple(map(pick, self.logits)),
            None if self.state is None else tree_map(pick, self.state),
        )

    def extend(self, z: Tensor, logits: Tensor, state: Any) -> Path:
        """One layer further down."""
        return Path(self.context, (*self.zs, z), (*self.logits, logits.detach()), state)


@suggests("arsm.estimate_layers")
def estimate_layers(
    estimators: Estimator | list[Estimator] | tuple[Estimator, ...],
    layers: Sequence[Layer],
    f: Callable[..., Tensor],
    *context: Tensor,
    state: Any = None,
    noise: Any = None,
    generator: torch.Generator | None = None,
    evaluation: Evaluation = "packed",
    max_rows: int | None = 1024,
    frozen: bool = False,
    afresh: bool = False,
) -> LayersEstimate:
    """Estimate E[f(z_1, ..., z_T)] and its gradient in every layer's logits.

    Args:
        estimators: one for all layers, or one for each.
        layers: from the top, `layers[t](zs, *context) -> logits [N, K_t, C_t]`, row by
            row; zs holds the samples of the layers above, int64 [N, K] each, or
            floating [N, K, C] from an estimator that `needs_gradient`.
        f: `f(zs, logits, *context) -> [N]`, row by row, with the samples and the
            detached logits of all layers.
        context: tensors [N, ...]; layers and f receive the rows that belong to each
            path.
        state: tensors [N, ...] in tuples, lists or dicts that the layers pass down,
            such as hidden activations or a cache: `layers[t](state, zs, *context) ->
            (logits, state)`. A branch starts from its rows of the state, so the layers
            above it are not computed again.
        noise: of the top layer, as for `arsm.estimate`.
        generator: source of the noise.
        evaluation: as for `arsm.estimate`.
        max_rows: as for `arsm.estimate`.
        frozen: as for `arsm.estimate`; the layers still learn.
        afresh: draw the layers below each query afresh, even below equal queries, as in
            the paper's Algorithm 2.

    An estimator with L live queries starts L paths below each of its rows: give `RLOO`
    a small `live`, and all layers together cost the sum of their evaluations. `Exact`
    enumerates everything below.
    """
    check_layers(layers)
    call = "arsm.estimate_layers(estimators, layers, f, *context)"
    check_function(f, len(context), call, own="zs, logits")
    chosen = _one_each(estimators, len(layers))
    check_evaluation(evaluation, max_rows)
    check_same_rows(context)
    _check_state("state", state, context[0].shape[0] if context else None)
    descent = _Descent(
        chosen, layers, f, generator, evaluation, max_rows, frozen, afresh, [[] for _ in layers]
    )
    value, _ = descent.below(Path(context, state=state), noise)
    return LayersEstimate(value, tuple(_merge(parts) for parts in descent.made))


def _one_each(
    estimators: Estimator | list[Estimator] | tuple[Estimator, ...], depth: int
) -> list[Estimator]:
    """One estimator per layer, each fit for it."""
    if isinstance(estimators, (list, tuple)):
        chosen = list(estimators)
    else:
        chosen = [estimators] * depth
    for estimator in chosen:
        check_estimator(estimator)
    if len(chosen) != depth:
        raise ValueError(
            f"estimators must be one for all layers or one for each, but there are {depth} layers "
            f"and {len(chosen)} estimators."
        )
    # a single layer is `estimate`, which takes all of them
    if depth == 1:
        return chosen
    for estimator in chosen:
        # L^ is not linear in the values of its paths, and a layer below takes one category of each
        # variable above
        instead = "arsm.estimate_bound takes bounds"
        require(estimator, "estimate_layers", "mean", subset=None, instead=instead)
    return chosen


@dataclass(frozen=True, eq=False)
class _Descent:
    """An estimate of all layers, from the top down: the options of `estimate_layers`."""

    estimators: list[Estimator]
    layers: Sequence[Layer]
    f: Callable[..., Tensor]
    generator: torch.Generator | None
    evaluation: Evaluation
    max_rows: int | None
    frozen: bool
    afresh: bool
    made: list[list[Estimate]]
    """The estimates of each layer, one per call of `below`."""

    def below(self, path: Path, noise: Any = None) -> tuple[Tensor, list[Tensor]]:
        """The estimate of everything below the path: [N], attached; and its true path's
        noise [N, K, C] per layer.
        """
        t = len(path.zs)
        last = t + 1 == len(self.layers)
        logits, state = run_layer(self.layers[t], path)
        check_logits(logits, read=self.evaluation == "packed")
        noises: list[list[Tensor]] = []  # per chunk of the true rows, which come first

        def value_of(z: Tensor, row: Tensor, true: bool) -> Tensor:
            own = None if state is None else tree_map(lambda x: x.index_select(0, row), state)
            branch = path.select(row).extend(z, logits.index_select(0, row), own)
            # along the true path, the layers below are estimated too
            if true and not last:
                value, noise = self.below(branch)
                noises.append(noise)
                return value
            # pseudo vectors keep the true path's noise below them, unless it is drawn afresh
            common = []
            if not self.afresh:
                common = [x.index_select(0, row) for x in _joined(noises)]
            branch = self._complete(branch, common)
            return self.f(list(branch.zs), list(branch.logits), *branch.context)

        out = estimate_rows(
            self.estimators[t],
            logits,
            value_of,
            noise=noise,
            generator=self.generator,
            evaluation=self.evaluation,
            max_rows=self.max_rows,
            frozen=self.frozen and last,
            shared=last or not self.afresh,
        )
        self.made[t].append(out)
        if t == 0 or self.afresh:  # nobody above will ask for the noise
            return out.value, []

        # the noise of this layer's race, given its winner, and of the races below it
        rows = logits.shape[0]
        z = out.z.reshape(rows, -1, logits.shape[1])[:, 0]  # the first of several samples
        own = given_winner(logits, z, dirichlet(logits, self.generator))
        return out.value, [own, *(x[:rows] for x in _joined(noises))]

    def _complete(self, path: Path, common: list[Tensor]) -> Path:
        """Draw the layers below the path, with this noise if given."""
        depths = range(len(path.zs), len(self.layers))
        for t, noise in itertools.zip_longest(depths, common):
            logits, state = run_layer(self.layers[t], path)
            logits = logits.detach()
            z = _draw(self.estimators[t], logits, noise, self.generator)
            path = path.extend(z, logits, state)
        return path


def _joined(noises: list[list[Tensor]]) -> list[Tensor]:
    """The noise of each layer, from that of each chunk of rows."""
    return [torch.cat(parts) for parts in zip(*noises, strict=True)]


def _draw(
    estimator: Estimator, logits: Tensor, noise: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """A sample like the estimator's true sample: relaxed if that is relaxed."""
    if estimator.needs_gradient:
        return pose(estimator, logits, generator=generator).queries.points[0]
    return argmin_sample(logits, dirichlet(logits, generator) if noise is None else noise)


def check_layers(layers: Sequence[Layer]) -> None:
    """Require functions, at least one."""
    if callable(layers) or isinstance(layers, Tensor) or not all(map(callable, layers)):
        raise TypeError(
            "layers must be a list of functions that return logits, such as [lambda zs, *context: "
            "logits]; for logits alone use arsm.estimate."
        )
    if len(layers) == 0:
        raise ValueError("layers must hold at least one layer.")


def _check_state(name: str, state: Any, rows: int | None) -> None:
    """Require tensors [N, ...], with this N or any common one."""
    if state is None:
        return
    for x in tree_leaves(state):
        # without context, the first tensor says how many rows there are
        if rows is None and isinstance(x, Tensor) and x.ndim > 0:
            rows = x.shape[0]
        if not isinstance(x, Tensor) or x.ndim == 0 or x.shape[0] != rows:
            expected = "N" if rows is None else rows
            raise ValueError(
                f"{name} must hold tensors [{expected}, ...], one row for each path, but holds "
                f"{describe(x)}."
            )


def run_layer(layer: Layer, path: Path) -> tuple[Tensor, Any]:
    """The next layer's logits [N, K, C] and the state below it."""
    t = len(path.zs)
    zs = [z.clone() for z in path.zs]  # a layer that writes into its own changes nobody else's
    if path.state is None:
        logits = layer(zs, *path.context)
        state = None
    else:
        made = layer(path.state, zs, *path.context)
        if not isinstance(made, tuple) or len(made) != 2:
            raise ValueError(
                f"Layer {t} must return (logits, state) where a state is given, but returned "
                f"{type(made).__name__}."
            )
        logits, state = made
    known = (*path.zs, *path.context)
    if (
        not isinstance(logits, Tensor)
        or logits.ndim != 3
        or (known and logits.shape[0] != known[0].shape[0])
    ):
        expected = known[0].shape[0] if known else "N"
        raise ValueError(
            f"Layer {t} must return logits [{expected}, K, C], one row for each path, but returned "
            f"{describe(logits)}."
        )
    _check_state("state", path.state, logits.shape[0])
    _check_state(f"The state below layer {t}", state, logits.shape[0])
    return logits, state


def _merge(parts: list[Estimate]) -> Estimate:
    """One layer's estimate from those of its chunks."""
    if len(parts) == 1:
        return parts[0]
    info = {
        "asked": parts[0].info["asked"],
        "distinct": torch.cat([part.info["distinct"] for part in parts]),
        "finite": torch.cat([part.info["finite"] for part in parts]),
    }
    gradients = [part.grad for part in parts if part.grad is not None]

    # a loss is a mean over its chunk's rows: chunks count by their size
    mean_rows = sum(part.value.shape[0] for part in parts) / len(parts)
    losses = [
        part.estimator_loss * (part.value.shape[0] / mean_rows)
        for part in parts
        if part.estimator_loss is not None
    ]

    return Estimate(
        value=torch.cat([part.value for part in parts]),
        z=torch.cat([part.z for part in parts]),
        grad=torch.cat(gradients) if gradients else None,
        info=info,
        estimator_loss=torch.stack(losses).mean() if losses else None,
        logits=torch.cat([part.logits for part in parts if part.logits is not None]),
    )
