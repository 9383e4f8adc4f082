"""Training looked at from outside: a model's loss, run folders made up for the report's tests and
real ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arsm_experiments.model import Model
from arsm_experiments.report.sections import Result, Section, pivot
from arsm_experiments.runs.reader import Record, load_checkpoint, read_run
from arsm_experiments.runs.writer import open_run
from arsm_experiments.training.options import Training

TEST_GAP = 0.25


def total_loss(
    model: Model,
    x: Tensor,
    settings: Mapping[str, Tensor],
    generator: torch.Generator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A task: what has the gradient of the sum of the model's losses, and what they log."""
    code = model.encode(x, settings, generator)
    parts = [task(model, x, code, settings, generator) for task in model.losses]
    losses = [(part[0] * part[2]).sum() if len(part) > 2 else part[0] for part in parts]
    return torch.stack(losses).sum(), model.metrics(parts[0][1])


def write_run(
    root: Path,
    options: Training,
    validation: Sequence[Sequence[float]],
    epochs: Sequence[int] | None = None,
    *,
    train_gap: float,
    evaluations: float,
    at_end: Mapping[str, float],
) -> Record:
    """A run folder of one rate with these validation losses, one list per seed.

    Train and test lie at a distance from validation, and so do the metrics `at_end` of a finished
    run from its best.
    """
    (rate,), (dropout,) = options.rates, options.dropouts
    folder_name, config = options.folder_name(rate, dropout), options.config(rate, dropout)
    group, label = options.name, options.label(config)
    with open_run(root, options.experiment, folder_name, config, group=group, label=label) as run:
        for place, epoch in enumerate(epochs or (10, options.epochs // 2, options.epochs)):
            for seed, losses in zip(options.seeds, validation, strict=True):
                value = losses[place]
                metrics = {
                    "epoch": epoch,
                    "train": value + train_gap,
                    "evaluations": evaluations - place,
                    "validation": value,
                    "test": value + TEST_GAP,
                    "entropy": 1.0,
                    "pseudo_action_share": 0.2,
                    "gradient_variance": 0.01,
                }
                if epoch == options.epochs:
                    metrics |= {name: min(losses) + gap for name, gap in at_end.items()}
                run.log(epoch * (options.images // options.batch), metrics, seed)
    return read_run(run.folder)


def rows_of(section: Section) -> dict[str, dict[str, Result]]:
    """A section's table: metrics by row."""
    metrics, rows = pivot(section.results)
    return {
        row: {metric: cell for metric, cell in zip(metrics, cells, strict=True) if cell is not None}
        for row, cells in rows
    }


def assert_whole(folder: Path) -> dict[str, Any]:
    """Three measurements ten steps apart, falling, with all metrics, best weights and pictures; the
    last line.
    """
    record = read_run(folder)
    steps, train_loss = record.series("train")
    assert steps == [10, 20, 30]
    assert all(loss[-1] < loss[0] for loss in train_loss)
    last = record.metrics[-1]
    expected = {
        "validation",
        "test",
        "entropy",
        "pseudo_action_share",
        "evaluations",
        "gradient_variance",
    }
    assert expected <= last.keys()
    state = load_checkpoint(folder / "checkpoint.pt")["state"]
    _, validation = record.series("validation")
    torch.testing.assert_close(
        state["best_validation"], torch.tensor([min(seed) for seed in validation])
    )
    assert {path.name for path in folder.glob("*.png")} == {
        "pictures-seed3.png",
        "pictures-seed4.png",
    }
    return last
