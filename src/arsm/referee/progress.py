"""One line on a terminal for an audit that takes more than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

PATIENCE = 2.0
"""Seconds before anything is shown."""


class Progress:
    """The problem, the share done and the time left, on stderr; nothing where it is not a terminal."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.shown = 0.0

    def __call__(self, problem: str, share: float) -> None:
        now = time.perf_counter()
        due = now - self.start > PATIENCE and now - self.shown > 0.2
        if not sys.stderr.isatty() or not (due or (share == 1 and self.shown)):
            return
        self.shown = now
        left = (now - self.start) * (1 - share) / max(share, 1e-9)
        sys.stderr.write(f"\r\x1b[K{share:4.0%} {problem}, {left:.0f} s left" if share < 1 else "\r\x1b[K")
        sys.stderr.flush()


def reporter(progress: Callable[[str, float], None] | None) -> Callable[[str, float], None]:
    """The caller's own, or the line on the terminal."""
    return Progress() if progress is None else progress
