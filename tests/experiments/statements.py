"""What tests of published statements share: pages, tables and runs as a sentence quotes them."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from arsm_experiments.runs.reader import Record

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


def page(name: str) -> str:
    """A page as one line."""
    return " ".join((ROOT / name).read_text().split())


def rounds_to(value: float, text: str) -> bool:
    """Whether the number was printed from the value, to as many digits as it has."""
    decimals = len(text.partition(".")[2])
    return abs(value - float(text.replace(",", ""))) <= 0.5001 * 10**-decimals


def assert_said(name: str, sentence: str) -> None:
    assert " ".join(sentence.split()) in page(name), f"{name} should say: {sentence}"


def means(experiment: str) -> dict[tuple[str, str], float]:
    """A table's means by row and metric."""
    with (RESULTS / experiment / "table.csv").open() as file:
        return {(row["row"], row["metric"]): float(row["mean"]) for row in csv.DictReader(file)}


def cells(experiment: str, count: int) -> dict[str, list[str]]:
    """The rows of a page's tables with so many cells after the label, as plain text."""
    lines = (line.strip("|").split("|") for line in (RESULTS / experiment / "README.md").read_text().splitlines())
    rows = ([re.sub(r"[*`()]", "", cell).strip() for cell in line] for line in lines if len(line) == 1 + count)
    return {label: values for label, *values in rows if label and "--" not in label}


def curves(record: Record, key: str) -> dict[int | None, list[float]]:
    return {seed: list(values.values()) for seed, values in record.by_seed(key).items()}


def runs_of(records: list[Record], experiment: str, label: str, group: str = "", **config: object) -> list[Record]:
    found = [r for r in records if (r.experiment, r.label, r.group) == (experiment, label, group)]
    return [r for r in found if all(r.config[key] == value for key, value in config.items())]
