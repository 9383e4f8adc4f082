"""TRL's two trainers on SmolLM2-135M: `python -m benchmarks.token_credit_smollm2 MODEL`.

SmolLM2-135M-Instruct imitates written-out sums until it answers half of them. From
there `GRPOTrainer` and `arsm.trl.BranchTrainer` train it by the reward 1 for a right last number,
three seeds each, with the same `GRPOConfig` but for the answers per prompt: BranchTrainer samples
half as many and spends the rest of the tokens on branches.

Decoding waits for the host, not for the GPU, so all trainings run at once, each in a process of
its own; every one ends after the same seconds. The record has reward, tokens and seconds of every
update, and the accuracy on fresh questions before and after. Needs trl, gguf and a GPU.

`--report` draws results/trl/smollm2.png from results/trl/smollm2.json instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from arsm_experiments.runs.provenance import provenance
from arsm_experiments.sequences.pretrained import load_pretrained, unpacked
from arsm_experiments.sequences.texts import (
    CHAIN_TOKENS,
    last_number_is_right,
    load_texts,
)
from arsm_experiments.sequences.trainer import fine_tune
from benchmarks import records

HELD_OUT = 2048
"""Questions that no training sees."""

TRAINERS = ("GRPOTrainer", "BranchTrainer")
SEEDS = (0, 1, 2)
ANSWERS = {"GRPOTrainer": 8, "BranchTrainer": 4}
"""Answers per prompt; the other tokens of BranchTrainer are branches'."""
IMITATION_RATE = 5e-5
RESULTS = Path("results/trl")
SMOOTH = 5
"""Updates that a reward is averaged over."""
MANY = 100_000
"""Updates that no run reaches: the time ends it."""


def begin(file: Path, folder: Path, steps: int, device: str) -> float:
    """Fine-tune the model and write it to the folder; the seconds that took."""
    start = time.perf_counter()
    torch.manual_seed(0)
    module, tokenizer = load_pretrained(str(file)) if file.is_dir() else unpacked(file)
    learned, _ = load_texts(tokenizer, "chain", Path()).split(HELD_OUT)
    learning = fine_tune(
        module.to(device).eval(),
        learned,
        rate=IMITATION_RATE,
        micro_batch=64,
        precision=torch.bfloat16 if device == "cuda" else None,
    )
    for _ in itertools.islice(learning, steps):
        pass
    model: Any = module
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return time.perf_counter() - start


def questions(tokenizer: Any, fresh: bool) -> list[dict[str, Any]]:
    """Rows of a dataset: conversations of one message, and the answer."""
    known, held_out = load_texts(tokenizer, "chain", Path()).split(HELD_OUT)
    return [
        {"prompt": each["prompt"], "answer": each["answer"]}
        for each in (held_out if fresh else known).records
    ]


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, count: int) -> float:
    """The share of right sampled answers to fresh questions, the same for all."""
    asked = questions(tokenizer, fresh=True)[:count]
    texts = [
        tokenizer.apply_chat_template(each["prompt"], tokenize=False, add_generation_prompt=True)
        for each in asked
    ]
    ids = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    ids = {name: ids[name].to(model.device) for name in ("input_ids", "attention_mask")}
    model.eval()
    with torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"):
        made = model.generate(
            **ids, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=CHAIN_TOKENS
        )
    answers = tokenizer.batch_decode(made[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    completions = [[{"content": text}] for text in answers]
    return statistics.mean(last_number_is_right(completions, [x["answer"] for x in asked]))


def train(kind: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """One training from the fine-tuned model, until its time is over."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    on_gpu = torch.cuda.is_available()
    torch.backends.cuda.matmul.allow_tf32 = True
    tokenizer = AutoTokenizer.from_pretrained(given.folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32)
    model = model.to("cuda" if on_gpu else "cpu")
    torch.manual_seed(seed)
    before = accuracy(model, tokenizer, given.questions)
    clock = _clock(given.seconds)
    trainer = _trainer(kind, seed, given, model, tokenizer, clock)
    clock.start = time.perf_counter()
    trainer.train()
    logs = [each for each in trainer.state.log_history if "reward" in each]
    rows = given.prompts * ANSWERS[kind]
    tokens = [
        each["completions/mean_length"] * rows + each.get("credit/tokens", 0.0) for each in logs
    ]
    return {
        "trainer": kind,
        "seed": seed,
        "rate": given.rate,
        "before": before,
        "after": accuracy(model, tokenizer, given.questions),
        "tokens": sum(tokens),
        "seconds": clock.ends[-1],
        "memory": torch.cuda.max_memory_allocated() if on_gpu else None,
        "curve": [
            [round(each), round(log["reward"], 4), round(end, 2)]
            for each, log, end in zip(tokens, logs, clock.ends, strict=True)
        ],
    }


def _clock(seconds: float) -> Any:
    """A callback that notes when every update ended, and stops the training in time."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.start = time.perf_counter()
            self.ends: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> Any:
            self.ends.append(time.perf_counter() - self.start)
            # the next update takes as long as this one
            control.should_training_stop = self.ends[-1] * (1 + 1 / len(self.ends)) > seconds
            return control

    return Clock()


def _trainer(
    kind: str, seed: int, given: argparse.Namespace, model: Any, tokenizer: Any, clock: Any
) -> Any:
    """TRL's GRPOTrainer or ours, with the same settings and as many rows per update."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    import arsm
    from arsm.trl import BranchTrainer

    on_gpu = torch.cuda.is_available()
    rows = given.prompts * ANSWERS[kind]
    at_once = min(given.rows, rows)
    args = GRPOConfig(
        tempfile.mkdtemp(),
        num_generations=ANSWERS[kind],
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=rows // at_once,
        max_completion_length=CHAIN_TOKENS,
        learning_rate=given.rate,
        lr_scheduler_type="constant",
        scale_rewards="none",
        max_steps=MANY,
        seed=seed,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    options: dict[str, Any] = {
        "reward_funcs": last_number_is_right,
        "args": args,
        "train_dataset": Dataset.from_list(questions(tokenizer, fresh=False)),
        "processing_class": tokenizer,
        "callbacks": [clock],
    }
    if kind != "BranchTrainer":
        return GRPOTrainer(model, **options)
    return BranchTrainer(model, credit=arsm.RLOO(given.draws), budget=given.budget, **options)


def one(given: argparse.Namespace) -> None:
    """A training in a process of its own: its record is the last line that it prints."""
    kind, seed = given.one.split(":")
    print(json.dumps(train(kind, int(seed), given)), flush=True)


def several(given: argparse.Namespace) -> None:
    """Fine-tune once, run all trainings at the same time, and write one file."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record: dict[str, Any] = {
        **provenance(device),
        "prompts": given.prompts,
        "draws": given.draws,
        "budget": given.budget,
        "questions": given.questions,
        "imitation": given.imitation,
    }
    with tempfile.TemporaryDirectory() as folder:
        record["fine-tuning, seconds"] = begin(given.file, Path(folder), given.imitation, device)
        if device == "cuda":
            torch.cuda.empty_cache()
        print(f"fine-tuned in {record['fine-tuning, seconds']:.0f} s", flush=True)
        same = [word for word in sys.argv[1:] if word != "--one"]
        processes = {
            (kind, seed): subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.token_credit_smollm2", *same),
                    *("--folder", folder, "--one", f"{kind}:{seed}"),
                ],
                stdout=subprocess.PIPE,
                stderr=(Path(folder) / f"{kind}{seed}.txt").open("w"),
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"},
            )
            for kind, seed in itertools.product(TRAINERS, given.seeds)
        }
        record["trainings at once"] = len(processes)
        runs = []
        for (kind, seed), process in processes.items():
            said, _ = process.communicate()
            if process.returncode:
                print((Path(folder) / f"{kind}{seed}.txt").read_text()[-2000:], flush=True)
                continue
            runs.append(json.loads(said.splitlines()[-1]))
            shown = {name: value for name, value in runs[-1].items() if name != "curve"}
            print({**shown, "updates": len(runs[-1]["curve"])}, flush=True)
            given.out.parent.mkdir(parents=True, exist_ok=True)
            records.write(given.out, [{**record, "runs": runs}])


def report(record: dict[str, Any], path: Path) -> None:
    """The mean reward of some updates against tokens and seconds, every seed a line."""
    from matplotlib.figure import Figure

    from arsm_experiments import palette

    drawn = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = drawn.subplots(1, 2, sharey=True)
    colours = dict(zip(TRAINERS, ("tab:gray", "tab:blue"), strict=True))
    named = set()
    for run in record["runs"]:
        tokens, rewards, seconds = zip(*run["curve"], strict=True)
        smooth = [statistics.mean(rewards[i - SMOOTH : i]) for i in range(SMOOTH, len(rewards) + 1)]
        spent = [total / 1000 for total in itertools.accumulate(tokens)][SMOOTH - 1 :]
        label = None if run["trainer"] in named else run["trainer"]
        named.add(run["trainer"])
        left.plot(spent, smooth, color=colours[run["trainer"]], label=label)
        right.plot(seconds[SMOOTH - 1 :], smooth, color=colours[run["trainer"]])
    left.set_ylabel(f"reward, mean of {SMOOTH} updates")
    left.set_xlabel("generated tokens, thousands")
    right.set_xlabel("seconds")
    left.legend(frameon=False)
    palette.save(drawn, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "file", type=Path, nargs="?", help="SmolLM2-135M-Instruct.Q4_1.gguf, or an unpacked folder"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/token_credit_smollm2.json"))
    parser.add_argument("--imitation", type=int, default=120, help="Steps of fine-tuning")
    parser.add_argument("--seconds", type=float, default=200, help="Of every training")
    parser.add_argument("--prompts", type=int, default=32, help="Per update")
    parser.add_argument("--rows", type=int, default=32, help="Answers of one backward pass")
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--draws", type=int, default=16, help="Of BranchTrainer, per state")
    parser.add_argument("--budget", type=float, help="Of BranchTrainer; by default every state")
    parser.add_argument("--questions", type=int, default=1024, help="For the accuracy")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--report", action="store_true", help="Draw the figure of the results")
    given = parser.parse_args()
    if given.report:
        (record,) = records.read(RESULTS / "smollm2.json")
        report(record, RESULTS / "smollm2.png")
    elif given.one:
        one(given)
    elif given.file is None:
        parser.error("MODEL is missing: the GGUF file, or the folder that it was unpacked to.")
    else:
        several(given)


if __name__ == "__main__":
    main()
