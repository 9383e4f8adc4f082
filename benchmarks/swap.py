"""The pseudo actions of many variables: the pairwise table against one argmin per pair, eager and
compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arsm.distinct import share
from arsm.noise import dirichlet
from arsm.swap import pair_table, run_race
from benchmarks.measure import Table, interleaved, table

ROWS, VARIABLES, CATEGORIES = 200, 20, 10


def argmins(logits: Tensor, log_pi: Tensor) -> Tensor:
    """z, then one race for each of the C(C-1)/2 swaps: [1 + C(C-1)/2, *B, K]."""
    categories = logits.shape[-1]
    found = [(log_pi - logits).argmin(-1)]
    for c in range(categories):
        for j in range(c + 1, categories):
            order = list(range(categories))
            order[c], order[j] = j, c
            found.append((log_pi[..., order] - logits).argmin(-1))
    return torch.stack(found)


def pseudo_actions(logits: Tensor, log_pi: Tensor) -> Tensor:
    return pair_table(run_race(logits, log_pi))


def main() -> list[Table]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VARIABLES, CATEGORIES, generator=generator)
    log_pi = dirichlet(logits, generator)
    compiled = torch.compile(pseudo_actions, fullgraph=True)
    points = pseudo_actions(logits, log_pi)
    assert torch.equal(points, compiled(logits, log_pi))
    times = interleaved(
        {
            "one argmin per pair": lambda: argmins(logits, log_pi),
            "pair table": lambda: pseudo_actions(logits, log_pi),
            "pair table, compiled": lambda: compiled(logits, log_pi),
            "share": lambda: share(points),
        },
        30,
    )
    base = times["one argmin per pair"].median
    rows = [
        [name, str(timing), "" if name == "share" else f"{base / timing.median:.1f}"]
        for name, timing in times.items()
    ]
    title = f"Pseudo actions, B = {ROWS}, K = {VARIABLES}, C = {CATEGORIES}"
    made = table(title, ["way", "median (range)", "argmins / this"], rows, times)
    print(made)
    return [made]
