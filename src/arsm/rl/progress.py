"""A line of progress on a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

AFTER = 2.0
"""Seconds before the line is shown: shorter runs need none."""
EVERY = 0.2


class LearningProgress:
    """Writes how far learning is, the latest return and the time left to standard
    error, if that is a terminal.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled and sys.stderr.isatty()
        self._begin = time.monotonic()
        self._next = self._begin + AFTER
        self._written = 0

    def __enter__(self) -> LearningProgress:
        return self

    def update(self, share: float, iteration: Any) -> None:
        """Show this share of the way."""
        now = time.monotonic()
        # writing at every iteration would take longer than a short iteration
        if not self._enabled or now < self._next:
            return
        # as if the rest took as long per share as what is done
        left = (now - self._begin) * max(1 - share, 0.0) / max(share, 1e-9)
        mean = sum(iteration.returns) / len(iteration.returns)
        line = (
            f"{min(share, 1.0):4.0%}  episode {iteration.episodes:,}  return {mean:.1f}  "
            f"{clock(left)} left"
        )
        # a shorter line must cover the longer one before it
        sys.stderr.write("\r" + line.ljust(self._written))
        sys.stderr.flush()
        self._written, self._next = len(line), now + EVERY

    def __exit__(self, *_: object) -> None:
        # what is printed next begins on a line of its own
        if self._written:
            sys.stderr.write("\n")


def clock(seconds: float) -> str:
    """E.g. 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
