"""Evaluating all replicas on the same images, with random numbers that change no update."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arsm_experiments.engine import Engine, Task

if TYPE_CHECKING:
    from arsm_experiments.training.options import Training

DIAGNOSTIC_IMAGES = 200
PICTURES = 10
BLOCK_DRAWS = 100
BLOCK_ROWS = {"cpu": 1_000, "cuda": 10_000}


def probes(config: Training, engine: Engine, step: int) -> list[torch.Generator]:
    """A generator for every replica, so that measuring changes no update."""
    seeds = config.seeds * (engine.parameters.shape[0] // len(config.seeds))
    return [torch.Generator(engine.device).manual_seed(seed * 1_000_003 + step) for seed in seeds]


def run_on(engine: Engine, task: Task, weights: Tensor, images: Tensor, generators: list[torch.Generator]) -> Any:
    """A task of every replica on the same images [N, 784]."""
    return engine.run(task, weights, images.float().expand(weights.shape[0], -1, -1), generators=generators)


def multi_sample_bound(
    engine: Engine, task: Task, weights: Tensor, images: Tensor, samples: int, generators: list[torch.Generator]
) -> Tensor:
    """-E[ln 1/S sum_s w_s] over the images, in pieces of bounded memory: [R].

    `task(x, generator, draws=n)` gives ln 1/n sum_s w_s of n fresh draws: [N, 784] -> [N].
    """
    draws = min(samples, BLOCK_DRAWS)
    block, blocks = partial(task, draws=draws), samples // draws
    total = torch.zeros(weights.shape[0], device=weights.device)
    for x in images.split(max(1, BLOCK_ROWS[weights.device.type] // draws)):
        log_means = [run_on(engine, block, weights, x, generators) for _ in range(blocks)]
        log_mean = torch.stack(log_means).logsumexp(0) - math.log(blocks)
        total -= torch.stack([row.sum() for row in log_mean])
    return total / len(images)
