"""Training runs that are killed, resumed, and compared with runs that never were."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from arsm_experiments.runs.reader import load_checkpoint, read_run
from arsm_experiments.training.loop import train
from arsm_experiments.training.options import Training

PROGRAM = """
import os, pickle, signal, sys, torch
from arsm_experiments.training.loop import train

replace = os.replace

def kill(source, target):
    checkpoint = os.path.basename(target) == "checkpoint.pt"
    if not checkpoint or sys.argv[1] == "after":
        replace(source, target)
    if checkpoint:
        os.kill(os.getpid(), signal.SIGKILL)

os.replace = kill
torch.set_num_threads(1)
train(pickle.load(sys.stdin.buffer))
"""
"""A run that is killed after its first checkpoint, or before that is put in its place."""


def results(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Metrics without their seconds, and the last state."""
    metrics = [
        {k: v for k, v in line.items() if k != "seconds"} for line in read_run(folder).metrics
    ]
    return metrics, load_checkpoint(folder / "checkpoint.pt")["state"]


def assert_same(found: list[Path], expected: list[Path]) -> None:
    """The same metrics and the same last state, bit for bit."""
    for a, b in zip(found, expected, strict=True):
        (metrics, state), (other_metrics, other_state) = results(a), results(b)
        assert metrics == other_metrics
        for name, value in state.items():
            torch.testing.assert_close(value, other_state[name], rtol=0, atol=0)


def killed(config: Training, when: str) -> bool:
    """Whether the run, in a process of its own, was killed."""
    command, environment = (
        [sys.executable, "-c", PROGRAM, when],
        {**os.environ, "OMP_NUM_THREADS": "1"},
    )
    done = subprocess.run(command, input=pickle.dumps(config), env=environment, check=False)
    return done.returncode == -signal.SIGKILL


def assert_goes_on_when_killed(config: Training, folder: Path) -> None:
    """Killed once after a checkpoint of its first run folder, once before a later one is in its
    place.
    """
    whole = train(replace(config, root=folder / "whole"))
    again = replace(config, root=folder / "killed", resume=True)
    folders = list(again.runs())
    assert killed(again, "after")
    assert (folders[0] / "checkpoint.pt").exists()
    assert killed(again, "before")
    assert any((f / ".checkpoint.pt.tmp").exists() for f in folders)
    train(again)
    assert_same(folders, whole)
