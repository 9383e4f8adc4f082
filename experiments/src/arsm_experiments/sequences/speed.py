"""Generated tokens per second with and without branches, beside transformers' own; what planning
and the gradient cost.

`python -m arsm_experiments.sequences.speed` writes lines of JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import arsm
from arsm import policy
from arsm.sequences import Decoding, Model, Prefixes, Transformers, complete, live_tokens
from arsm_experiments.runs import lines
from arsm_experiments.sequences.methods import SMALL, Size, new_policy
from arsm_experiments.sequences.tasks import EOS, TASKS, VOCABULARY

LEAST_LOGITS = 8_192_000
"""Logits of a batch whose planning is measured, so that it is planned in as many parts as a larger
one.
"""


def timed(call: Callable[[], Any], device: str, repeats: int) -> tuple[float, Any]:
    """Median seconds per call, after one call to warm up."""
    result, seconds = call(), []
    for _ in range(repeats):
        wait(device)
        begun = time.perf_counter()
        result = call()
        wait(device)
        seconds.append(time.perf_counter() - begun)
    return sorted(seconds)[repeats // 2], result


def wait(device: str) -> None:
    """Until the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def own_model(task: str, size: Size, device: str) -> Model:
    """The experiments' transformer, whose sequences have their full length, as far as can be."""
    model = new_policy(task, size, device)
    with torch.no_grad():
        model.head.bias[EOS] -= 100
    return model


def library_model(task: str, size: Size, device: str) -> Any:
    """A model of transformers of the same size, which may end a sequence only at its full
    length.
    """
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TASKS[task].prompt_tokens + TASKS[task].answer_tokens,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = transformers.GPT2LMHeadModel(config)
    return model.eval().to(device)


def decoding_speed(
    which: str, model: Model, task: str, rows: int, eos: int | None, device: str, repeats: int
) -> dict[str, Any]:
    """Plain sampling of `rows` sequences at a time against rollouts, two from every state of rows /
    4 sequences.

    Both get batches of at most `rows` rows.
    """
    width = TASKS[task].answer_tokens
    generator = torch.Generator(device).manual_seed(0)
    prompts = some_prompts(task, rows, device)
    row = torch.arange(rows, device=device)
    how = Decoding(width, eos, 1.0, rows)
    plain, done = timed(
        lambda: complete(model, prompts, None, Prefixes.bare(row, width), how, generator),
        device,
        repeats,
    )
    few = max(2, rows // 4)
    state = torch.arange(few * width, device=device).repeat_interleave(2)
    branch, step = state // width, state % width
    prefixes = Prefixes(branch, step, torch.full_like(step, -1), done.tokens[:few])
    branched, rolled = timed(
        lambda: complete(model, prompts[:few], None, prefixes, how, generator), device, repeats
    )
    after = live_tokens(rolled.tokens, eos) & (
        torch.arange(width, device=device) >= step.unsqueeze(-1)
    )
    return {
        "measured": "decoding",
        "model": which,
        "task": task,
        "rows": rows,
        "plain tokens per second": int(live_tokens(done.tokens, eos).sum()) / plain,
        "branched tokens per second": int(after.sum()) / branched,
        "plain seconds": plain,
        "branched seconds": branched,
    }


def generate_speed(model: Any, task: str, rows: int, device: str, repeats: int) -> float:
    """Tokens per second of transformers' own `generate`."""
    prompts, width = some_prompts(task, rows, device), TASKS[task].answer_tokens
    seconds, out = timed(
        lambda: model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=width,
            min_new_tokens=width,
            pad_token_id=0,
        ),
        device,
        repeats,
    )
    assert out.shape == (rows, prompts.shape[1] + width)
    return rows * width / seconds


def some_prompts(task: str, rows: int, device: str) -> Tensor:
    """Random tokens [rows, P]."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randint(
        2, VOCABULARY, (rows, TASKS[task].prompt_tokens), generator=generator, device=device
    )


def planning_cost(
    estimator: arsm.Estimator, vocabulary: int, states: int, device: str, repeats: int
) -> dict[str, Any]:
    """Seconds per token and peak memory, relative to the logits, of `policy.plan` and
    `policy.gradient`.
    """
    generator = torch.Generator(device).manual_seed(0)
    logits = 3 * torch.randn(8, states // 8, 1, vocabulary, generator=generator, device=device)
    actions = (
        logits.softmax(-1).flatten(0, 2).multinomial(1, generator=generator).view(logits.shape[:3])
    )
    size = logits.numel() * logits.element_size()

    def peak(call: Callable[[], Any]) -> tuple[float, Any, float]:
        seconds, result = timed(call, device, repeats)
        if device != "cuda":
            return seconds, result, float("nan")
        del result
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        return seconds, result, (torch.cuda.max_memory_allocated() - before) / size

    plan_seconds, plan, plan_memory = peak(
        lambda: policy.plan(estimator, logits, actions, generator=generator)
    )
    returns = torch.rand(logits.shape[:2], generator=generator, device=device)
    tried = torch.rand(plan.step.shape, generator=generator, device=device)
    seconds, _, memory = peak(lambda: policy.gradient(estimator, logits, plan, returns, tried))
    return {
        "measured": "planning",
        "estimator": str(estimator),
        "vocabulary": vocabulary,
        "states": states,
        "plan microseconds per token": plan_seconds / states * 1e6,
        "gradient microseconds per token": seconds / states * 1e6,
        "plan memory / logits": plan_memory,
        "gradient memory / logits": memory,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/sequences"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--small", action="store_true", help="Small sizes, to try the command on a CPU"
    )
    options = parser.parse_args()
    path = options.out / "speed.jsonl"
    torch.manual_seed(0)
    task, size, device = "number_sorting", SMALL if options.small else Size(), options.device
    own, library = own_model(task, size, device), library_model(task, size, device)
    for rows in (64,) if options.small else (1024, 4096, 16384):
        records = [decoding_speed("own", own, task, rows, EOS, device, 3)]
        records += [
            decoding_speed("transformers", Transformers(library), task, rows, None, device, 3)
        ]
        records[-1]["generate tokens per second"] = generate_speed(library, task, rows, device, 3)
        for record in records:
            lines.add(path, record)
            print(record, flush=True)
    for vocabulary in (100,) if options.small else (1000, 32_000, 150_000):
        for estimator in (arsm.RLOO(4), arsm.RLOO(16), arsm.ARSM(references=1)):
            states = 64 if options.small else max(512, LEAST_LOGITS // vocabulary)
            record = planning_cost(estimator, vocabulary, states, options.device, 3)
            lines.add(path, record)
            print(record, flush=True)


if __name__ == "__main__":
    main()
