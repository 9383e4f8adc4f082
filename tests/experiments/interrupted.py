"""Training runs that are killed, resumed, and compared with runs that never were."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from arsm_experiments.runs.reader import load_checkpoint, read_run
from arsm_experiments.training.loop import train
from arsm_experiments.training.options import Training

PROGRAM = """
import pickle, sys, torch
from arsm_experiments.training.loop import train
torch.set_num_threads(1)
train(pickle.load(sys.stdin.buffer))
"""


def results(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Metrics without their seconds, and the last state."""
    metrics = [{k: v for k, v in line.items() if k != "seconds"} for line in read_run(folder).metrics]
    return metrics, load_checkpoint(folder / "checkpoint.pt")["state"]


def assert_same(found: list[Path], expected: list[Path]) -> None:
    """The same metrics and the same last state, bit for bit."""
    for a, b in zip(found, expected, strict=True):
        (metrics, state), (other_metrics, other_state) = results(a), results(b)
        assert metrics == other_metrics
        for name, value in state.items():
            torch.testing.assert_close(value, other_state[name], rtol=0, atol=0)


def start(config: Training) -> subprocess.Popen[bytes]:
    """The run in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(config))
    process.stdin.close()
    return process


def kill_when(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> bool:
    """SIGKILL it once the condition holds; False if it ended first."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if condition():
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.0005)
    process.kill()
    return False


def assert_goes_on_when_killed(config: Training, folder: Path) -> None:
    """Killed once after a checkpoint of its first run folder, once while a checkpoint is being written."""
    whole = train(replace(config, root=folder / "whole"))
    again = replace(config, root=folder / "killed", resume=True)
    folders = list(again.runs())
    assert kill_when(start(again), lambda: (folders[0] / "checkpoint.pt").exists())
    assert kill_when(start(again), lambda: any((f / ".checkpoint.pt.tmp").exists() for f in folders))
    train(again)
    assert_same(folders, whole)
