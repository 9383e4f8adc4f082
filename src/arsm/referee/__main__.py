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
from arsm.referee import Audit, Objective, audit, audit_advantages, audit_sequences


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


def _parser() -> argparse.ArgumentParser:
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
    _add_options_of_trainers(parser)
    _add_options_of_advantages(parser)
    return parser


def _add_options_of_trainers(parser: argparse.ArgumentParser) -> None:
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


def _add_options_of_advantages(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--advantages", action="store_true", help="function(rewards [B, n]) -> advantages [B, n]"
    )
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="with --advantages: function(rewards, mask) -> [B, n, T]",
    )


def _audited(function: Any, given: argparse.Namespace) -> Audit:
    """The audit that the options ask for."""
    if given.advantages:
        return audit_advantages(function, tokens=given.tokens)
    sign = -1 if given.minimise else 1
    if given.trainer:
        target = Objective(given.beta, given.temperature, given.stale)
        return audit_sequences(
            function, target=target, up_to_scale=given.up_to_scale, sign=sign, seed=given.seed
        )
    return audit(
        function,
        sign=sign,
        parameters=given.parameters,
        samples=given.samples,
        false_alarm=given.false_alarm,
        seed=given.seed,
    )


def _print(result: Audit) -> None:
    try:
        print(result, flush=True)
    except BrokenPipeError:
        # The reader has seen enough, as head has. Python would complain once more when it closes
        # the pipe, so that its output goes elsewhere from here on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_files(result: Audit, given: argparse.Namespace) -> None:
    if given.summary is not None:
        given.summary.write_text(result.markdown())
    if given.badge is not None:
        given.badge.write_text(result.badge())
    if given.figure:
        result.figure().savefig(given.figure, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    """0 if the gradient is unbiased, 1 if it is wrong, 2 if nothing could be decided or
    the command cannot run.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.tokens and not given.advantages:
        parser.error("--tokens belongs to --advantages; give both, or neither.")
    try:
        function = load_loss(given.function)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    try:
        result = _audited(function, given)
    # of an option: an error that the function raises is part of the result
    except ValueError as error:
        parser.error(str(error))
    _print(result)
    # last, so that a file that cannot be written does not cost the result
    try:
        _write_files(result, given)
    # a folder that does not exist, or an ending that matplotlib does not know
    except (OSError, ValueError) as error:
        parser.exit(2, f"The result could not be written: {error}.\n")
    return {"unbiased": 0, "wrong": 1, "not decided": 2}[result.verdict]


if __name__ == "__main__":
    sys.exit(main())
