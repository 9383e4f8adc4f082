"""Evaluating all replicas on the same images, with separate random numbers so that updates do not
change.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arsm_experiments.replicas import Replicas, Task

if TYPE_CHECKING:
    from arsm_experiments.training.options import Training

DIAGNOSTIC_IMAGES = 200
PICTURES = 10
BLOCK_DRAWS = 100
BLOCK_ROWS = {"cpu": 1_000, "cuda": 10_000}


def probes(config: Training, replicas: Replicas, step: int) -> list[torch.Generator]:
    """A separate generator per replica: measuring must not change any update."""
    seeds = config.seeds * (replicas.parameters.shape[0] // len(config.seeds))
    return [torch.Generator(replicas.device).manual_seed(seed * 1_000_003 + step) for seed in seeds]


def run_on(
    replicas: Replicas,
    task: Task,
    weights: Tensor,
    images: Tensor,
    generators: list[torch.Generator],
) -> Any:
    """Run a task for every replica on the same images [N, 784]."""
    return replicas.run(
        task, weights, images.float().expand(weights.shape[0], -1, -1), generators=generators
    )


def multi_sample_bound(
    replicas: Replicas,
    task: Task,
    weights: Tensor,
    images: Tensor,
    samples: int,
    generators: list[torch.Generator],
) -> Tensor:
    """-E[ln 1/S sum_s w_s] over the images, in chunks of bounded memory: [R].

    `task(x, generator, draws=n)` returns ln 1/n sum_s w_s of n fresh draws: [N, 784] -> [N].
    """
    draws = min(samples, BLOCK_DRAWS)
    block, blocks = partial(task, draws=draws), samples // draws
    total = torch.zeros(weights.shape[0], device=weights.device)
    for x in images.split(max(1, BLOCK_ROWS[weights.device.type] // draws)):
        log_means = [run_on(replicas, block, weights, x, generators) for _ in range(blocks)]
        log_mean = torch.stack(log_means).logsumexp(0) - math.log(blocks)
        total -= torch.stack([row.sum() for row in log_mean])
    return total / len(images)
