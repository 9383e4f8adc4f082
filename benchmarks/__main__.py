"""python -m benchmarks [name ...]: time and memory as tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import gpu, overhead, rl, swap, univariate, vae
from benchmarks.measure import Table, hardware, write_record

BENCHMARKS: dict[str, Callable[[], list[Table] | None]] = {
    "univariate": univariate.main,
    "swap": swap.main,
    "overhead": overhead.main,
    "vae": vae.main,
    "rl": rl.main,
    "gpu": gpu.main,
}

COMMANDS = {
    "audit": "false alarms, power and time of arsm.audit",
    "agents": "agents beside Stable-Baselines3's, in CPU seconds",
    "many_actions": "agents with K actions per step",
    "less_noise": "four ways to change the rollouts of in-state leave-one-out",
    "maximize": "black boxes beside Optuna, nevergrad, CatCMA and annealing",
    "processes": "a black box of 10 ms in several processes",
    "pyro_vae": "gradients of a VAE in Pyro beside Pyro's own ELBOs",
    "pyro_training": "trainings in Pyro beside Pyro's own losses, in CPU seconds",
    "router": "a mixture of experts beside Switch and Gumbel straight-through",
    "router_transformer": "routers inside a transformer, credited with the losses they reach",
    "vector_quantisation": "an autoencoder of 512 codes: when a stochastic code pays",
    "decoding": "tokens per second of decoding in slots beside transformers' generate",
    "update": "one update of a language model, by stage",
    "real_model": "sampling and updates of SmolLM2 at full speed, for a GPU",
    "token_credit": "TRL's GRPOTrainer beside arsm.trl.BranchTrainer on two tasks",
    "token_credit_smollm2": "the same two trainers on SmolLM2, for a GPU",
    "vae_estimators": "a training step of the VAE with each estimator, for a GPU",
    "gpu_profile": "which kernels an estimate and a training step of the VAE launch on a GPU",
    "gpu_against": "an estimate and a training step of the VAE on a GPU, at two commits",
    "vae_curve": "whether a faster training step of the VAE trains alike",
}
"""Run one by one, as `python -m benchmarks.NAME`: most take an hour. Their results are under
results/, and those of the last three in README.md."""


def main() -> None:
    commands = "\n".join(
        f"  python -m benchmarks.{name}: {what}" for name, what in COMMANDS.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time and memory, printed as tables.",
        epilog=f"Commands of their own:\n{commands}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(BENCHMARKS))
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FOLDER",
        help="also keep what univariate, swap and overhead print, and every single time",
    )
    chosen = parser.parse_args()
    names = chosen.names or [
        name for name in BENCHMARKS if name != "gpu" or torch.cuda.is_available()
    ]
    for name in names:
        if name in COMMANDS:
            parser.error(f"{name} is a command of its own: python -m benchmarks.{name}.")
        if name not in BENCHMARKS:
            parser.error(f"there is no benchmark {name!r}; known are {', '.join(BENCHMARKS)}.")
    print(hardware(), end="\n\n")
    for name in names:
        tables = BENCHMARKS[name]()
        if chosen.record is not None and tables:
            write_record(chosen.record, name, tables)


if __name__ == "__main__":
    main()
