"""`arsm report`: one self-contained page from run folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from arsm_experiments.figures import save_figure
from arsm_experiments.page import Chapter, render
from arsm_experiments.record import Record, RunError, find_runs, read_run, write_atomically
from arsm_experiments.report_compare import compare_sections
from arsm_experiments.report_conditional import conditional_sections
from arsm_experiments.report_control import control_sections
from arsm_experiments.report_toy import toy_sections
from arsm_experiments.report_vae import vae_sections
from arsm_experiments.sections import Section, results_csv

# An experiment takes part in the report by an entry here: its chapter's title; its run folders in, sections out.
CHAPTERS: dict[str, tuple[str, Callable[[Sequence[Record]], list[Section]]]] = {
    "toy": ("Toy problem", toy_sections),
    "vae": ("Categorical VAE", vae_sections),
    "conditional": ("Conditional MNIST", conditional_sections),
    "control": ("Policy gradients", control_sections),
    "compare": ("Estimators at equal cost", compare_sections),
}


@dataclass(frozen=True)
class Report:
    """Make one HTML page with tables and figures from the run folders under ROOT; it needs no network."""

    root: Path = Path("runs")
    """Where the run folders are."""
    out: Path | None = None
    """The page to write; ROOT/report.html if not given."""
    export: Path | None = None
    """Also write EXPORT/<experiment>/table.csv and its figures as PNG, e.g. to results."""

    def check(self) -> None:
        """Refuse what cannot run, before anything does."""
        if not self.root.is_dir():
            raise ValueError(
                f"There is no folder {self.root}; run an experiment first, or point --root at its run folders."
            )

    def run(self, console: Console) -> None:
        """Read every run folder, write the page and what is to be exported."""
        chapters = make_chapters(self.root)
        out = self.out or self.root / "report.html"
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, lambda file: file.write(render(list(chapters.values())).encode()))
        runs = sum(len(section.records) for chapter in chapters.values() for section in chapter.sections)
        console.print(f"Wrote {out} from {runs} {'run' if runs == 1 else 'runs'}.")
        if self.export is not None:
            for experiment, chapter in chapters.items():
                folder = self.export / experiment
                export_sections(chapter.sections, folder)
                console.print(f"Wrote {folder}.")


def make_chapters(root: Path) -> dict[str, Chapter]:
    """Each experiment's chapter, from all its run folders that have something to show."""
    records: dict[str, list[Record]] = {}
    for folder in find_runs(root):
        record = read_run(folder)
        if record.experiment in CHAPTERS and record.metrics:
            records.setdefault(record.experiment, []).append(record)
    if not records:
        raise RunError(f"There are no runs under {root}; run an experiment first, or point --root at its run folders.")
    return {
        experiment: Chapter(title, make_sections(records[experiment]))
        for experiment, (title, make_sections) in CHAPTERS.items()
        if experiment in records
    }


def export_sections(sections: Sequence[Section], folder: Path) -> None:
    """table.csv, and every figure as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "table.csv", lambda file: file.write(results_csv(sections).encode()))
    for section in sections:
        for figure in section.figures:
            save_figure(figure, folder)
