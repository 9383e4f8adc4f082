"""Numbers on the agents' page are those of its tables."""

from __future__ import annotations

import csv

import pytest

from tests.experiments.statements import RESULTS, assert_said, rounds_to

COMPARED = ("the default", "PPO", "A2C", "MaskablePPO")
"""Columns of the agents' page that take part in its comparison."""


def test_the_agents_page_quotes_its_table() -> None:
    """Means, standard errors, seeds and the bold cells, from the better of sampled and likeliest actions."""
    with (RESULTS / "agents" / "table.csv").open() as file:
        lines = {(line["row"], line["metric"]): line for line in csv.DictReader(file)}
    text = (RESULTS / "agents" / "README.md").read_text().splitlines()
    header = next(line for line in text if line.startswith("| | the default |"))
    methods = [cell.strip() for cell in header.strip("|").split("|")][1:]
    rows, bold = text[text.index(header) + 2 :][:9], dict.fromkeys(methods, 0)
    for label, *quoted in ([cell.strip() for cell in row.strip("|").split("|")] for row in rows):
        found: dict[str, tuple[float, float, int]] = {}
        for method in methods:
            kinds = [lines.get((f"{label}: {method}", f"return, {kind}")) for kind in ("sampled", "likeliest")]
            if best := max(filter(None, kinds), key=lambda line: float(line["mean"]), default=None):
                seeds = int(best["seeds"])
                found[method] = float(best["mean"]), float(best["std"] or 0) / seeds**0.5, seeds
        first = max(found[method] for method in methods if method in found and method in COMPARED)
        for method, cell in zip(methods, quoted, strict=True):
            assert bool(cell) == (method in found), (label, method)
            if cell:
                mean, error, seeds = found[method]
                numbers = cell.strip("*").replace(" ±", "").replace("(", "").replace(")", "").split()
                assert rounds_to(mean, numbers[0]), f"{label}, {method}: {mean}"
                assert int(numbers[-1]) == seeds
                assert len(numbers) == 2 + (seeds > 1)
                assert seeds == 1 or rounds_to(error, numbers[1]), f"{label}, {method}: {error}"
                level = first[0] - mean <= (first[1] ** 2 + error**2) ** 0.5 and method in COMPARED
                assert cell.startswith("**") == level, (label, method)
                bold[method] += level
    assert bold["the default"] == 8
    assert_said("results/agents/README.md", "first or level with the first on eight of the nine rows")
    assert_said("CHANGELOG.md", "on eight of nine tasks")
    header = next(line for line in text if line.startswith("| | return, sampled actions | return, likeliest actions |"))
    for row in text[text.index(header) + 2 :][:2]:
        method, sampled, likeliest, reached, _ = (cell.strip() for cell in row.strip("|").split("|"))
        for kind, cell in (("sampled", sampled), ("likeliest", likeliest)):
            line = lines[f"LunarLander, 180 s: {method}", f"return, {kind}"]
            mean, error = cell.split(" ± ")
            assert rounds_to(float(line["mean"]), mean), (method, kind)
            assert rounds_to(float(line["std"]) / int(line["seeds"]) ** 0.5, error), (method, kind)
        solved = lines.get((f"LunarLander, 180 s: {method}", "CPU seconds until solved"))
        assert reached == f"{solved['seeds'] if solved else 0} of {line['seeds']}"
    line = lines["LunarLander, 1500 s: ARSM, budget 1,024", "return, sampled"]
    mean, error = float(line["mean"]), float(line["std"]) / int(line["seeds"]) ** 0.5
    said = f"The mean with sampled actions is {mean:.0f} with a standard error of {error:.0f}."
    assert_said("results/agents/README.md", said)


def test_the_agents_page_quotes_many_actions() -> None:
    with (RESULTS / "agents" / "many_actions.csv").open() as file:
        found = {(line["row"], line["metric"]): float(line["mean"]) for line in csv.DictReader(file)}
    text = (RESULTS / "agents" / "README.md").read_text().splitlines()
    header = next(line for line in text if line.startswith("| variance x steps / return |"))
    labels = [cell.strip() for cell in header.strip("|").split("|")][1:]
    rows = text[text.index(header) + 2 :][:6]
    for method, *quoted in ([cell.strip() for cell in row.strip("|").split("|")] for row in rows):
        for label, cell in zip(labels, quoted, strict=True):
            variance, value = cell.split(" / ")
            assert rounds_to(found[f"{label}: {method}", "return"], value), (label, method)
            mean = found[f"{label}: {method}", "variance x steps"]
            assert float(variance.replace(",", "")) == pytest.approx(mean, rel=0.05 if "e" in variance else 5e-4), (
                label,
                method,
            )
