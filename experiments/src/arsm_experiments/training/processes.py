"""Several processes that share each batch, as torchrun starts them."""

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
    """Join the other processes where torchrun started several; this process's own device."""
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
    """The first process's checkpoint, in all processes."""
    found: list[Any] = [run.step, run.state] if run is not None else [0, None]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0], found[1]
