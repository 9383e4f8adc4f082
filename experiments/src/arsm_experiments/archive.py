"""`arsm archive`: put run folders into the archives that results/ is made from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from arsm_experiments.runs.archive import (
    SUFFIX,
    Files,
    for_archive,
    in_tables,
    read_archive,
    read_folder,
    shortened,
    thinned,
    write_archive,
)
from arsm_experiments.runs.files import RunError, make_folder
from arsm_experiments.runs.reader import Record, make_record


@dataclass(frozen=True)
class Archive:
    """Add the run folders under ROOT to INTO/<experiment>.tar.xz, without their checkpoints; the
    folders stay.

    The same runs always make the same archive, byte for byte; numbers are cut to the digits, and
    finished trainings to the measurements, that tables and figures need.
    """

    root: Path = Path("runs")
    """Folder of the run folders."""
    into: Path = Path("results/runs")
    """Folder of the archives."""
    replace: bool = False
    """Replace archived runs of the same name; otherwise equal ones are skipped and different ones
    refused.
    """

    def check(self) -> None:
        """Refuse options that cannot run, before anything runs."""
        if not self.root.is_dir():
            raise ValueError(
                f"There is no folder {self.root}; point --root at the run folders to add."
            )

    def run(self, console: Console) -> None:
        """Read and check everything, then write each archive that changes."""
        found: dict[str, dict[str, Files]] = {}
        for path in sorted(self.root.glob("*/*/config.json")):
            files = for_archive(read_folder(path.parent))
            record = make_record(path.parent, files)
            found.setdefault(record.experiment, {})[record.name] = files | {
                "metrics.jsonl": kept_metrics(record)
            }
        if not found:
            raise RunError(
                f"There are no run folders under {self.root}; point --root at the run folders to "
                "add."
            )
        make_folder(self.into)
        merged = {experiment: self.merge(experiment, runs) for experiment, runs in found.items()}
        for experiment, runs in merged.items():
            archive = self.into / f"{experiment}{SUFFIX}"
            write_archive(archive, runs)
            console.print(
                f"Wrote {archive}: {len(runs)} runs, {len(found[experiment])} of them from "
                f"{self.root}."
            )

    def merge(self, experiment: str, runs: dict[str, Files]) -> dict[str, Files]:
        """The runs that the archive will hold."""
        archive = self.into / f"{experiment}{SUFFIX}"
        before: dict[str, Files] = dict(read_archive(archive)) if archive.is_file() else {}
        changed = [name for name in runs if name in before and runs[name] != before[name]]
        if changed and not self.replace:
            raise RunError(
                f"{archive} has other runs named {', '.join(changed)}; pass --replace to put these "
                "in their place."
            )
        return before | runs


def kept_metrics(record: Record) -> bytes:
    """Every other measurement of a finished training, and all of other runs, one seed after the
    other: a smooth series takes less room.
    """
    metrics = sorted(record.metrics, key=lambda line: line.get("seed", 0))
    epochs = record.config.get("epochs")
    if epochs is None:
        return shortened(metrics, in_tables(metrics))
    if not all(epochs in own.values() for own in record.by_seed("epoch").values()):
        # its best line in a table depends on how far other seeds have come
        return shortened(metrics, set(range(len(metrics))))
    metrics = thinned(metrics, in_tables(metrics), every=2 * record.config["measure_every"])
    return shortened(metrics, in_tables(metrics))
