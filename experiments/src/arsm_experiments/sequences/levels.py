"""A pretrained model fine-tuned on a task's right answers until given accuracies are reached.

`python -m arsm_experiments.sequences.levels TASK --model FOLDER --out STARTS` writes
STARTS/TASK-LEVEL.safetensors at each level, and a line per level to STARTS/levels-TASK.jsonl. A
file that is there is not made again.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arsm.sequences import decoder
from arsm_experiments.runs import lines
from arsm_experiments.runs.provenance import provenance
from arsm_experiments.sequences.imitation import fine_tune
from arsm_experiments.sequences.pretrained import load_parts, load_pretrained, save_parts
from arsm_experiments.sequences.texts import WRITTEN, Texts, load_texts
from arsm_experiments.sequences.trainer import as_model, sampled_rewards

LEVELS = (0.1, 0.3, 0.5, 0.8)
RATE = 5e-5
BATCH = 64
EVERY = 20
"""Steps between measurements."""
MEASURED = 256
"""Questions that an accuracy is measured on."""
REPORTED = 512
"""Questions that training is reported on: the first of those held out."""
CHOSEN_ON = 256
"""Questions that a rate is chosen on: those that follow."""
NOISE_FROM = REPORTED + CHOSEN_ON
"""The first question that gradients are measured at."""


@dataclass(frozen=True)
class FineTuning:
    """How a model is fine-tuned, and how often it is measured."""

    rate: float = RATE
    batch: int = BATCH
    """Answers per step."""
    micro_batch: int = 64
    every: int = EVERY
    measured: int = MEASURED


def held_out(texts: Texts) -> int:
    """The number of questions that are never trained on: a fifth, as the tasks order them."""
    return len(texts) // 5


def level_path(folder: Path, task: str, level: float) -> Path:
    """Where the weights lie that first reached an accuracy."""
    return folder / f"{task}-{level:g}.safetensors"


def load_level(module: torch.nn.Module, path: Path) -> None:
    """Set the weights of a level."""
    from safetensors.torch import load_file

    load_parts(module, load_file(path))


def reach(
    task: str,
    model: str,
    out: Path,
    *,
    data: Path,
    levels: tuple[float, ...],
    device: str,
    precision: torch.dtype | None,
    seconds: float,
    size: FineTuning = FineTuning(),  # noqa: B008  frozen
    start: Path | None = None,
) -> list[dict[str, Any]]:
    """Fine-tune until the levels are reached or the time is over; return what was reached.

    It begins with the weights of the file `start`, or with the model's own.
    """
    path = out / f"levels-{task}.jsonl"
    missing = [level for level in levels if not level_path(out, task, level).exists()]
    if not missing:
        return lines.read(path)
    begun = time.monotonic()
    pretrained = load_pretrained(model, device)
    if start is not None:
        load_level(pretrained.module, start)
    texts = load_texts(pretrained.tokenizer, task, data)
    trained, others = texts.split(held_out(texts))
    tested = Texts(
        others.records[-size.measured :], texts.tokenizer, texts.function, texts.max_tokens
    )
    module = pretrained.module
    sampler = decoder(as_model(module), size.measured, dtype=precision)
    words = provenance(device)
    steps = fine_tune(
        module,
        trained,
        rate=size.rate,
        batch=size.batch,
        micro_batch=size.micro_batch,
        precision=precision,
    )
    for step, loss in enumerate(steps, 1):
        over = time.monotonic() - begun > seconds
        if step % size.every and not over:
            continue
        reached = float(sampled_rewards(sampler, tested, torch.device(device)).mean())
        spent = time.monotonic() - begun
        print(
            f"{task}: step {step}, loss {loss:.3f}, accuracy {reached:.3f}, {spent:.0f} s",
            flush=True,
        )
        while missing and (reached >= missing[0] or (over and len(missing) == len(levels))):
            level = missing.pop(0)
            save_parts(module, level_path(out, task, level))
            record = {"task": task, "level": level, "accuracy": reached, "steps": step}
            record |= {"start": "" if start is None else start.stem}
            record |= {"rate": size.rate, "batch": size.batch, "seconds": spent}
            lines.add(path, record | words)
            if over:
                break
        if over or not missing:
            break
    return lines.read(path)


def command_line() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=list(WRITTEN))
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("runs/sequences/data"))
    parser.add_argument("--levels", type=float, nargs="+", default=list(LEVELS))
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--every", type=int, default=EVERY)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--measured", type=int, default=MEASURED)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--start", type=Path, help="Weights to begin with, of another task's level")
    parser.add_argument("--seconds", type=float, default=120, help="Stop after so long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    words = command_line()
    torch.backends.cuda.matmul.allow_tf32 = True
    reach(
        words.task,
        words.model,
        words.out,
        data=words.data,
        levels=tuple(sorted(words.levels)),
        device=words.device,
        precision=torch.bfloat16 if words.precision == "bfloat16" else None,
        seconds=words.seconds,
        size=FineTuning(words.rate, words.batch, words.micro_batch, words.every, words.measured),
        start=words.start,
    )


if __name__ == "__main__":
    main()
