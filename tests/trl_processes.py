"""One step of a `Given` trainer under torchrun: `torchrun -m tests.trl_processes FOLDER` saves the
parameters.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.trl_problems import given, parameters


def one_step(processes: int) -> dict[str, Any]:
    """16 rows in all, 4 per micro-batch; two processes have one group of 8 each."""
    made = given(
        2,
        generations=8,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4 // processes,
        loss_type="dapo",
        learning_rate=1.0,
    )
    assert made.accelerator.num_processes == processes
    before = parameters(made).clone()
    made.train()
    logs = made.state.log_history[0]
    return {
        "moved": parameters(made) - before,
        "rollouts": logs["credit/rollouts"],
        "num_tokens": logs["num_tokens"],
    }


def main(folder: Path) -> None:
    """Save what one step has done, a file per process."""
    torch.set_num_threads(1)
    processes = int(os.environ["WORLD_SIZE"])
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(one_step(processes), folder / f"{os.environ['RANK']}.pt")
    if processes > 1:
        torch.distributed.barrier()
    # leaving Python may wait for threads of a process that has already left
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
