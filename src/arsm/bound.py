r"""`estimate_bound`: a multi-sample bound through T stochastic layers, by VIMCO over whole paths.

    L = E[L^],    L^ = ln 1/n sum_i exp f(z^i),    z^i = (z_1^i, ..., z_T^i) drawn from the top to the bottom
    g = sum_i (L^ - L^_{-i}) d ln q(z^i),          ln q(z^i) = sum_t ln q(z_t^i | z_1^i, ..., z_{t-1}^i)

A path has one signal, which all its layers share. `estimate_layers` cannot do this layer by layer, because L^ is not
linear in the values of its paths. Reference: Mnih and Rezende, Variational inference for Monte Carlo objectives, ICML
2016.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from arsm.categorical import log_prob
from arsm.driver import legal_rows
from arsm.estimators.vimco import VIMCO, leave_one_out_signals, log_mean_exp
from arsm.layers import Layer, layer_logits
from arsm.noise import argmin_sample, dirichlet, working_dtype
from arsm.types import Estimate


def estimate_bound(
    vimco: VIMCO,
    layers: Sequence[Layer],
    f: Callable[..., Tensor],
    *context: Tensor,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Estimate L and its gradient in every layer's logits; the shapes are static.

    Args:
        vimco: with n paths a row.
        layers: as for `arsm.estimate_layers`.
        f: `f(zs, logits, *context) -> [N]`, the logarithm of a path's weight, row by row. The logits have their graph:
            where f holds ln q, as ln p(x, z) - ln q(z) does, the rest of L's gradient comes through f.
        context: tensors [N, ...]; layers and f receive the rows that belong to each path.
        generator: where the noise comes from.

    Returns:
        L^ [N] as the value, whose backward is the estimate, and the paths as z [N, n, sum_t K_t]. Each path has logits
        of its own, so that there is no `grad`.
    """
    if not isinstance(vimco, VIMCO):
        raise TypeError(f"estimate_bound takes a VIMCO, such as arsm.VIMCO(10), but got {vimco!r}.")
    if not layers:
        raise ValueError("estimate_bound needs at least one layer.")
    n = vimco.samples
    rows = tuple(x.repeat(n, *(1,) * (x.ndim - 1)) for x in context)
    zs: list[Tensor] = []
    logits: list[Tensor] = []
    log_q: list[Tensor] = []
    for t, layer in enumerate(layers):
        phi = layer_logits(layer, t, zs, rows if t else context)
        logits.append(phi if t else phi.repeat(n, 1, 1))
        zs.append(argmin_sample(logits[t], dirichlet(logits[t], generator)))
        log_q.append(log_prob(logits[t].log_softmax(-1), zs[t]).sum(-1))
    values = f(zs, logits, *rows)
    if values.shape != log_q[0].shape:
        raise ValueError(f"f must return one value a path, {list(log_q[0].shape)}, but returned {list(values.shape)}.")
    values = values.to(working_dtype(values.dtype)).unflatten(0, (n, -1))
    scored = (leave_one_out_signals(values.detach()) * torch.stack(log_q).sum(0).unflatten(0, (n, -1))).sum(0)
    legal = torch.stack([legal_rows(phi.detach()).all(-1) for phi in logits]).all(0).unflatten(0, (n, -1))
    info = {
        "asked": torch.full((), n, device=values.device),
        "distinct": torch.full(values.shape[1:], n, device=values.device),
        "finite": (values.detach().isfinite() & legal).all(0),
    }
    z = torch.cat(zs, -1).unflatten(0, (n, -1)).movedim(0, 1)
    return Estimate(log_mean_exp(values) + scored - scored.detach(), z, None, info)
