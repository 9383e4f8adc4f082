r"""`estimate_bound`: a multi-sample bound through T stochastic layers, by VIMCO over whole paths.

    L = E[L^],    L^ = ln 1/n sum_i exp f(z^i),
    z^i = (z_1^i, ..., z_T^i) drawn from the top to the bottom
    g = sum_i (L^ - L^_{-i}) d ln q(z^i),
          ln q(z^i) = sum_t ln q(z_t^i | z_1^i, ..., z_{t-1}^i)

All layers of a path share one signal. `estimate_layers` cannot do this layer by layer,
because L^ is not linear in the values of its paths. Reference: Mnih and Rezende,
Variational inference for Monte Carlo objectives, ICML 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from arsm.capabilities import require
from arsm.categorical import log_prob
from arsm.checks import (
    check_function,
    check_logits,
    check_same_rows,
    describe,
    legal_rows,
)
from arsm.draws import draw_one
from arsm.layers import Layer, Path, check_layers, run_layer
from arsm.noise import working_dtype
from arsm.options import suggests
from arsm.question import attach_paths, pose
from arsm.types import Estimate, Estimator


@suggests("arsm.estimate_bound")
def estimate_bound(
    estimator: Estimator,
    layers: Sequence[Layer],
    f: Callable[..., Tensor],
    *context: Tensor,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Estimate L and its gradient in every layer's logits; the shapes are static.

    Args:
        estimator: one whose target is a bound, such as `VIMCO(10)`: ten paths per row.
        layers: as for `arsm.estimate_layers`, without a state.
        f: `f(zs, logits, *context) -> [N]`, the logarithm of a path's weight, row by
            row. The logits have their graph: where f holds ln q, as ln p(x, z) - ln
            q(z) does, the rest of L's gradient comes through f.
        context: tensors [N, ...]; layers and f receive the rows that belong to each
            path.
        generator: source of the noise.

    Returns:
        L^ [N] as the value, whose backward is the estimate, and the paths as z [N, n,
        sum_t K_t]. Each path has its own logits, so there is no `grad`.
    """
    require(estimator, "estimate_bound", "bound", "paths", instead="use one such as arsm.VIMCO(10)")
    check_layers(layers)
    call = "arsm.estimate_bound(estimator, layers, f, *context)"
    check_function(f, len(context), call, own="zs, logits")
    check_same_rows(context)

    # the first layer has one row of logits for n paths, as the estimator draws them
    phi, _ = run_layer(layers[0], Path(context))
    check_logits(phi, read=False)
    question = pose(estimator, phi, generator=generator)
    n = estimator.paths
    zs = [question.queries.points.flatten(0, 1)]
    logits = [phi.repeat(n, 1, 1)]

    # below it every path has logits of its own
    rows = tuple(x.repeat(n, *(1,) * (x.ndim - 1)) for x in context)
    for layer in layers[1:]:
        phi, _ = run_layer(layer, Path(rows, tuple(zs), tuple(logits)))
        check_logits(phi, read=False)
        logits.append(phi)
        zs.append(draw_one(phi, generator))
    log_q = _log_q_of_paths(logits, zs)

    # ln q's backward and the result need the samples as they are: f gets copies
    values = f([z.clone() for z in zs], logits, *rows)
    _check_values(values, log_q.shape)
    values = values.to(working_dtype(values.dtype)).unflatten(0, (n, -1))

    legal = torch.stack([legal_rows(phi.detach()).all(-1) for phi in logits]).all(0)
    info = {
        "asked": torch.full((), n, device=values.device),
        "distinct": torch.full(values.shape[1:], n, device=values.device),
        "finite": (values.detach().isfinite() & legal.unflatten(0, (n, -1))).all(0),
    }
    z = torch.cat(zs, -1).unflatten(0, (n, -1)).movedim(0, 1)
    value = attach_paths(question.value(values), estimator, values, log_q.unflatten(0, (n, -1)))
    return Estimate(value, z, None, info)


def _check_values(values: object, shape: torch.Size) -> None:
    """Require one floating value per path."""
    if isinstance(values, Tensor) and values.is_floating_point() and values.shape == shape:
        return
    raise ValueError(
        f"f must return one floating value per path, {list(shape)}, but returned "
        f"{describe(values)}."
    )


def _log_q_of_paths(logits: list[Tensor], zs: list[Tensor]) -> Tensor:
    """sum_t ln q(z_t): logits [N, K_t, C_t] and samples [N, K_t] of each layer -> [N]."""
    of_layers = []
    for phi, z in zip(logits, zs, strict=True):
        of_layers.append(log_prob(phi.log_softmax(-1), z).sum(-1))
    return torch.stack(of_layers).sum(0)
