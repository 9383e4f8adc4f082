"""The chapters of the report, one per experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from arsm_experiments.report.compare import compare_sections
from arsm_experiments.report.conditional import conditional_sections
from arsm_experiments.report.control import control_sections
from arsm_experiments.report.sections import Section
from arsm_experiments.report.sequences import sequences_sections
from arsm_experiments.report.toy import toy_sections
from arsm_experiments.report.vae import vae_sections
from arsm_experiments.runs.reader import Record

# To add an experiment to the report, add an entry: its chapter's title, and a function from its
# runs to sections.
CHAPTERS: dict[str, tuple[str, Callable[[Sequence[Record]], list[Section]]]] = {
    "toy": ("Toy problem", toy_sections),
    "vae": ("Categorical VAE", vae_sections),
    "conditional": ("Conditional MNIST", conditional_sections),
    "control": ("Policy gradients", control_sections),
    "sequences": ("Sequences", sequences_sections),
    "compare": ("Estimators at equal cost", compare_sections),
}


@dataclass(frozen=True)
class Chapter:
    """One experiment's part of the page."""

    title: str
    sections: Sequence[Section]


def make_chapters(records: Sequence[Record]) -> dict[str, Chapter]:
    """Each experiment's chapter, from all its runs that have metrics."""
    found: dict[str, Chapter] = {}
    for experiment, (title, make_sections) in CHAPTERS.items():
        own = [record for record in records if record.experiment == experiment and record.metrics]
        if own:
            found[experiment] = Chapter(title, make_sections(own))
    return found
