"""The experiments' transformer of 1.3 million parameters: tokens per second and seconds per update.

A script of its own, which also runs with the source of earlier commits:

    PYTHONPATH=src:experiments/src python benchmarks/small_transformer.py [--small]

It prints one JSON object. The weights are random and no answer ends before its last token, so that
all commits do the same work.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

import arsm
from arsm.sequences import Branch, Group
from arsm_experiments.sequences.methods import SMALL, Size, estimate
from arsm_experiments.sequences.speed import own_model, some_prompts
from arsm_experiments.sequences.tasks import TASKS

TASK = "number_sorting"
REPEATS = 3
SHARPER = 30.0
"""Factor of the head's weights: random logits would branch in every state."""


def measured(strategy: Any, prompts: int, rows: int, device: str, small: bool) -> dict[str, float]:
    """The quickest of some updates."""
    torch.manual_seed(0)
    policy: Any = own_model(TASK, SMALL if small else Size(), device)
    with torch.no_grad():
        policy.head.weight.mul_(SHARPER)
    optimiser = torch.optim.Adam(policy.parameters(), lr=0.0)
    generator = torch.Generator(device).manual_seed(0)
    asked = some_prompts(TASK, prompts, device)
    width = TASKS[TASK].answer_tokens
    found = []
    for _ in range(1 + REPEATS):
        _wait(device)
        begun = time.perf_counter()
        out = estimate(strategy, policy, asked, _reward, width, rows, generator)
        _wait(device)
        played = time.perf_counter()
        (-out.value.mean()).backward()
        optimiser.step()
        _wait(device)
        seconds = time.perf_counter() - begun
        tokens = int(out.info["generated"])
        found.append(
            {
                "update, seconds": seconds,
                "tokens": tokens,
                "tokens per second": tokens / (played - begun),
            }
        )
    return min(found[1:], key=lambda each: each["update, seconds"] / each["tokens"])


def _reward(prompts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return (tokens % 2 == 0).double().mean(-1)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="Small sizes, for a CPU")
    small = parser.parse_args().small
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompts, rows = (8, 64) if small else (512, 8192)
    cases = {"Branch(RLOO(8))": Branch(arsm.RLOO(8)), "Group(8)": Group(8)}
    found = {
        name: measured(strategy, prompts, rows, device, small) for name, strategy in cases.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
