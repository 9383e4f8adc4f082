"""Refusing options that cannot run, each in one sentence."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from arsm.estimators import estimator


def check_least(command: object, **least: int) -> None:
    """Refuse options of a command, named by its fields, that are given and below their least
    values.
    """
    for name, bound in least.items():
        values = getattr(command, name)
        for value in values if isinstance(values, tuple) else (values,):
            if value is not None and value < bound:
                raise ValueError(f"{_option(name)} must be at least {bound}, but is {value}.")


def check_some(**options: Sequence[object]) -> None:
    """Refuse an option that was given no value."""
    for name, values in options.items():
        if not values:
            raise ValueError(
                f"{_option(name)} needs at least one value; leave the option out for its default."
            )


def check_positive(**options: Sequence[float]) -> None:
    """Refuse numbers that are not above zero and finite."""
    for name, values in options.items():
        for value in values:
            if not 0 < value < math.inf:
                raise ValueError(f"{_option(name)} must be positive and finite, but is {value}.")


def check_asks(words: str, logits: Tensor) -> None:
    """Refuse an estimator that is not for such logits."""
    chosen = estimator(words)
    chosen.ask(logits, chosen.noise(logits))


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"--device {device} needs a GPU, but torch finds none; leave the option out."
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ValueError(f"--device must be cpu, cuda or auto, but is {device}.")


def pick_device(device: str) -> str:
    """The device itself; for "auto" a GPU where there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def check_name(name: str) -> None:
    """Refuse a `--name` that would put a run folder elsewhere."""
    if "/" in name or os.sep in name:
        raise ValueError(
            f"--name is the beginning of a folder's name and has no slash, but is {name}; --root "
            "says where."
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
