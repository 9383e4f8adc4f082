"""Refusing options that cannot run, each in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence


def check_some(**options: Sequence[object]) -> None:
    """Refuse an option that was given no value."""
    for name, values in options.items():
        if not values:
            raise ValueError(
                f"--{name.replace('_', '-')} needs at least one value; leave the option out for its default."
            )


def check_positive(**options: Sequence[float]) -> None:
    """Refuse numbers that are not above zero and finite."""
    for name, values in options.items():
        for value in values:
            if not 0 < value < math.inf:
                raise ValueError(f"--{name} must be positive and finite, but is {value}.")
