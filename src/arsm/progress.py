"""One line on a terminal for what takes more than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Self

PATIENCE = 2.0
"""Seconds before anything is shown."""
EVERY = 0.2
"""Seconds between two lines."""


class Progress:
    """The share done, what is done now and the time left, on standard error; nothing
    where that is not a terminal.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled and sys.stderr.isatty()
        self.start = time.monotonic()
        self.shown = 0.0

    def __call__(self, words: str, share: float) -> None:
        """Show this share of the way; at 1, clear the line."""
        if share >= 1:
            self.close()
            return
        # nothing for what is quick, and not more often than one can read
        now = time.monotonic()
        if not self.enabled or now - self.start < PATIENCE or now - self.shown < EVERY:
            return
        self.shown = now
        left = f", about {(now - self.start) * (1 - share) / share:,.0f} s left" if share else ""
        sys.stderr.write(f"\r{share:4.0%} {words}{left}\x1b[K")
        sys.stderr.flush()

    def close(self) -> None:
        """Clear the line, if there is one."""
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self.shown = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reporter(progress: Callable[[str, float], None] | None) -> Callable[[str, float], None]:
    """The caller's own, or the line on the terminal."""
    return Progress() if progress is None else progress
