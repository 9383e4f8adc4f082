"""Variance x tokens of every way to give credit, on a pretrained model at several accuracies.

`python -m arsm_experiments.sequences.noise --model FOLDER --starts STARTS --out NOISE` starts one
process per file of STARTS, which `levels` wrote. Each measures all methods in rounds of a few
repeats until its time is over, and adds a line per method and round to
NOISE/noise-TASK-LEVEL.jsonl. All methods of a process meet the same questions. A method whose name
ends with ", fresh" meets other questions in every estimate, as in training: its variance counts
which questions were drawn.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import arsm
from arsm import sequences
from arsm.sequences import Batch, Branch, Group, Strategy, by_likelihood, decoder, live_tokens
from arsm.sequences.comparison import measure as measure_gradients
from arsm.sequences.decode import Decoding
from arsm.sequences.measured import Measured
from arsm_experiments.runs import lines
from arsm_experiments.runs.provenance import provenance
from arsm_experiments.sequences.candidates import (
    BranchOrValue,
    OwnTokens,
    SharedPrefixes,
    TokenCritic,
)
from arsm_experiments.sequences.levels import (
    NOISE_FROM,
    REPORTED,
    held_out,
    load_level,
)
from arsm_experiments.sequences.methods import draw_rows
from arsm_experiments.sequences.pretrained import load_pretrained
from arsm_experiments.sequences.rivals import Unsure, ValueHead, ValueModel, VinePPO, by_success
from arsm_experiments.sequences.texts import Texts, load_texts
from arsm_experiments.sequences.trainer import as_model, autocast, sampled_rewards

FRESH = ", fresh"
"""Ends the name of a method that meets other questions in every estimate."""
REPEATS = 5
PROMPTS = 24
CRITIC_STEPS = 24
CRITIC_ROWS = 128
Kind = TypeVar("Kind", bound=ValueModel)


def by_doubt(share: float = 1.0) -> Callable[[Batch], Tensor]:
    """A coin that follows the model's doubt: share x min(1, 4 (1 - p of the likeliest token))."""

    def coin(batch: Batch) -> Tensor:
        return share * (4 * (1 - batch.largest.exp())).clamp(0, 1)

    return coin


class Learned:
    """What some methods learn before they are used; learned when the first of them asks."""

    def __init__(self, module: torch.nn.Module, trained: Texts, how: Measuring) -> None:
        self.module, self.trained, self.how = module, trained, how

    @cached_property
    def value(self) -> ValueModel:
        """v(s_t)."""
        return self._fitted(ValueModel)

    @cached_property
    def tokens(self) -> TokenCritic:
        """h_t(c)."""
        return self._fitted(TokenCritic)

    def _fitted(self, kind: type[Kind]) -> Kind:
        how = self.how
        critic = kind(self.module, micro_batch=how.micro_batch, precision=how.precision)
        _fit(critic, as_model(self.module), self.trained, how)
        return critic


METHODS: dict[str, Callable[[Learned], Strategy]] = {
    "group 8": lambda _: Group(8),
    "branch 8": lambda _: Branch(arsm.RLOO(8)),
    "branch 32": lambda _: Branch(arsm.RLOO(32)),
    "group 2": lambda _: Group(2),
    "group 4": lambda _: Group(4),
    "group 16": lambda _: Group(16),
    "token baseline 8": lambda _: Group(arsm.OTB(8)),
    "branch 16": lambda _: Branch(arsm.RLOO(16)),
    "branch 4": lambda _: Branch(arsm.RLOO(4)),
    "branch 64": lambda _: Branch(arsm.RLOO(64)),
    "unsure 4 to 32": lambda _: Unsure(4, 32),
    "unsure 8 to 64": lambda _: Unsure(8, 64),
    "coin 0.25, group 4, branch 8": lambda _: Branch(arsm.RLOO(8), group=4, coin=0.25),
    "coin by doubt, group 4, branch 8": lambda _: Branch(arsm.RLOO(8), group=4, coin=by_doubt()),
    "coin by doubt, group 4, branch 32": lambda _: Branch(arsm.RLOO(32), group=4, coin=by_doubt()),
    "value head": lambda learned: ValueHead(learned.value),
    "value head, lambda 0.95": lambda learned: ValueHead(learned.value, 0.95),
    "vineppo 2": lambda _: VinePPO(2),
    "branch 2": lambda _: Branch(arsm.RLOO(2)),
    "branch 32, chance": lambda _: Branch(arsm.RLOO(32), chance=by_likelihood(0.05)),
    "branch 8, keep 0.3": lambda _: Branch(arsm.RLOO(8), keep=0.3),
    "branch 32, chance by value": lambda learned: Branch(
        arsm.RLOO(32), chance=by_success(learned.value)
    ),
    "grpo 8": lambda _: Group(arsm.GRPO(8)),
    "dr. grpo 8": lambda _: Group(arsm.DrGRPO(8)),
    "own 0.25, branch 8": lambda _: OwnTokens(8, 0.25),
    "own 0.5, branch 8": lambda _: OwnTokens(8, 0.5),
    "own 0.5, value, branch 8": lambda learned: OwnTokens(8, 0.5, learned.value),
    "own 0.5, value, branch 4": lambda learned: OwnTokens(4, 0.5, learned.value),
    "shared, group 2, branch 4": lambda _: SharedPrefixes(4, 2),
    "group 2, branch 4": lambda _: Branch(arsm.RLOO(4), group=2),
    "critic, branch 8": lambda learned: Branch(arsm.RLOO(8), critic=learned.tokens),
    "critic, branch 4": lambda learned: Branch(arsm.RLOO(4), critic=learned.tokens),
    "value or branch 8": lambda learned: BranchOrValue(learned.value, by_doubt()),
}
"""In the order in which they are measured."""
LONG_METHODS: dict[str, Callable[[Learned], Strategy]] = {
    "group 8": METHODS["group 8"],
    "group 4": METHODS["group 4"],
    "token baseline 8": METHODS["token baseline 8"],
    "coin 0.02, group 4, branch 8": lambda _: Branch(arsm.RLOO(8), group=4, coin=0.02),
    "coin by doubt 0.1, group 4, branch 8": lambda _: Branch(
        arsm.RLOO(8), group=4, coin=by_doubt(0.1)
    ),
    "coin by doubt 0.3, group 4, branch 8": lambda _: Branch(
        arsm.RLOO(8), group=4, coin=by_doubt(0.3)
    ),
    "branch 2, budget 40 per prompt": lambda _: Branch(arsm.RLOO(2), budget=40 * PROMPTS),
    "value head": METHODS["value head"],
    "value or branch 8, by doubt 0.1": lambda learned: BranchOrValue(learned.value, by_doubt(0.1)),
}
"""For answers of hundreds of tokens."""


@dataclass(frozen=True)
class Measuring:
    """How noise is measured.

    Attributes:
        device: where.
        precision: of sampling and of gradients, by autocast; None for that of the weights.
        seconds: no method is begun later.
        names: the methods to measure; None for all.
        prompts: prompts of a gradient.
        repeats: estimates per method and round.
        rounds: of all methods, one after the other.
        fixed_from: the first round in which methods at fixed questions are measured.
        micro_batch: sequences per pass with a graph.
        critic_steps: steps of the value head before it is used.
        critic_rows: sequences per such step.
    """

    device: str
    precision: torch.dtype | None
    seconds: float
    names: list[str] | None = None
    prompts: int = PROMPTS
    repeats: int = REPEATS
    rounds: int = 4
    fixed_from: int = 0
    micro_batch: int = 32
    critic_steps: int = CRITIC_STEPS
    critic_rows: int = CRITIC_ROWS


MEASURED = (
    "unbiased",
    "variance",
    "variance_error",
    "tokens",
    "tokens_error",
    "seconds",
    "memory",
    "signal",
)
"""What is recorded of a comparison's row."""


def measure(
    task: str, level: str, module: torch.nn.Module, texts: Texts, out: Path, how: Measuring
) -> None:
    """Measure until the time is over; rounds that are in the file are not measured again."""
    begun = time.monotonic()
    path = out / f"noise-{task}-{level}.jsonl"
    done = {(record["method"], record["round"]) for record in lines.read(path)}
    methods = LONG_METHODS if task == "long" else METHODS
    model = as_model(module)
    trained, others = texts.split(held_out(texts))
    accuracy = _accuracy(model, others.first(REPORTED), how.device, how.precision)
    learned = Learned(module, trained, how)
    words = {"task": task, "level": level, "accuracy": accuracy, **provenance(how.device)}
    for number, name in itertools.product(range(how.rounds), how.names or methods):
        too_early = number < how.fixed_from and not name.endswith(FRESH)
        if too_early or (name, number) in done:
            continue
        if time.monotonic() - begun > how.seconds:
            print(f"{task} {level}: out of time before {name}, round {number}", flush=True)
            return
        row = None
        try:
            strategy = methods[name.removesuffix(FRESH)](learned)
            if name.endswith(FRESH):
                row = _compared_afresh(name, strategy, model, trained, number, how)
            else:
                row = _compared(name, strategy, model, others, number, how)
        except Exception:
            # one method that fails must not cost the others their measurement
            print(f"{task} {level} {name}: {traceback.format_exc()}", flush=True)
        # only here the exception is gone, which holds the tensors of all frames
        if row is None:
            _free(how.device)
            continue
        found = {key: getattr(row, key) for key in MEASURED}
        record = {"method": name, "round": number, "repeats": how.repeats, **words, **found}
        lines.add(path, record)
        print(f"{task} {level} ({accuracy:.2f}) {name}: {row.cost:.4g}", flush=True)


def _free(device: str) -> None:
    """Give back the memory of a method that failed. A device that is lost ends the process here."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _compared(
    name: str, strategy: Strategy, model: Any, others: Texts, number: int, how: Measuring
) -> Measured:
    """One method's row of a round, at the prompts that all methods share."""
    rows = torch.arange(NOISE_FROM, NOISE_FROM + how.prompts) % len(others)
    asked, mask, reward = others.ask(rows, how.device)
    with autocast(torch.device(how.device), how.precision):
        (row,) = sequences.compare(
            {name: strategy},
            model,
            asked,
            reward,
            max_tokens=others.max_tokens,
            eos=others.eos,
            mask=mask,
            repeats=how.repeats,
            micro_batch=how.micro_batch,
            sampling_dtype=how.precision,
            generator=torch.Generator(how.device).manual_seed(1000 + number),
        ).rows
    return row


def _compared_afresh(
    name: str, strategy: Strategy, model: Any, trained: Texts, number: int, how: Measuring
) -> Measured:
    """The same with other questions in every estimate, drawn as training draws them."""
    generator = torch.Generator(how.device).manual_seed(2000 + number)

    def once() -> sequences.SequenceEstimate:
        chosen = draw_rows(trained, how.prompts, generator)
        asked, mask, reward = trained.ask(chosen, how.device)
        return sequences.estimate(
            strategy,
            model,
            asked,
            reward,
            max_tokens=trained.max_tokens,
            eos=trained.eos,
            mask=mask,
            micro_batch=how.micro_batch,
            sampling_dtype=how.precision,
            generator=generator,
        )

    device = torch.device(how.device)
    with autocast(device, how.precision), torch.enable_grad():
        return measure_gradients(name, strategy, model, once, how.repeats, device)


def _accuracy(model: Any, tested: Texts, device: str, precision: torch.dtype | None) -> float:
    sampler = decoder(model, min(1024, len(tested)), dtype=precision)
    return float(sampled_rewards(sampler, tested, torch.device(device)).mean())


def _fit(critic: ValueModel, model: Any, trained: Texts, how: Measuring) -> None:
    """Regress the reward on samples of the policy as it is."""
    generator = torch.Generator(how.device).manual_seed(7)
    sampler = decoder(model, how.critic_rows, dtype=how.precision)
    decoding = Decoding(trained.max_tokens, trained.eos)
    for _ in range(how.critic_steps):
        chosen = draw_rows(trained, how.critic_rows, generator)
        prompts, mask, reward = trained.ask(chosen, how.device)
        row = torch.arange(how.critic_rows, device=how.device)
        tokens = sampler.sample(prompts, mask, row, decoding, 1, generator).tokens[..., 0]
        live = live_tokens(tokens, trained.eos)
        critic.fit(prompts, tokens, live, reward(prompts, tokens), mask)


def command_line() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--starts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("runs/sequences/data"))
    parser.add_argument("--only", type=Path, help="One file of weights, in this process")
    parser.add_argument("--methods", nargs="+", metavar="METHOD")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--fixed-from", type=int, default=0, help="The first round at fixed questions"
    )
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--critic-steps", type=int, default=CRITIC_STEPS)
    parser.add_argument("--critic-rows", type=int, default=CRITIC_ROWS)
    parser.add_argument("--seconds", type=float, default=200, help="No method is begun later")
    parser.add_argument(
        "--memory",
        type=float,
        default=1.0,
        help="Share of the GPU's memory to hold at most",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    words = command_line()
    if words.only is None:
        command = [sys.executable, "-m", "arsm_experiments.sequences.noise", *sys.argv[1:]]
        files = sorted(words.starts.glob("*.safetensors"))
        sys.exit(max([p.wait() for p in [_started(command, file) for file in files]], default=0))
    torch.backends.cuda.matmul.allow_tf32 = True
    if torch.device(words.device).type == "cuda":
        torch.cuda.set_per_process_memory_fraction(words.memory)
    task, _, level = words.only.stem.rpartition("-")
    pretrained = load_pretrained(words.model, words.device)
    load_level(pretrained.module, words.only)
    measure(
        task,
        level,
        pretrained.module,
        load_texts(pretrained.tokenizer, task, words.data),
        words.out,
        Measuring(
            device=words.device,
            precision=torch.bfloat16 if words.precision == "bfloat16" else None,
            seconds=words.seconds,
            names=words.methods,
            prompts=words.prompts,
            repeats=words.repeats,
            rounds=words.rounds,
            fixed_from=words.fixed_from,
            micro_batch=words.micro_batch,
            critic_steps=words.critic_steps,
            critic_rows=words.critic_rows,
        ),
    )


def _started(command: list[str], file: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*command, "--only", str(file)])


if __name__ == "__main__":
    main()
