"""The estimators by their definitions, one row of the batch at a time, in float64 and without
haste.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arsm.noise import fixed_point

Function = Callable[[Tensor], Tensor]
"""int64 [N, K] -> [N]."""


def pseudo_actions(logits: Tensor, log_pi: Tensor) -> Tensor:
    """z^{c<->j} for all c and j, one race per pair: [..., C] -> [..., C, C]."""
    phi, a = fixed_point(logits, log_pi)
    categories = a.shape[-1]
    rows = []
    for c in range(categories):
        for j in range(categories):
            order = list(range(categories))
            order[c], order[j] = j, c
            rows.append((a[..., order] - phi).argmin(-1))
    return torch.stack(rows, -1).unflatten(-1, (categories, categories))


def arsm_of_table(f: Tensor, log_pi: Tensor) -> Tensor:
    """g_kc = sum_j (F_cj - mean_m F_mj) (1/C - pi_kj): f [*B, C, C], ln pi [*B, K, C]
    -> [*B, K, C].
    """
    f, pi = f.double(), log_pi.double().exp()
    centred = f - f.mean(-2, keepdim=True)
    return torch.einsum("...cj,...kj->...kc", centred, 1 / f.shape[-1] - pi)


def pseudo_vectors(logits: Tensor, log_pi: Tensor) -> Tensor:
    """z^{c<->j}: logits [K, C] -> [C, C, K]."""
    return pseudo_actions(logits, log_pi).permute(1, 2, 0)


def at(f: Function, z: Tensor) -> Tensor:
    """f at z [..., K] -> [...]."""
    return f(z.flatten(0, -2)).double().view(z.shape[:-1])


def mean_over_references(f: Tensor, pi: Tensor, references: list[int]) -> Tensor:
    """mean_j [F_cj - mean_m F_mj] (1 - C pi_j): F [C, C], pi [C] -> [C]."""
    categories = len(pi)
    columns = [(f[:, j] - f[:, j].mean()) * (1 - categories * pi[j]) for j in references]
    return torch.stack(columns).mean(0)


def arsm(
    logits: Tensor, log_pi: Tensor, f: Function, references: list[int] | None = None
) -> Tensor:
    """ARSM, over all references or some: [K, C] -> [K, C]."""
    table = at(f, pseudo_vectors(logits, log_pi))
    chosen = list(range(logits.shape[-1])) if references is None else references
    return torch.stack([mean_over_references(table, pi, chosen) for pi in log_pi.double().exp()])


def pooled_arsm(
    logits: Tensor, log_pi: Tensor, f: Function, references: list[int] | None = None
) -> Tensor:
    """ARSM with, for variable k, the mean over z and all distinct pairs that gave it the same
    value.
    """
    variables, categories = logits.shape
    pseudo = pseudo_vectors(logits, log_pi)
    table = at(f, pseudo)
    chosen = list(range(categories)) if references is None else references
    pairs = {(0, 0)} | {(min(c, j), max(c, j)) for j in chosen for c in range(categories) if c != j}
    gradient = []
    for k in range(variables):
        taken: dict[int, list[float]] = {}
        for c, j in pairs:
            taken.setdefault(int(pseudo[c, j, k]), []).append(float(table[c, j]))
        mean = {value: sum(found) / len(found) for value, found in taken.items()}
        pooled = table.clone()
        for j in chosen:
            for c in range(categories):
                pooled[c, j] = mean[int(pseudo[c, j, k])]
        gradient.append(mean_over_references(pooled, log_pi[k].double().exp(), chosen))
    return torch.stack(gradient)


def ars(logits: Tensor, log_pi: Tensor, references: Tensor, f: Function) -> Tensor:
    """ARS with one reference per variable: references [K]."""
    variables, categories = logits.shape
    pseudo = pseudo_vectors(logits, log_pi)
    # [C, K]
    swapped = torch.stack([pseudo[:, int(references[k]), k] for k in range(variables)], -1)
    values = at(f, swapped)
    pi = log_pi.double().exp()[torch.arange(variables), references]
    return (1 - categories * pi).unsqueeze(-1) * (values - values.mean())


def ridge_rloo(logits: Tensor, z: Tensor, f: Tensor, eta: float) -> Tensor:
    """n ridge regressions with an intercept, each without one sample, and the gradient of their
    average prediction.

    logits [K, C], z [n, K], f [n] -> [K, C].
    """
    p = logits.double().softmax(-1)
    samples, (variables, categories) = len(z), logits.shape
    x = (torch.nn.functional.one_hot(z, categories).double() - p).flatten(1)  # [n, K C]
    covariance = torch.block_diag(*(p[k].diag() - p[k].outer(p[k]) for k in range(variables)))
    penalty = eta * covariance.trace()
    sampled, slopes = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for i in range(samples):
        others = [m for m in range(samples) if m != i]
        centre_x, centre_f = x[others].mean(0), f[others].mean()
        design = x[others] - centre_x
        gram = design.T @ design + penalty * torch.eye(x.shape[1], dtype=x.dtype)
        slope = torch.linalg.solve(gram, design.T @ (f[others] - centre_f))
        prediction = centre_f + slope @ (x[i] - centre_x)
        sampled = sampled + (f[i] - prediction) * x[i] / samples
        slopes = slopes + slope / samples
    return (sampled + covariance @ slopes).view(variables, categories)
