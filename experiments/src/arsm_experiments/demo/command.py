"""`arsm demo`: one self-contained page that shows what the library does, made on the spot."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

import arsm
from arsm_experiments.demo.parts import PARTS
from arsm_experiments.progress import progress_bars
from arsm_experiments.report.page import render_page
from arsm_experiments.runs.files import make_folder, write_atomically


@dataclass(frozen=True)
class Demo:
    """Show a choice, a latent code, a sequence task, an agent and a wrong gradient on one page, in
    a minute and a half on two cores.
    """

    out: Path = Path("runs/demo.html")
    """The page to write."""
    scale: float = 1.0
    """Factor of all training; 0.1 takes seconds and shows little."""

    def check(self) -> None:
        """Refuse options that cannot run, before anything runs."""
        if not 0 < self.scale <= 10:
            raise ValueError(f"--scale must be positive and at most 10, but is {self.scale:g}.")
        if self.out.is_dir():
            raise ValueError(
                f"--out must be a file, but {self.out} is a folder; name one such as "
                f"{self.out}/demo.html."
            )

    def run(self, console: Console) -> None:
        """Run the parts one after the other and write the page."""
        make_folder(self.out.parent)  # before a minute of work that could not be shown
        begun = time.monotonic()
        made = []
        with progress_bars(console) as bars:
            for name, make in PARTS.items():
                bar = bars.add_task(name, total=100)
                made.append(
                    make(
                        self.scale,
                        lambda share, bar=bar: bars.update(bar, completed=round(100 * share)),
                    )
                )
                bars.update(bar, completed=100)
        for part in made:
            console.print(f"[bold]{part.title}.[/] {part.found}", highlight=False)
        seconds = time.monotonic() - begun
        text = render_page("demo.html", parts=made, seconds=seconds, where=where())
        write_atomically(self.out, lambda file: file.write(text.encode()))
        console.print(f"Wrote {self.out} after {seconds:.0f} s; open it in a browser.")


def where() -> str:
    """What the page was made with."""
    return (
        f"arsm {arsm.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} processor cores"
    )
