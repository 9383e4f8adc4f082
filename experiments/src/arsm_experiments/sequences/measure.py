"""Variance of the gradient times generated tokens, at three accuracies of a model trained by
cross-entropy.

`python -m arsm_experiments.sequences.measure TASK` first trains to the accuracies, then measures
every method at each checkpoint. Records are lines of JSON, one per method and checkpoint; those
that are there are not measured again. On a CPU it takes fewer prompts, smaller batches of
cross-entropy, and the methods of `EVERY`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from arsm import sequences
from arsm_experiments.runs import lines
from arsm_experiments.sequences.likeliest import Likeliest
from arsm_experiments.sequences.methods import (
    CPU,
    METHODS,
    SMALL,
    Critics,
    Size,
    accuracy,
    cross_entropy,
    draw_rows,
    estimate,
    load_policy,
    new_policy,
    save_policy,
    train_critics,
)
from arsm_experiments.sequences.tasks import TASKS, Data, ExactMatch, load
from arsm_experiments.sequences.transformer import Transformer

LEVELS = (0.1, 0.45, 0.8)
FRESH = ", fresh prompts"
"""Ends the names of measurements on fresh prompts."""
MEASURED_FRESH = ("branch rloo 16" + FRESH, "group 8" + FRESH)
"""What prompts add to the variance is the same for every unbiased method."""
EVERY = (
    *("group 2", "group 4", "group 8", "group 16", "grpo 8", "dr. grpo 8", "token baseline 8"),
    *("value head", "value head, lambda 0.95", "vineppo 2"),
    *(
        "branch rloo 2",
        "branch rloo 4",
        "branch rloo 8",
        "branch rloo 16",
        "branch arsm",
        "branch arsm, 4 references",
    ),
    *("branch 4 exact, 2 sampled", "branch rloo 64, chance", "likeliest"),
)
"""What a CPU measures: every estimator once."""


def checkpoint_path(folder: Path, task: str, level: float) -> Path:
    """Where the first weights that reached this accuracy lie."""
    return folder / "checkpoints" / f"{task}-{level}.pt"


def pretrain(
    task: str,
    data: Data,
    size: Size,
    folder: Path,
    device: str,
    deadline: float,
    levels: tuple[float, ...] = LEVELS,
    rate: float = 5e-4,
) -> None:
    """Cross-entropy until each of these accuracies is reached."""
    missing = [level for level in levels if not checkpoint_path(folder, task, level).exists()]
    if not missing:
        return
    torch.manual_seed(0)
    generator = torch.Generator(device).manual_seed(0)
    train, test = data.split(size.held_out)
    test = Data(test.prompts[: size.tested], test.answers[: size.tested])
    policy = new_policy(task, size, device)
    optimiser = torch.optim.AdamW(
        policy.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    warm = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / 200))
    step, begun, last = 0, time.time(), 0.0
    while missing and time.time() < deadline:
        loss = cross_entropy(policy, *train.batch(draw_rows(train, size.batch, generator), device))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        warm.step()
        step += 1
        if step % (10 if last < missing[0] - 0.08 else 2) == 0:  # accuracy rises fast once it rises
            last = accuracy(policy, task, test, torch.Generator(device).manual_seed(1))
            while missing and last >= missing[0]:
                save_policy(policy, checkpoint_path(folder, task, missing[0]))
                lines.add(
                    folder / "pretraining.jsonl",
                    {
                        "task": task,
                        "level": missing.pop(0),
                        "accuracy": last,
                        "step": step,
                        "seconds": time.time() - begun,
                    },
                )
        if step % 500 == 0:
            seconds = time.time() - begun
            print(
                f"{task}: step {step}, loss {loss.item():.3f}, accuracy {last:.3f}, {seconds:.0f} "
                f"s",
                flush=True,
            )


def one_gradient(
    strategy: sequences.Strategy | Likeliest,
    policy: Transformer,
    prompts: Tensor,
    reward: Callable[[Tensor, Tensor], Tensor],
    generator: torch.Generator,
    max_rows: int,
    width: int,
) -> tuple[Tensor, int]:
    """The mean reward's gradient in all parameters [D], and the tokens that it took."""
    out = estimate(strategy, policy, prompts, reward, width, max_rows, generator)
    grads = torch.autograd.grad(out.value.mean(), list(policy.parameters()))
    return torch.cat([grad.flatten() for grad in grads]), int(out.info["generated"])


def measure(
    name: str,
    critics: Critics,
    policy: Transformer,
    task: str,
    data: Data,
    size: Size,
    device: str,
    max_rows: int,
    truth: Tensor | None,
    seed: int,
    *,
    fresh: bool = False,
) -> tuple[dict[str, float], Tensor]:
    """Independent estimates on the same prompts, or on fresh ones: the covariance's trace, tokens,
    seconds; their mean.

    `trace_error` is the trace's standard error; `squared_norm` is |mean|^2 with the noise taken
    out; `projection` is <mean, truth>, another method's mean.
    """
    rows, strategy = torch.arange(size.prompts), METHODS[name](critics)
    generator = torch.Generator(device).manual_seed(seed)
    gradients, tokens, begun = [], 0, _now(device)
    least = max(2, size.repeats // 4)
    while len(gradients) < least or (
        len(gradients) < size.repeats and time.time() - begun < size.patience
    ):
        prompts, answers = data.batch(
            draw_rows(data, size.prompts, generator) if fresh else rows, device
        )
        reward = ExactMatch(prompts, answers)
        gradient, generated = one_gradient(
            strategy, policy, prompts, reward, generator, max_rows, TASKS[task].answer_tokens
        )
        gradients.append(gradient)
        tokens += generated
    repeats = len(gradients)
    seconds = (_now(device) - begun) / repeats
    mean = torch.stack(gradients).mean(0, dtype=torch.double)
    norm = float(mean.square().sum())
    distances = [
        float((gradient - mean).square().sum()) * repeats / (repeats - 1) for gradient in gradients
    ]
    trace = statistics.mean(distances)
    record = {
        "repeats": repeats,
        "tokens": tokens / repeats,
        "trace": trace,
        "trace_error": statistics.stdev(distances) / math.sqrt(repeats),
        "squared_norm": norm - trace / repeats,
        "seconds": seconds,
        "projection": 0.0 if truth is None else float(mean @ truth),
    }
    return record, mean


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.time()


def measure_level(
    task: str,
    level: float,
    methods: Sequence[str],
    data: Data,
    size: Size,
    folder: Path,
    device: str,
    max_rows: int,
    deadline: float,
) -> None:
    """Measure the methods that were not yet measured at a checkpoint."""
    path, weights = folder / f"variance-{task}.jsonl", checkpoint_path(folder, task, level)
    done = {record["method"] for record in lines.read(path) if record["level"] == level}
    names = [name for name in methods if name not in done]
    if not weights.exists() or not names:
        return
    train, held_out = data.split(size.held_out)
    torch.manual_seed(0)
    policy = load_policy(task, size, weights, device)
    generator = torch.Generator(device).manual_seed(2)
    reached = accuracy(policy, task, held_out, generator)
    critics = train_critics(policy, task, train, size.critic_steps, size.batch, generator)
    arguments = (critics, policy, task, held_out, size, device, max_rows)
    truth_record, truth = measure("branch rloo 8", *arguments, None, seed=99)
    for number, name in enumerate(names):
        if time.time() > deadline:
            print(
                f"{task}: out of time before {name} at {level}; run the command again.", flush=True
            )
            return
        fresh = name.endswith(FRESH)
        record, _ = measure(
            name.removesuffix(FRESH), *arguments, truth, seed=100 + number, fresh=fresh
        )
        square = truth_record["squared_norm"]
        record["agreement"] = record.pop("projection") / square if square > 0 else float("nan")
        lines.add(
            path, {"task": task, "level": level, "accuracy": reached, "method": name, **record}
        )
        print(
            f"{task} {reached:.2f} {name}: trace x tokens "
            f"{record['trace'] * record['tokens']:.0f}, agreement {record['agreement']:.2f}, "
            f"{record['seconds']:.3f} s",
            flush=True,
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--data", type=Path, default=Path("runs/sequences/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/sequences"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seconds", type=float, default=480, help="Start nothing new after so long"
    )
    parser.add_argument("--only", choices=["pretrain", "variance"])
    names = [*METHODS, *(name + FRESH for name in METHODS)]
    parser.add_argument("--methods", nargs="+", choices=names, metavar="METHOD")
    parser.add_argument("--levels", nargs="+", type=float, default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--max-rows", type=int, default=4096)
    parser.add_argument(
        "--small", action="store_true", help="A tiny model, to try the command on a CPU"
    )
    options = parser.parse_args()
    size, methods = (
        (CPU, EVERY) if options.device == "cpu" else (Size(), (*METHODS, *MEASURED_FRESH))
    )
    size, methods = SMALL if options.small else size, options.methods or methods
    deadline = time.time() + options.seconds
    data = load(options.data / f"{options.task}.pt", options.device)
    if options.small:
        for level in options.levels:
            fresh = new_policy(options.task, size, options.device)
            save_policy(fresh, checkpoint_path(options.out, options.task, level))
    elif options.only != "variance":
        pretrain(
            options.task, data, size, options.out, options.device, deadline, tuple(options.levels)
        )
    if options.only == "pretrain":
        return
    for level in (*LEVELS[1:], LEVELS[0]):  # the first is the least telling
        if level in options.levels:
            arguments = (data, size, options.out, options.device, options.max_rows, deadline)
            measure_level(options.task, level, methods, *arguments)


if __name__ == "__main__":
    main()
