"""python -m arsm.referee module:function audits a loss, or a file's: python -m
arsm.referee path.py:function; an estimator by its class: path.py:MyEstimator.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from arsm.capabilities import is_estimator_class
from arsm.estimators import estimator
from arsm.named import load
from arsm.referee import Objective, audit, audit_advantages, audit_sequences


def load_loss(words: str) -> Any:
    """The function that `module:function` or `path.py:function` names, or an estimator,
    by its class.
    """
    found = load(words)
    if is_estimator_class(found):
        return estimator(words)
    if not callable(found):
        raise ValueError(f"{words} is not a function.")
    return found


def main(arguments: list[str] | None = None) -> int:
    """0 if the gradient is unbiased, 1 if it is wrong, 2 if nothing could be decided or
    the command cannot run.
    """
    parser = argparse.ArgumentParser(
        prog="python -m arsm.referee", description="Is the gradient of this loss right?"
    )
    parser.add_argument(
        "function",
        help="module:function or path.py:function; loss(logits, f) -> scalar, or an estimator's "
        "class",
    )
    parser.add_argument(
        "--minimise", action="store_true", help="the loss is minus the objective's surrogate"
    )
    parser.add_argument(
        "--parameters", action="store_true", help="judge the gradient of f's own parameters too"
    )
    parser.add_argument(
        "--samples", type=int, default=1 << 16, help="draws per row (default: %(default)s)"
    )
    parser.add_argument(
        "--false-alarm",
        type=float,
        default=1e-6,
        help="chance that a correct loss fails the whole audit (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default: %(default)s)")
    parser.add_argument("--figure", metavar="FILE", help="also draw the result (needs matplotlib)")
    parser.add_argument(
        "--summary", metavar="FILE", type=Path, help="also write the result as Markdown"
    )
    parser.add_argument(
        "--badge", metavar="FILE", type=Path, help="also write the verdict as an SVG badge"
    )
    parser.add_argument(
        "--trainer",
        action="store_true",
        help="loss(batch) of a language model's trainer, arsm.referee.TrainerBatch",
    )
    parser.add_argument(
        "--beta", type=float, default=0.0, help="with --trainer: weight of the KL to the reference"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="with --trainer: of the sampler"
    )
    parser.add_argument(
        "--stale", action="store_true", help="with --trainer: answers come from an older model"
    )
    parser.add_argument(
        "--up-to-scale", action="store_true", help="with --trainer: allow a constant factor"
    )
    parser.add_argument(
        "--advantages", action="store_true", help="function(rewards [B, n]) -> advantages [B, n]"
    )
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="with --advantages: function(rewards, mask) -> [B, n, T]",
    )
    given = parser.parse_args(arguments)
    if given.tokens and not given.advantages:
        parser.error("--tokens belongs to --advantages; give both, or neither.")
    try:
        function = load_loss(given.function)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    try:
        if given.advantages:
            result = audit_advantages(function, tokens=given.tokens)
        elif given.trainer:
            target = Objective(given.beta, given.temperature, given.stale)
            sign = -1 if given.minimise else 1
            result = audit_sequences(
                function, target=target, up_to_scale=given.up_to_scale, sign=sign, seed=given.seed
            )
        else:
            result = audit(
                function,
                sign=-1 if given.minimise else 1,
                parameters=given.parameters,
                samples=given.samples,
                false_alarm=given.false_alarm,
                seed=given.seed,
            )
    except ValueError as error:  # of an option: what the function raises is part of the result
        parser.error(str(error))
    try:
        print(result, flush=True)
    except BrokenPipeError:  # the reader has seen enough, as head has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    try:
        for target, text in ((given.summary, result.markdown), (given.badge, result.badge)):
            if target is not None:
                target.write_text(text())
        if given.figure:
            result.figure().savefig(given.figure, dpi=150)
    except (OSError, ValueError) as error:  # a folder that is not there, a format without a writer
        parser.exit(2, f"The result could not be written: {error}.\n")
    return {"unbiased": 0, "wrong": 1, "not decided": 2}[result.verdict]


if __name__ == "__main__":
    sys.exit(main())
