"""`arsm report`: one self-contained page from runs, and the tables and figures of results/."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from rich.console import Console

from arsm_experiments.palette import same_pixels
from arsm_experiments.report.alone import with_time
from arsm_experiments.report.chapters import make_chapters
from arsm_experiments.report.page import render
from arsm_experiments.report.pages import remake
from arsm_experiments.report.picture import save_figure
from arsm_experiments.report.sections import Section, results_csv
from arsm_experiments.runs.files import RunError, make_folder, write_atomically
from arsm_experiments.runs.reader import read_runs


@dataclass(frozen=True)
class Report:
    """Make one HTML page with tables and figures from the runs under ROOT, readable offline."""

    root: Path = Path("runs")
    """Folder of run folders or of archives of runs."""
    out: Path | None = None
    """Page to write; None for ROOT/report.html."""
    export: Path | None = None
    """Also write table.csv and figures under EXPORT/<experiment>, if a README.md is there only
    those that it shows, and the generated parts of the pages.
    """

    def check(self) -> None:
        """Refuse options that cannot run, before anything runs."""
        if not self.root.is_dir():
            raise ValueError(
                f"There is no folder {self.root}; run an experiment first, or point --root at its "
                "run folders."
            )

    def run(self, console: Console) -> None:
        """Read all runs, write the page, and export if asked."""
        chapters = make_chapters(read_runs(self.root))
        if not chapters:
            raise RunError(
                f"There are no runs under {self.root}; run an experiment first, or point --root at "
                "its run folders."
            )
        out = self.out or self.root / "report.html"
        make_folder(out.parent)
        write_atomically(out, lambda file: file.write(render(list(chapters.values())).encode()))
        runs = sum(
            len(section.records) for chapter in chapters.values() for section in chapter.sections
        )
        console.print(f"Wrote {out} from {runs} {'run' if runs == 1 else 'runs'}.")
        if self.export is not None:
            for experiment, chapter in chapters.items():
                folder = self.export / experiment
                export_sections(chapter.sections, folder)
                console.print(f"Wrote {folder}.")
            for page in remake(self.export):
                console.print(f"Wrote the numbers of {page}.")


def export_sections(sections: Sequence[Section], folder: Path) -> None:
    """Write table.csv and the images that the folder's README.md shows, or all images if it has no
    README.md.
    """
    make_folder(folder)
    write_atomically(folder / "table.csv", lambda file: file.write(results_csv(sections).encode()))
    page = folder / "README.md"
    text = page.read_text() if page.is_file() else None

    def shown(name: str) -> bool:
        return text is None or f"]({name})" in text

    for section in sections:
        for figure in with_time(section.figures, folder):
            for name in figure.files:
                if shown(f"{name}.png"):
                    save_figure(figure, name, folder)
        for picture in section.pictures:
            path = folder / picture.name
            if not shown(picture.name):
                continue
            if path.is_file() and same_pixels(path, Image.open(io.BytesIO(picture.content))):
                continue
            path.write_bytes(picture.content)
