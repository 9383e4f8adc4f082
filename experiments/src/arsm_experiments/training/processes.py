"""Several processes, started by torchrun, that split each batch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from arsm_experiments.runs.writer import Run


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[torch.device]:
    """Join the other processes if torchrun started several. Yields this process's device."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def share_checkpoint(run: Run | None) -> tuple[int, dict[str, Any] | None]:
    """Send the first process's checkpoint to all processes."""
    found: list[Any] = [run.step, run.state] if run is not None else [0, None]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0], found[1]
