"""python -m benchmarks.token_credit: TRL's GRPOTrainer and `arsm.trl.BranchTrainer` on two tasks,
at equal tokens.

- `sort`: sort six digits. The model has imitated some answers and is right in part of its own; the
  reward is 1 for a right answer and 0 for a wrong one. A single wrong token decides, which branches
  find.
- `count`: a random model is rewarded for the share of sevens in its answer. Every token adds its
  own part to the reward, so that a group of whole answers already tells them apart, and branches
  cost more than they tell.

Both trainers get the same `GRPOConfig` but for the answers per prompt: BranchTrainer samples half
as many and spends the other half of the tokens on branches. A training is one line of
results/trl/runs.jsonl.xz, which is not made again:

    python -m benchmarks.token_credit run          # all trainings that are missing
    python -m benchmarks.token_credit noise        # variance of the gradients before the training
    python -m benchmarks.token_credit report       # table.csv and curves.png
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from examples.trl_branch import DIGITS, imitate, policy, questions, right, tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

import arsm
from arsm.trl import BranchTrainer, gradient_noise
from arsm_experiments import palette
from arsm_experiments.runs.provenance import provenance
from benchmarks import records
from benchmarks.measure import table

RESULTS = Path(__file__).parent.parent / "results" / "trl"
UPDATES = 120
PROMPTS = 12
SEEDS = (0, 1, 2)
TASKS = ("sort", "count")
TRAINERS = ("GRPOTrainer", "BranchTrainer")
IMITATION = {"sort": 100, "count": 0}
"""Steps of cross-entropy before the training by rewards."""
RATES = {"sort": (1e-4, 3e-4, 1e-3), "count": (3e-4, 1e-3)}
"""Learning rates; every trainer is reported at each."""
SHOWN = 3e-4
"""The rate of the figure."""
MARKS = {"sort": (30_000, 60_000), "count": (10_000, 20_000, 60_000)}
"""Numbers of generated tokens at which the trainers are compared."""
REPEATS = 24
"""Gradients per measured variance."""
NOISY = (
    ("GRPOTrainer", None),
    ("BranchTrainer", 1.0),
    ("TrueTokens", 1.0),
    ("BranchTrainer", None),
    ("TrueTokens", None),
)
"""Trainers and budgets whose gradients are measured."""


def count(completions: list[str], **columns: Any) -> list[float]:
    """The share of sevens among the tokens that an answer may have."""
    return [text.split().count("7") / (DIGITS + 1) for text in completions]


REWARDS = {"sort": right, "count": count}


def begin(task: str, seed: int) -> LlamaForCausalLM:
    """The model before the training by rewards."""
    torch.manual_seed(seed)
    model = policy()
    if IMITATION[task]:
        imitate(model, IMITATION[task], seed + 100)
    return model


@torch.no_grad()
def reward(task: str, model: Any) -> float:
    """The mean reward of 2,000 answers to fresh questions."""
    words, data = tokenizer(), questions(2000, seed=99)
    ids = torch.tensor(words(list(data["prompt"]))["input_ids"])
    ids = model.generate(
        input_ids=ids, do_sample=True, top_k=0, max_new_tokens=DIGITS + 1, pad_token_id=0
    )
    texts = words.batch_decode(ids[:, DIGITS + 1 :], skip_special_tokens=True)
    return statistics.mean(REWARDS[task](completions=texts, answer=list(data["answer"])))


class TrueTokens(BranchTrainer):
    """Advantages [B, T]: a branched state's credit goes to its true token alone, as other trainers
    would have it.
    """

    def _find_credit(
        self, inputs: list[dict[str, Any]], batch: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        tokens, weights = super()._find_credit(inputs, batch)
        branched = (weights[..., 1:] != 0).any(-1)
        # w_0 = (f_0 - mean of the others) / n
        advantages = torch.where(branched, self.credit.paths * weights[..., 0], weights[..., 0])
        weights = torch.zeros_like(weights)
        weights[..., 0] = advantages
        return tokens, weights


def make(
    task: str,
    kind: str,
    model: Any,
    rate: float,
    seed: int,
    budget: float | None = 1.0,
    **options: Any,
) -> Any:
    """A trainer of the kind; options are those of `GRPOConfig`."""
    branch = kind != "GRPOTrainer"
    generations = 4 if branch else 8
    args = GRPOConfig(
        tempfile.mkdtemp(),
        num_generations=generations,
        per_device_train_batch_size=PROMPTS * generations,
        max_completion_length=DIGITS + 1,
        learning_rate=rate,
        lr_scheduler_type="constant",
        scale_rewards="none",
        max_steps=UPDATES,
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **options,
    )
    data = questions(PROMPTS * UPDATES, seed=seed + 200)
    arguments: dict[str, Any] = {"reward_funcs": REWARDS[task], "args": args, "train_dataset": data}
    arguments["processing_class"] = tokenizer()
    if branch:
        chosen = {"BranchTrainer": BranchTrainer, "TrueTokens": TrueTokens}[kind]
        return chosen(model, credit=arsm.RLOO(4), budget=budget, **arguments)
    return GRPOTrainer(model, **arguments)


def train(task: str, kind: str, rate: float, seed: int) -> dict[str, Any]:
    """One training: the reward before and after, and reward, tokens and CPU seconds of every
    update.
    """
    torch.set_num_threads(1)
    model = begin(task, seed)
    before = reward(task, model)
    trainer = make(task, kind, model, rate, seed)
    begun = time.process_time()
    trainer.train()
    seconds = time.process_time() - begun
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    rows = trainer.args.per_device_train_batch_size
    tokens = [
        entry["completions/mean_length"] * rows + entry.get("credit/tokens", 0.0) for entry in logs
    ]
    ratio = [
        entry["credit/variance"] / entry["credit/group_variance"]
        for entry in logs[:30]
        if "credit/variance" in entry
    ]
    return {
        "task": task,
        "trainer": kind,
        "rate": rate,
        "seed": seed,
        "before": before,
        "after": reward(task, model),
        "tokens": sum(tokens),
        "cpu_seconds": seconds,
        "variance_ratio": statistics.mean(ratio) if ratio else None,
        "curve": [
            [round(each), round(entry["reward"], 4)]
            for each, entry in zip(tokens, logs, strict=True)
        ],
        "provenance": provenance("cpu"),
    }


def noise() -> None:
    """noise.json: variance x tokens of both trainers' gradients before the training, of three
    models each.
    """
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for task, seed in itertools.product(TASKS, SEEDS):
        model = begin(task, seed)
        for kind, budget in NOISY:
            trainer = make(task, kind, model, 1e-4, seed, budget, loss_type="luspo")
            measured = gradient_noise(trainer, REPEATS)
            one = {
                "task": task,
                "trainer": kind,
                "budget": budget,
                "seed": seed,
                "per_token": measured.per_token,
            }
            found.append({**one, **measured._asdict()})
            print(found[-1], flush=True)
    records.write_one(RESULTS / "noise.json", {"runs": found, "provenance": provenance("cpu")})


def trainings() -> Iterator[tuple[str, str, float, int]]:
    """Task, trainer, learning rate and seed of every training."""
    for task in TASKS:
        for kind in TRAINERS:
            for rate, seed in itertools.product(RATES[task], SEEDS):
                yield task, kind, rate, int(seed)


def run() -> None:
    """Make all trainings that are not in the file."""
    records.make_missing(
        RESULTS / "runs.jsonl.xz", trainings(), key_of, lambda key: train(*key), shown
    )


def key_of(record: records.Record) -> tuple[str, str, float, int]:
    """Task, trainer, learning rate and seed of a training."""
    return record["task"], record["trainer"], record["rate"], record["seed"]


def shown(record: records.Record) -> str:
    """A training's results, as they are printed."""
    names = ("before", "after", "tokens", "cpu_seconds", "variance_ratio")
    return ", ".join(f"{name} {record[name]}" for name in names)


def reached(curve: list[list[float]], tokens: float) -> float:
    """The mean reward of the ten updates before so many tokens were generated."""
    spent = list(itertools.accumulate(each for each, _ in curve))
    before = [reward for (_, reward), total in zip(curve, spent, strict=True) if total <= tokens]
    return statistics.mean(before[-10:])


def report() -> None:
    """table.csv and curves.png, from the trainings."""
    runs = records.read(RESULTS / "runs.jsonl.xz")
    rows = []
    for task, kind, rate in dict.fromkeys(each[:3] for each in trainings()):
        some = [
            each
            for each in runs
            if (each["task"], each["trainer"], each["rate"]) == (task, kind, rate)
        ]
        measured = {
            name: [each[name] for each in some]
            for name in ("before", "after", "tokens", "cpu_seconds")
        }
        for tokens in MARKS[task]:
            measured[f"reward at {tokens} tokens"] = [
                reached(each["curve"], tokens) for each in some
            ]
        if kind == "BranchTrainer":
            measured["credit/variance over credit/group_variance"] = [
                each["variance_ratio"] for each in some
            ]
        for metric, values in measured.items():
            rows.append(
                {
                    "row": f"{task}: {kind}, rate {rate:g}",
                    "metric": metric,
                    "mean": f"{statistics.mean(values):.4g}",
                    "std": f"{statistics.stdev(values):.2g}",
                    "seeds": len(values),
                    "paper": "",
                    "seconds": f"{statistics.mean(measured['cpu_seconds']):.1f}",
                    "hardware": some[0]["provenance"]["hardware"],
                    "commit": some[0]["provenance"]["commit"],
                }
            )
    with (RESULTS / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    figure(runs)
    header = ["row", "metric", "mean", "std"]
    print(table("Two tasks in TRL", header, [[each[key] for key in header] for each in rows]))


def figure(runs: list[dict[str, Any]]) -> None:
    """curves.png: the mean reward of ten updates against tokens and CPU seconds, three seeds
    each.
    """
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, 5.2), layout="constrained")
    panels = drawn.subplots(2, 2, sharey="row")
    for row, task in zip(panels, TASKS, strict=True):
        for kind, colour in zip(TRAINERS, ("tab:gray", "tab:blue"), strict=True):
            for seed in SEEDS:
                wanted = (task, kind, SHOWN, seed)
                (one,) = [
                    each
                    for each in runs
                    if (each["task"], each["trainer"], each["rate"], each["seed"]) == wanted
                ]
                rewards = torch.tensor([reward for _, reward in one["curve"]])
                smooth = rewards.unfold(0, 10, 1).mean(-1)
                spent = torch.tensor([tokens for tokens, _ in one["curve"]]).cumsum(0)[9:]
                share = torch.arange(10, len(rewards) + 1) / len(rewards)
                label = kind if seed == SEEDS[0] else None
                row[0].plot(spent / 1000, smooth, color=colour, label=label)
                row[1].plot(share * one["cpu_seconds"], smooth, color=colour)
        row[0].set_ylabel(f"{task}: reward")
    panels[1][0].set_xlabel("generated tokens, thousands")
    panels[1][1].set_xlabel("CPU seconds")
    panels[0][0].legend()
    palette.save(drawn, RESULTS / "curves.png")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.token_credit")
    parser.add_argument("command", choices=["run", "noise", "report"])
    {"run": run, "noise": noise, "report": report}[parser.parse_args().command]()


if __name__ == "__main__":
    main()
