"""`arsm report`: one self-contained page from run folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup
from rich.console import Console

from arsm.experiments.record import Record, RunError, find_runs, read_run, write_atomically
from arsm.experiments.report_compare import compare_sections
from arsm.experiments.report_control import control_sections
from arsm.experiments.report_toy import toy_sections
from arsm.experiments.report_vae import vae_sections
from arsm.experiments.sections import Section, panel_svg, pivot, results_csv, save_figure

# An experiment takes part in the report by an entry here: its run folders in, sections out.
SECTIONS: dict[str, Callable[[Sequence[Record]], list[Section]]] = {
    "toy": toy_sections,
    "vae": vae_sections,
    "compare": compare_sections,
    "control": control_sections,
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
        write_atomically(out, lambda file: file.write(page(chapters).encode()))
        console.print(f"Wrote {out} from {sum(len(s.records) for c in chapters.values() for s in c)} runs.")
        if self.export is not None:
            for experiment, sections in chapters.items():
                folder = self.export / experiment
                export_sections(sections, folder)
                console.print(f"Wrote {folder}.")


def make_chapters(root: Path) -> dict[str, list[Section]]:
    """Each experiment's sections, from all its run folders that have something to show."""
    records: dict[str, list[Record]] = {}
    for folder in find_runs(root):
        record = read_run(folder)
        if record.experiment in SECTIONS and record.metrics:
            records.setdefault(record.experiment, []).append(record)
    if not records:
        raise RunError(f"There are no runs under {root}; run an experiment first, or point --root at its run folders.")
    return {experiment: SECTIONS[experiment](records[experiment]) for experiment in SECTIONS if experiment in records}


def page(chapters: dict[str, list[Section]]) -> str:
    """The whole report as HTML."""
    environment = Environment(
        loader=PackageLoader("arsm.experiments"), autoescape=select_autoescape(), trim_blocks=True
    )
    environment.globals.update(pivot=pivot, svg=lambda panel: Markup(panel_svg(panel)))
    return environment.get_template("report.html").render(chapters=chapters)


def export_sections(sections: Sequence[Section], folder: Path) -> None:
    """table.csv, and every figure as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "table.csv", lambda file: file.write(results_csv(sections).encode()))
    for section in sections:
        for figure in section.figures:
            save_figure(figure, folder)
