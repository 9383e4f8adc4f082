"""One section of the demo's page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from arsm_experiments.report.figures import Figure

Tick = Callable[[float], None]
"""Called with the fraction of a part that is done."""


@dataclass(frozen=True)
class Part:
    """One section of the page."""

    title: str
    found: str
    """The finding in one sentence, with the measured numbers."""
    code: str
    """The code that the part shows."""
    figures: Sequence[Figure] = ()
    images: Sequence[tuple[str, str]] = ()
    """Pictures as markup, each with a caption."""
    printed: str = ""
