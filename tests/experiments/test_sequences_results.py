"""The published table of sequences is what its records say, and the page quotes it."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from arsm_experiments.sequences.curves import crossing
from arsm_experiments.sequences.measure import EVERY
from arsm_experiments.sequences.methods import add_line, read_lines
from arsm_experiments.sequences.publish import TASKS, pack, runs, unpack, write_table
from arsm_experiments.sequences.schedule import SETTINGS

RESULTS = Path(__file__).parents[2] / "results" / "sequences"


def test_the_table_is_made_from_the_records(tmp_path: Path) -> None:
    unpack(RESULTS / "records.tar.xz", tmp_path)
    write_table(tmp_path, tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_bytes() == (RESULTS / "table.csv").read_bytes()


def test_packed_records_are_the_same_records(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    unpack(RESULTS / "records.tar.xz", first)
    pack(first, tmp_path / "records.tar.xz")
    unpack(tmp_path / "records.tar.xz", second)
    files = [path.relative_to(first) for path in sorted(first.rglob("*.json*"))]
    assert files == [path.relative_to(second) for path in sorted(second.rglob("*.json*"))]
    assert all((first / file).read_text() == (second / file).read_text() for file in files)


def test_a_run_that_was_cut_short_and_made_again_is_packed_once(tmp_path: Path) -> None:
    run = {"start": 0.1, "method": "likeliest", "per_update": 400, "rate": 1e-3, "seed": 1}
    for update, accuracy, end in ((0, 0.1, False), (5, 0.2, False), (0, 0.1, False), (5, 0.3, True)):
        record = run | {"update": update, "accuracy": accuracy, "seconds": 1.23456, "end": end}
        add_line(tmp_path / "curves-spiral_matrix.jsonl", record)
    (tmp_path / "provenance.json").write_text("{}")
    pack(tmp_path, tmp_path / "records.tar.xz")
    unpack(tmp_path / "records.tar.xz", tmp_path / "second")
    packed = read_lines(tmp_path / "second" / "curves-spiral_matrix.jsonl")
    assert [(record["accuracy"], record["seconds"]) for record in packed] == [(0.1, 1.2), (0.3, 1.2)]


def test_only_the_size_and_rate_that_seed_0_chose_are_published(tmp_path: Path) -> None:
    def add(size: int, seed: int, accuracies: tuple[float, ...]) -> None:
        for number, accuracy in enumerate(accuracies):
            record = {"start": 0.1, "method": "likeliest", "per_update": size, "rate": 1e-3, "seed": seed}
            record |= {"update": 5 * number, "tokens": size * number, "accuracy": accuracy, "seconds": number}
            add_line(tmp_path / "curves-spiral_matrix.jsonl", record | {"end": number == len(accuracies) - 1})

    add(400, 0, (0.1, 0.75, 0.3))
    add(2000, 0, (0.1, 0.97))
    add(400, 1, (0.1, 0.5))
    add(400, 1, (0.1, 0.9, 0.95))  # once more from the start
    add(2000, 1, (0.1, 0.99))
    found = runs(tmp_path, "spiral_matrix", 0.1, 0.7)
    assert [record["accuracy"] for record in found["likeliest"][1]] == [0.1, 0.9, 0.95]
    assert crossing(found["likeliest"][1], 0.5) == (200.0, 0.5)
    found = runs(tmp_path, "spiral_matrix", 0.1, 0.9)
    assert [record["accuracy"] for record in found["likeliest"][1]] == [0.1, 0.99]


def quoted(pattern: str) -> list[tuple[tuple[str, ...], str, str]]:
    """The page's table cells of rows whose first cell matches: that cell's groups, the column's task, the cell."""
    found, tasks = [], []
    for line in (RESULTS / "README.md").read_text().splitlines():
        first, *cells = (cell.strip(" *") for cell in line.strip("|").split("|"))
        if cells and set(cells) <= set(TASKS):
            tasks = [TASKS[cell] for cell in cells]
        elif matched := re.fullmatch(pattern, first):
            found += [(matched.groups(), task, cell) for task, cell in zip(tasks, cells, strict=True)]
    return found


def published(pattern: str) -> dict[tuple[str, ...], float]:
    """The table's means whose row and metric, joined by a colon, match."""
    rows = csv.DictReader((RESULTS / "table.csv").read_text().splitlines())
    matches = ((re.fullmatch(pattern, f"{row['row']}: {row['metric']}"), row["mean"]) for row in rows)
    return {matched.groups(): float(mean) for matched, mean in matches if matched}


def test_the_page_quotes_variances() -> None:
    metric = r"(trace x tokens / best group|the same, fresh prompts)"
    found = published(r"(\w+), accuracy \S+ \(level (\S+)\), (.*): " + metric)
    cells = quoted(r"(0\.\d+), `(.*)`(, fresh prompts)?")
    assert len(cells) >= 40
    for (level, method, fresh), task, cell in cells:
        value = found.get((task, level, method, "the same" + fresh if fresh else "trace x tokens / best group"))
        assert cell == ("not measured" if value is None else f"{value:.2g}"), (task, level, method)


def test_the_page_quotes_every_estimator_on_a_cpu() -> None:
    """Each with its standard error; the best group is 1 and has none, and what is scaled is shown without."""
    found = published(r"on a CPU, spell_backward, accuracy \S+ \(level (\S+)\), (.*): (.*)")
    plain, scaled = "trace x tokens / best group", "the same, scaled to the gradient's length"
    page = (RESULTS / "README.md").read_text()
    lines = page.partition("| on a CPU | 0.1 | 0.45 | 0.8 |\n")[2].partition("\n\n")[0].splitlines()[1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [name.strip("`") for name, *_ in rows if not name.endswith(", scaled")] == list(EVERY)
    for first, *cells in rows:
        name, metric = first.removesuffix(", scaled").strip("`"), scaled if first.endswith(", scaled") else plain
        for level, cell in zip(("0.1", "0.45", "0.8"), cells, strict=True):
            error = found[level, name, "its standard error"] if metric == plain else 0
            assert cell == f"{found[level, name, metric]:.2g}" + (f" ± {error:.1g}" if error else ""), (name, level)

    def bounds(name: str, metric: str, other: str, power: float = 1) -> str:
        pairs = ((found[level, name, plain], found[level, other, metric]) for level in ("0.1", "0.45", "0.8"))
        ratios = [(mine / theirs) ** power for mine, theirs in pairs]
        return f"{min(ratios):.2g} to {max(ratios):.2g} times"

    page = " ".join(page.split())
    for name in ("branch arsm", "branch arsm, 4 references", "branch 4 exact, 2 sampled"):
        assert f"needs {bounds(name, plain, 'branch rloo 16')} the tokens of `branch rloo 16`" in page, name
    assert f"{bounds('grpo 8', scaled, 'grpo 8', 0.5)} as long" in page


def test_the_page_quotes_tokens() -> None:
    """Thousands of tokens; a dash where not every seed got there."""
    found = published(r"(\w+), from (\S+), (.*), updates of \d+, rate \S+: tokens to (\S+)")
    cells = quoted(r"from (0\.\d+) to (0\.\d+), `(.*)`")
    assert len(cells) >= 40
    for (start, level, method), task, cell in cells:
        value = found.get((task, start, method, level))
        assert cell == ("-" if value is None else f"{value / 1000:.3g}"), (task, start, level, method)


def test_the_page_quotes_ratios() -> None:
    """Tokens relative to the best rival's; a dash where no rival got there with every seed."""
    seeds = "(, slowest seed / fastest seed)?"
    found = published(rf"(\w+), from (\S+), (.*): tokens to (0\.\d+) / best rival{seeds}")
    cells = quoted(rf"`(.*)` / best rival, (0\.\d+){seeds}")
    assert len(cells) >= 40
    for (method, level, which), task, cell in cells:
        value = found.get((task, "0.1", method, level, which))
        assert cell == ("-" if value is None else f"{value:.2g}"), (task, level, method)


def test_the_page_quotes_choices_finished_seeds_and_seconds() -> None:
    chosen, seconds = {}, {}
    for row in csv.DictReader((RESULTS / "table.csv").read_text().splitlines()):
        if matched := re.fullmatch(r"(\w+), from 0\.1, (.*), updates of (\d+), rate (\S+)", row["row"]):
            task, method, size, rate = matched.groups()
            if task in SETTINGS and row["metric"].startswith("last accuracy, to "):
                goal = row["metric"].removeprefix("last accuracy, to ")
                chosen[task, method, goal] = f"{size}, {rate}; {row['seeds']} of {len(SETTINGS[task].seeds)}"
            seconds[task, method, row["metric"].removeprefix("tokens to ")] = row["seconds"]
    cells = quoted(r"chosen to (0\.\d+), `(.*)`")
    assert len(cells) >= 40
    for (goal, method), task, cell in cells:
        assert cell == chosen.get((task, method, goal), "-"), (task, method, goal)
    cells = quoted(r"seconds to (0\.\d+), `(.*)`")
    assert len(cells) >= 20
    for (goal, method), task, cell in cells:
        assert cell == seconds.get((task, method, goal), "-"), (task, method, goal)
