"""Numbers in the sentences of results/ and of the README are those of the tables and runs."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import pytest

from arsm_experiments.report.chapters import Chapter
from arsm_experiments.report.control import seed_series
from arsm_experiments.report.sections import Result
from arsm_experiments.report.vae import AS_RELEASED
from arsm_experiments.runs.merge import merge_seeds
from arsm_experiments.runs.reader import Record

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
SPREAD = re.compile(r"(-?[\d.,]*\d)(?: \([^)]*\))? ± ([\d.]*\d)")
ELSEWHERE = {
    "conditional": {("58.3", "0.2"), ("61.5", "0.1"), ("59.3", "0.1")},  # the paper's, and those of an earlier commit
    # tested below
    "vae": {("88.49", "0.82"), ("88.54", "1.30"), ("80.9", "0.4"), ("81.9", "0.3"), ("78.7", "0.3")}
    | {("82.2", "0.4"), ("87.87", "0.36")},
}
"""Numbers with a spread that are in no table."""
COMPARED = ("the default", "PPO", "A2C", "MaskablePPO")
"""Columns of the agents' page that take part in its comparison."""


@pytest.fixture(scope="module")
def results(chapters: dict[str, Chapter]) -> dict[tuple[str, str], Result]:
    """Every result by its table's row, as "SECTION: ROW", and metric."""
    sections = [section for chapter in chapters.values() for section in chapter.sections]
    return {(f"{section.title}: {r.row}", r.metric): r for section in sections for r in section.results}


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


def test_the_black_boxes_page_quotes_its_table() -> None:
    found, quoted = means("maximize"), 0
    budgets = [(family, n) for family in ("pairwise", "MAX-SAT", "architecture") for n in ("1,000", "3,000", "10,000")]
    for label, values in cells("maximize", 9).items():
        known = {re.sub(r"[()]", "", row.partition(": ")[2]): row.partition(": ")[2] for row, _ in found}
        method = {"annealing, one chain, 16 neighbours at a time": "annealing, speculative"}.get(label, label)
        for (family, n), text in zip(budgets, values, strict=True):
            value = found.get((f"{family}: {known[method]}", f"best value after {n} evaluations"))
            assert (value is None) == (text == ""), (label, family, n)
            if value is not None:
                assert rounds_to(value, text), f"{label}, {family}, {n}: {value}"
                quoted += 1
    assert quoted == len(found)


def test_the_routers_page_quotes_its_table() -> None:
    found = means("router")
    by_label = {re.sub(r"[()]|Router: ", "", row): row for row, _ in found}
    rows = cells("router", 6)
    assert len(rows) == len(by_label)
    for label, (accuracy, *_, ms, ratio) in rows.items():
        row = by_label[label.replace("RLOO4 written by hand", "RLOO4 by hand")]
        assert rounds_to(found[row, "test accuracy"], accuracy.partition(" ")[0]), label
        if ms:
            value = found[row, "CPU ms per step"]
            assert rounds_to(value, ms.removesuffix(" ms")), label
            assert rounds_to(value / found["Router: RLOO(4) by hand", "CPU ms per step"], ratio), label


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


@pytest.mark.parametrize("experiment", ["toy", "vae", "conditional", "control"])
def test_numbers_with_a_spread_are_in_the_table(experiment: str) -> None:
    with (RESULTS / experiment / "table.csv").open() as file:
        known = [(float(row["mean"]), float(row["std"])) for row in csv.DictReader(file) if row["std"]]
    found = set(SPREAD.findall((RESULTS / experiment / "README.md").read_text()))
    assert found or experiment == "control"
    for mean, spread in found - ELSEWHERE.get(experiment, set()):
        assert any(rounds_to(m, mean) and rounds_to(s, spread) for m, s in known), f"{mean} ± {spread}"


def curves(record: Record, key: str) -> dict[int | None, list[float]]:
    return {seed: list(values.values()) for seed, values in record.by_seed(key).items()}


def runs_of(records: list[Record], experiment: str, label: str, group: str = "", **config: object) -> list[Record]:
    found = [r for r in records if (r.experiment, r.label, r.group) == (experiment, label, group)]
    return [r for r in found if all(r.config[key] == value for key, value in config.items())]


def test_arsm_beside_the_authors_log(records: list[Record]) -> None:
    runs = runs_of(records, "vae", "arsm", layers=1, rate=3e-4)
    (record,) = merge_seeds(runs, lambda r: r.label)
    epochs = curves(record, "epoch")[0]
    validation, train = curves(record, "validation"), curves(record, "train")
    assert len(validation) == 6

    def at(epoch: int) -> tuple[float, float]:
        place = epochs.index(epoch)
        return fmean(c[place] for c in train.values()), fmean(c[place] for c in validation.values())

    best = [min(curve) for curve in validation.values()]
    cells = [f"{x:.1f} / {y:.1f}" for x, y in map(at, (10, 100, 300))]
    last = f"{at(1000)[0]:.1f} / {at(1000)[1]:.2f}"
    row = f"| ours, mean of six seeds | {' | '.join(cells)} | {last} | {spread(best, '.2f')} |"
    assert_said("results/vae/README.md", row)
    above_last, above_best = at(1000)[1] - 87.15, fmean(best) - 86.65
    assert above_best > 2 * stdev(best)
    sentence = (
        f"Our last validation -ELBO is {above_last:.1f} nats above theirs and our best {above_best:.1f}, more than two"
    )
    assert_said("results/vae/README.md", sentence)


def test_differences_from_the_papers_vae_rows(results: dict[tuple[str, str], Result]) -> None:
    tests = {row: r for (row, metric), r in results.items() if metric == "test" and r.paper is not None}

    def gain(row: str) -> str:
        found = tests[f"VAE, {row}"]
        assert found.paper is not None
        return f"{found.paper - found.mean:.1f}"

    better = f"ARS is {gain('1 layer: ars')}, REINFORCE {gain('1 layer: reinforce')} and RELAX"
    assert_said("results/vae/README.md", f"{better} {gain('1 layer: relax')} nats better here")
    behind = tests["VAE, 1 layer: relax"].mean - tests["VAE, 1 layer: arsm"].mean
    assert_said("results/vae/README.md", f"and {behind:.1f} behind ARSM, for")
    assert_said("results/vae/README.md", f"reaches {tests['VAE, 1 layer: ar'].mean:.1f} where the paper has 135.0")


def best_epochs(record: Record) -> tuple[list[float], list[float]]:
    """Every seed's best validation, and the epochs at which they were, sorted."""
    validation, epochs = curves(record, "validation"), curves(record, "epoch")[0]
    best = [min(curve) for curve in validation.values()]
    return best, sorted(epochs[curve.index(low)] for curve, low in zip(validation.values(), best, strict=True))


def rises(record: Record) -> list[float]:
    """Every seed's last validation above its best."""
    return [curve[-1] - min(curve) for curve in curves(record, "validation").values()]


def listed(values: Iterable[float], form: str = ".1f") -> str:
    *first, last = (format(value, form) for value in values)
    return f"{', '.join(first)} and {last}"


def spread(values: Sequence[float], form: str) -> str:
    return f"{format(fmean(values), form)} ± {format(stdev(values), form)}"


def test_rows_of_the_first_vae_table_are_finished(records: list[Record]) -> None:
    text = (RESULTS / "vae" / "README.md").read_text()
    fresh = [r for r in records if (r.experiment, r.group) == ("vae", "fresh")]
    assert len(fresh) == text.partition("Validation selects the rate")[0].count(", fresh |") == 8
    assert all(end[-1] == 1000 for r in fresh for end in curves(r, "epoch").values())
    assert not any(re.search(r"\(\d+ epochs\)", row) for name in ("vae", "conditional") for row, _ in means(name))
    (ars,) = runs_of(records, "vae", "ars", "fresh")
    _, epochs = best_epochs(ars)
    assert_said(
        "results/vae/README.md", f"ARS has its best validation after {epochs[0]} to {epochs[-1]} of 1,000 epochs"
    )


def at_best(record: Record, key: str) -> list[float]:
    """The metric at every seed's best validation."""
    validation = curves(record, "validation")
    return [curve[validation[seed].index(min(validation[seed]))] for seed, curve in curves(record, key).items()]


@pytest.mark.parametrize(
    ("label", "rate", "words"),
    [
        ("arsm:pooled=True", 3e-4, "Pooled ARSM was"),
        ("25*gumbel-softmax", 1e-4, "Gumbel-Softmax with 25 samples was"),
        ("rloo:samples=46,live=1", 3e-4, "Leave-one-out REINFORCE with 46 samples was"),
        ("rloo:samples=10,live=1", 5e-4, "With 10 samples it was"),
    ],
)
def test_fresh_seeds_are_worse_than_the_one_that_chose(
    label: str, rate: float, words: str, records: list[Record]
) -> None:
    chose, fresh = (runs_of(records, "vae", label, group, layers=1, rate=rate) for group in ("", "fresh"))
    (chosen, *_), fresh_tests = at_best(chose[0], "test"), at_best(fresh[0], "test")
    assert fmean(fresh_tests) > chosen
    said = page("results/vae/README.md")
    assert f"{words} chosen at {chosen:.1f}, and the " in said
    assert f"fresh seeds reached {listed(fresh_tests)}." in said


def test_leave_one_out_overfits(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    labels = [f"rloo:samples={words}" for words in ("10,live=1", "46,live=1", "46,live=1,ridge=1.0")]
    epochs = [e for label in labels for e in best_epochs(*runs_of(records, "vae", label, "fresh"))[1]]
    ends, bests = (
        [results[f"VAE, 1 layer: {label}", metric].mean for label in labels] for metric in ("test, last epoch", "test")
    )
    arsm_end, arsm = (results["VAE, 1 layer: arsm", metric].mean for metric in ("test, last epoch", "test"))
    said = f"After {min(epochs)} to {max(epochs)} epochs it overfits: its validation -ELBO rises, and in the test it"
    above = f"ends {min(ends) - arsm_end:.0f} to {max(ends) - arsm_end:.0f} nats above ARSM"
    assert_said("results/vae/README.md", f"{said} {above}")
    assert max(bests) - arsm < 5
    recipes = [r.mean for (row, m), r in results.items() if row.startswith("VAE, 1 layer (recipe)") and m == "test"]
    said = f"is {arsm - max(recipes):.0f} to {max(bests) - min(recipes):.0f} nats below them"
    assert_said("results/vae/README.md", f"The recipe, which regularises, {said}")


def test_the_exact_gradient_of_the_kl(records: list[Record]) -> None:
    (record,) = runs_of(records, "vae", "arsm, kl analytic", "fresh")
    assert record.config["rate"] == 4e-4
    tests = [curve[-1] for curve in curves(record, "best_test").values()]
    epochs = [1 + curve.index(min(curve)) for curve in curves(record, "validation").values()]
    said = f"seeds reach {listed(tests)}, no better than with ln q inside f. Their best validation was at epochs"
    assert_said("results/vae/README.md", f"{said} {listed((10 * place for place in epochs), ',')}")


def test_25_straight_through_samples(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    (record,) = (r for r in records if r.experiment == "vae" and r.label.startswith("25*gumbel-softmax:hard=True"))
    found = {metric: results[f"VAE, 1 layer: {record.label}", metric] for metric in ("train", "test")}
    test, train = (f"{found[m].mean:.1f} ± {found[m].std:.1f} against {found[m].paper}" for m in ("test", "train"))
    apart = max(each.mean - each.paper for each in found.values() if each.paper is not None)
    said = f"within {apart:.1f} nats of the paper: {test} in the test, {train} in training"
    assert_said("results/vae/README.md", said)
    _, epochs = best_epochs(record)
    said = f"best after {epochs[0]} to {epochs[-1]} epochs and then rises by {min(rises(record)):.1f} to"
    assert_said("results/vae/README.md", f"{said} {max(rises(record)):.1f} nats until epoch 1,000")
    losses = list(curves(record, "train").values())
    lows, ends = sorted(min(curve) for curve in losses), sorted(curve[-1] for curve in losses)
    places = sorted(10 * (1 + curve.index(min(curve))) for curve in losses)
    said = f"after {places[0]} to {places[-1]} epochs, at {lows[0]:.1f} to {lows[-1]:.1f}, and ends at {ends[0]:.1f}"
    assert_said("results/vae/README.md", f"{said} to {ends[-1]:.1f}")


def test_one_straight_through_sample(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    label = f"gumbel-softmax:hard=True{AS_RELEASED}"
    (record,) = runs_of(records, "vae", label, "authors")
    assert curves(record, "epoch")[0][-1] == 1000
    one, many, ours = (
        results[f"VAE, 1 layer{row}", "test"]
        for row in (f" (authors): {label}", f": 25*{label}", ": gumbel-softmax:hard=True")
    )
    assert one.paper == 96.4
    said = f"reaches {one.mean:.1f} ± {one.std:.1f} in the test, {one.mean - 96.4:.1f} nats above the paper's 96.4"
    assert_said("results/vae/README.md", f"One sample with the authors' settings {said}")
    assert_said("results/vae/README.md", f"So 25 samples gain {one.mean - many.mean:.1f} nats (0.5 in the paper)")
    said = f"One sample with our settings is {one.mean - ours.mean:.1f} nats better than with theirs"
    assert_said("results/vae/README.md", said)
    _, epochs = best_epochs(record)
    said = f"best after {epochs[0]} to {epochs[-1]} epochs and then rises by {min(rises(record)):.1f} to"
    assert_said("results/vae/README.md", f"{said} {max(rises(record)):.1f} nats")


def test_two_layers_that_share_their_noise(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    (shared,) = runs_of(records, "vae", "arsm", layers=2, rate=1e-4)
    (fresh,) = runs_of(records, "vae", "arsm, first logit fixed False, afresh True", "algorithm2", layers=2)
    best, epochs = best_epochs(shared)
    assert_said(
        "results/vae/README.md", f"best after {epochs[0]} to {epochs[-1]} epochs, at {listed(best)} in validation"
    )
    said = f"and then rise by {min(rises(shared)):.1f} to {max(rises(shared)):.1f} nats until epoch 1,000"
    assert_said("results/vae/README.md", said)
    cells = f"{min(best):.1f} to {max(best):.1f}, {epochs[0]} to {epochs[-1]}"
    assert_said("results/vae/README.md", f"| best validation, at epoch | {cells} |")
    test = results["VAE, 2 layers: arsm", "test"]
    assert test.paper is None
    assert_said("results/vae/README.md", f"| test there | {min(test.values):.1f} to {max(test.values):.1f} |")
    above = test.mean - results[f"VAE, 2 layers (algorithm2): {fresh.label}", "test"].mean
    said = f"the test result, {test.mean:.1f} ± {test.std:.1f}, is {above:.1f} above that of Algorithm 2"
    assert_said("results/vae/README.md", said)
    less, more = (
        [fmean(seeds) for seeds in zip(*curves(run, "gradient_variance").values(), strict=True)]
        for run in (shared, fresh)
    )
    assert all(a < b for a, b in zip(less[5:], more[5:], strict=True))


RECIPE = "arsm:pooled=True, dropout 0.2, epochs {}, schedule cosine"


def test_the_recipe_with_two_layers(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    (record,) = (r for r in records if (r.experiment, r.group, r.config.get("layers")) == ("vae", "recipe", 2))
    assert curves(record, "epoch")[0][-1] == record.config["epochs"] == 800
    test = results[f"VAE, 2 layers (recipe): {record.label}", "test"]
    said = f"the three seeds reach {listed(test.values)} in the test after 800 epochs. Their mean, {test.mean:.1f}, is"
    below = f"{89.5 - test.mean:.1f} nats below the paper's 89.5"
    one = results["VAE, 1 layer: arsm", "test"].mean - test.mean
    assert_said("results/vae/README.md", f"{said} {below} and {one:.1f} below ARSM with one layer")
    single = results[f"VAE, 1 layer (recipe): {RECIPE.format(900)}", "test"]
    assert_said("results/vae/README.md", f"It is {test.mean - single.mean:.1f} above the same recipe with one layer")
    _, epochs = best_epochs(record)
    said = f"at epochs {listed(epochs, '.0f')}, and the last is at most {max(rises(record)):.1f} nats above it"
    assert_said("results/vae/README.md", said)


def test_two_layers_by_algorithm_2(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    label = "arsm, first logit fixed False, afresh True"
    (record,) = runs_of(records, "vae", label, "algorithm2", layers=2)
    test = results[f"VAE, 2 layers (algorithm2): {label}", "test"]
    assert test.paper == 89.5
    said = f"reach {test.mean:.1f} ± {test.std:.1f}, which is {test.mean - 89.5:.1f} above the paper's 89.5"
    assert_said("results/vae/README.md", said)
    best, epochs = best_epochs(record)
    assert curves(record, "epoch")[0][-1] == 1000
    said = (
        f"best after {epochs[0]} to {epochs[-1]} epochs, at {listed(best)}, and then rises by {min(rises(record)):.1f}"
    )
    assert_said("results/vae/README.md", f"{said} to {max(rises(record)):.1f} nats until epoch 1,000")


def test_two_layers_straight_through(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    learned = [r for r in records if r.experiment == "vae" and r.config.get("learned_temperature")]
    (record,) = (r for r in learned if r.config["layers"] == 2)
    test = results[f"VAE, 2 layers: {record.label}", "test"]
    assert test.paper == 98.3
    said = f"reaches {test.mean:.1f} ± {test.std:.1f}, {98.3 - test.mean:.1f} nats better than in the paper"
    assert_said("results/vae/README.md", said)
    _, epochs = best_epochs(record)
    said = f"Its validation is best after {epochs[0]} to {epochs[-1]} epochs and then rises"
    assert_said("results/vae/README.md", said)


def test_rates_of_the_recipe(records: list[Record]) -> None:
    runs = runs_of(records, "vae", RECIPE.format(900), "recipe", layers=1)
    assert [r.config["rate"] for r in runs] == [5e-4, 8e-4, 1e-3]

    def cells(found: list[list[float]]) -> str:
        return " | ".join(spread(seeds, ".1f") for seeds in found)

    train = [at_best(run, "train") for run in runs]
    test = [[curve[-1] for curve in curves(run, "best_test").values()] for run in runs]
    assert_said("results/vae/README.md", f"| train, with dropout | {cells(train)} |")
    assert_said("results/vae/README.md", f"| test | {cells(test)} |")


TRIALS = {
    "unchanged (encoder dropout 0.2)": {},
    "weight decay 0.03": {"weight_decay": 0.03},
    "weight decay 0.1": {"weight_decay": 0.1},
    "weight decay 0.3": {"weight_decay": 0.3},
    "encoder dropout 0.3": {"dropout": 0.3},
    "encoder dropout 0.4": {"dropout": 0.4},
    "input dropout 0.1": {"input_dropout": 0.1},
    "input dropout 0.2": {"input_dropout": 0.2},
    "decoder dropout 0.1": {"decoder_dropout": 0.1},
    "decoder dropout 0.2": {"decoder_dropout": 0.2},
    "encoder dropout 0.3, input dropout 0.1, weight decay 0.1": {
        "dropout": 0.3,
        "input_dropout": 0.1,
        "weight_decay": 0.1,
    },
    "encoder dropout 0.3, decoder dropout 0.1, weight decay 0.1": {
        "dropout": 0.3,
        "decoder_dropout": 0.1,
        "weight_decay": 0.1,
    },
    "encoder dropout 0.3, input and decoder dropout 0.1, weight decay 0.1": {
        "dropout": 0.3,
        "input_dropout": 0.1,
        "decoder_dropout": 0.1,
        "weight_decay": 0.1,
    },
}
"""What each trial of the recipe changes."""


def test_trials_of_the_recipe(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    runs = [r for r in records if (r.experiment, r.group) == ("vae", "trials")]
    assert len(runs) == len(TRIALS)
    found: dict[str, tuple[float, float]] = {}
    for name, changes in TRIALS.items():
        config = {"dropout": 0.2, "input_dropout": 0.0, "decoder_dropout": 0.0, "weight_decay": 0.0} | changes
        (run,) = (r for r in runs if all(r.config[key] == value for key, value in config.items()))
        assert (run.config["rate"], run.config["seeds"], curves(run, "epoch")[0][-1]) == (8e-4, [0], 600)
        found[name] = min(curves(run, "validation")[0]), curves(run, "best_test")[0][-1]
        assert_said("results/vae/README.md", f"| {name} | {found[name][0]:.1f} | {found[name][1]:.1f} |")
    assert min(found, key=lambda name: found[name]) == "weight decay 0.03"
    decayed, plain = found["weight decay 0.03"][1], found["unchanged (encoder dropout 0.2)"][1]
    worse = [validation for name, (validation, _) in found.items() if "dropout" in name and "unchanged" not in name]
    assert min(worse) > found["unchanged (encoder dropout 0.2)"][0] + 1
    label = f"{RECIPE.format(600)}, weight decay 0.03"
    (fresh,) = runs_of(records, "vae", label, "recipe")
    assert fresh.config["seeds"] == [1, 2, 3]
    won, long = (results[f"VAE, 1 layer (recipe): {words}", "test"] for words in (label, RECIPE.format(900)))
    said = f"three new seeds, 1 to 3, reach {listed(won.values)} in the test, with a mean of {won.mean:.1f}.**"
    errors = (long.mean - won.mean) / math.hypot(*(stdev(each.values) / math.sqrt(3) for each in (won, long)))
    below = f"That is {long.mean - won.mean:.1f} nats below the recipe with 900 epochs and no weight decay"
    assert_said("results/vae/README.md", f"{said} {below} ({errors:.1f} standard errors)")
    apart = max(won.values) - min(won.values)
    said = f"weight decay alone gains {plain - decayed:.1f} nats, but seeds of one setting differ by up to {apart:.1f}"
    assert_said("results/vae/README.md", said)
    assert_said("results/vae/README.md", f"has only one seed with 600 epochs, {plain:.1f}.")


CLOCKED = (
    ("arsm", "", "ARSM", 4e-4),
    ("arsm:pooled=True", "fresh", "pooled ARSM", 3e-4),
    ("rloo:samples=46,live=1", "fresh", "leave-one-out REINFORCE, 46 samples", 3e-4),
    ("25*gumbel-softmax", "fresh", "Gumbel-Softmax, 25 samples", 1e-4),
    (
        f"25*gumbel-softmax:hard=True{AS_RELEASED}",
        "",
        "straight-through Gumbel-Softmax, 25 samples, learned temperature",
        3e-4,
    ),
    ("gumbel-softmax:hard=True", "", "straight-through Gumbel-Softmax", 3e-4),
    ("relax", "", "RELAX", 5e-4),
    ("ars", "fresh", "ARS", 2e-4),
    ("reinforce", "", "REINFORCE", 1e-4),
)
"""Labels, groups, names and rates of the rows whose time per step was measured alone on the GPU."""
STEPS_PER_EPOCH = 275


def clocked_rows(records: list[Record]) -> list[str]:
    """Validation -ELBO after so many seconds of steps, from the time of one step and the runs' records."""
    lines = (RESULTS / "vae" / "step_times.jsonl").read_text().splitlines()
    times = {line["label"]: line["milliseconds"] for line in map(json.loads, lines)}
    rows = []
    for label, group, name, rate in CLOCKED:
        (record,) = merge_seeds(runs_of(records, "vae", label, group, layers=1, rate=rate), lambda r: r.label)
        whole = times[label] * 1e-3 * STEPS_PER_EPOCH * 1000
        found = []
        for seconds in (10, 20, 40):
            place = int(100 * seconds / whole) - 1  # measured every ten epochs
            found.append(fmean(curve[place] for curve in curves(record, "validation").values()))
        cells = " | ".join(f"{value:.1f}" for value in found)
        rows.append(f"| {name} | {times[label]:.2f} | {whole:.0f} | {cells} |")
    return rows


def test_validation_by_seconds_alone_on_the_gpu(records: list[Record]) -> None:
    for row in clocked_rows(records):
        assert_said("results/vae/README.md", row)
    lines = map(json.loads, (RESULTS / "vae" / "step_times.jsonl").read_text().splitlines())
    times = {line["label"]: line["milliseconds"] for line in lines}
    relaxed, straight = (times[f"25*gumbel-softmax{more}"] / times["arsm"] for more in ("", f":hard=True{AS_RELEASED}"))
    said = f"25 samples take {relaxed:.1f} times ARSM's time, and {straight:.1f} times as the authors train them"
    assert_said("results/vae/README.md", said)


def test_what_bfloat16_costs(records: list[Record]) -> None:
    def lows(group: str, rate: float) -> list[float]:
        runs = runs_of(records, "vae", "arsm", group, layers=1, rate=rate)
        assert {run.config["precision"] for run in runs} == {group or "bf16"}
        assert all(curve[-1] == 1000 for run in runs for curve in curves(run, "epoch").values())
        return [min(curve) for run in runs for curve in curves(run, "validation").values()]

    def worse(one: list[float], other: list[float]) -> tuple[float, float]:
        """By how much one is above the other, and in standard errors."""
        above = fmean(one) - fmean(other)
        return above, above / math.hypot(*(stdev(each) / math.sqrt(len(each)) for each in (one, other)))

    bf16, tf32, float32 = ([lows(group, rate) for rate in (3e-4, 4e-4)] for group in ("", "tf32", "float32"))
    names = ("f at pseudo samples in bfloat16, six seeds", "TF32, three seeds", "float32, three seeds")
    for name, found in zip(names, (bf16, tf32, float32), strict=True):
        assert_said("results/vae/README.md", f"| {name} | {' | '.join(spread(each, '.2f') for each in found)} |")
    lowest = min(bf16[0] + tf32[0] + float32[0])
    assert lowest in tf32[0]
    assert_said("results/vae/README.md", f"The best of all twelve seeds at this rate reached {lowest:.2f}, in TF32")
    low, low_errors = worse(float32[0], bf16[0])
    high, high_errors = worse(float32[1], bf16[1])
    said = f"At 3e-4, float32 is {-low:.1f} nats better than bfloat16 ({-low_errors:.1f} standard errors), and still"
    said = f"{said} {fmean(float32[0]) - 86.65:.1f} above the authors' best. At 4e-4 it is {high:.1f} worse"
    assert_said("results/vae/README.md", f"{said} ({high_errors:.1f} standard errors).")
    assert abs(worse(tf32[0], bf16[0])[0]) < 0.1
    above, errors = worse(tf32[1], bf16[1])
    assert_said("results/vae/README.md", f"At 4e-4 TF32 is {above:.1f} nats worse, {errors:.1f} standard errors.")
    above, errors = worse(tf32[1], float32[1])
    said = f"lies between them, {above:.1f} below TF32 ({errors:.1f} standard errors)"
    assert_said("results/vae/README.md", said)


def test_two_layers_as_released(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    (record,) = (r for r in records if r.experiment == "vae" and r.config.get("as_released"))
    best, epochs = best_epochs(record)
    assert curves(record, "epoch")[0][-1] == 1000
    said = f"validation is best after {epochs[0]} to {epochs[-1]} epochs, at {listed(best)}, and then rises"
    assert_said("results/vae/README.md", said)
    test = results[f"VAE, 2 layers (as-released): {record.label}", "test"]
    assert_said("results/vae/README.md", f"reach {test.mean:.1f} ± {test.std:.1f} in the test")


def test_the_variance_of_ar(records: list[Record]) -> None:
    ratios = []
    for seed in (0, 1, 2):
        ar, reinforce = (
            next(r for r in runs_of(records, "vae", words, layers=1, rate=1e-4) if seed in r.config["seeds"])
            for words in ("ar", "reinforce")
        )
        ratios.append(curves(ar, "gradient_variance")[seed][-1] / curves(reinforce, "gradient_variance")[seed][-1])
    assert [round(ratio, -2) for ratio in ratios] == [400, 600, 2900]
    assert_said("results/vae/README.md", "and 400, 600 and 2,900 times at the end, by seed")


def test_the_log_variances_of_acrobot(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    methods = {
        "ARSM": "arsm, adam 0.01, entropy 0.01",
        "A2C": "a2c, rmsprop 0.01, entropy 0.01",
        "REINFORCE": "reinforce, rmsprop 0.003, entropy 0.01",
        "RELAX": "relax, adam 0.01, entropy 0.01",
    }
    ends, wholes = [], []
    for row in methods.values():
        result = results[f"Acrobot-v1: {row}", "log variance"]
        wholes.append(f"{result.mean:.1f}")
        ends.append(fmean(s["log_variance"][-1] for s in seed_series(result.record, "log_variance")))
    a, b, c, d = (f"{end:.1f}" for end in ends)
    said = f"is {a} for ARSM, {b} for A2C, {c} for REINFORCE and {d} for RELAX at the end of the runs"
    assert_said("results/control/README.md", said)
    assert_said(
        "results/control/README.md", f"as `table.csv` has it, {wholes[0]}, {wholes[1]}, {wholes[2]} and {wholes[3]}."
    )


def test_arsm_on_acrobot_with_the_papers_settings(results: dict[tuple[str, str], Result]) -> None:
    final = results["Acrobot-v1: arsm, adam 0.01, entropy 0.01", "final average"]
    assert sum(value < -400 for value in final.values) == 3
    assert_said("README.md", "On Acrobot it fails on three of ten seeds.")
    assert_said("results/control/README.md", f"its mean at {final.mean:.0f} ± {final.std:.0f}: seven seeds pass -100")


def test_arsm_on_cartpole(results: dict[tuple[str, str], Result]) -> None:
    row = "CartPole-v0: arsm, rmsprop 0.03"
    final, episodes = results[row, "final average"], sorted(results[row, "episodes to the line"].values)
    assert (len(episodes), len(final.values), final.record.config["episodes"]) == (9, 10, 500)
    soon = f"seven of them after {episodes[0]:.0f} to {episodes[6]:.0f} episodes"
    late = f"two after {episodes[7]:.0f} and {episodes[8]:.0f}"
    said = page("results/control/README.md")
    assert "passes 195 on 9 of 10 seeds" in said
    assert soon in said
    assert late in said
    assert f"a mean of {final.mean:.0f} ± {final.std:.0f}. One seed stays at {min(final.values):.0f}." in said
    assert_said("README.md", "On CartPole it fails on one of ten seeds.")
    others = [r.mean for (name, metric), r in results.items() if name.startswith("CartPole-v0: ") and metric == "steps"]
    assert len(others) == 5
    assert sorted(others)[-2] < max(others) / 8
    assert max(others) == results[row, "steps"].mean


def test_who_ends_on_the_best_category_of_the_toy(records: list[Record]) -> None:
    def winners(label: str) -> int:
        (run,) = runs_of(records, "toy", label, categories=30)
        return sum(curve[-1] > 0.5 for curve in curves(run, "probability_last").values())

    assert [winners(label) for label in ("arsm", "rloo", "gumbel-softmax:temperature=0.2")] == [10, 10, 9]
    assert_said("results/toy/README.md", f"above one half on the best category on {winners('ars')} of 10 seeds")
    assert winners("reinforce") == 2
    assert_said("results/toy/README.md", "On two of ten seeds REINFORCE happened to settle on the best category")


SCALED = {1000: "C = 1,000, step 33.33", 10000: "C = 10,000, step 333.3"}
"""The toy's sections with the scaled step."""


def test_the_toy_with_many_categories(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    def result(categories: int, label: str, metric: str) -> Result:
        found = results[f"Toy, {SCALED[categories]}: {label}", metric]
        assert len(found.values) == 10
        return found

    gumbel = "gumbel-softmax:temperature=0.2"
    for categories in SCALED:
        ratios = (
            result(categories, label, "variance / arsm's at the start").mean
            for label in ("rloo", gumbel, "ars", "reinforce", "relax", "ar")
        )
        cells = " | ".join(re.sub(r"e\+0?", "e", f"{ratio:.1e}") for ratio in ratios)
        assert_said("results/toy/README.md", f"| {categories:,} | {cells} |")
    gaps = [result(categories, "arsm", "gap / true gap") for categories in SCALED]
    said = f"{gaps[0].text} times the true gradient's at C = 1,000 and {gaps[1].text} times at C = 10,000"
    assert_said("results/toy/README.md", said)
    calls = [result(categories, "arsm", "f calls an update").mean for categories in SCALED]
    assert_said("results/toy/README.md", f"{calls[0]:,.0f} and {calls[1]:,.0f} per update on average")
    large = [r for r in records if r.experiment == "toy" and r.config["categories"] == 10000 and r.config["step"] > 1]
    winners = {r.label for r in large for curve in curves(r, "probability_last").values() if curve[-1] > 0.5}
    assert winners == {"true gradient"}
    assert_said("results/toy/README.md", "only the true gradient ends with a probability above one half on the best")


def test_evaluations_beside_the_readmes_first_figure(results: dict[tuple[str, str], Result]) -> None:
    calls = {words: results[f"Toy, C = 30, step 1: {words}", "f calls an update"].mean for words in ("arsm", "rloo")}
    assert all(results[f"Toy, C = 30, step 1: {w}", "f calls an update"].mean == 1 for w in ("reinforce", "relax"))
    sentence = f"It evaluates f {calls['arsm']:.1f} times per update, REINFORCE and RELAX once, leave-one-out REINFORCE"
    assert_said("README.md", f"{sentence} {calls['rloo']:.1f} times.")


def test_conditional_arsm_passes_the_paper_by_three_changes(results: dict[tuple[str, str], Result]) -> None:
    start = results["Conditional MNIST (mean): arsm, pixel bias mean", "test, 1,000 samples"]
    tuned = results["Conditional MNIST (mean-long): arsm, schedule cosine, pixel bias mean", "test, 1,000 samples"]
    assert tuned.record.config["rate"] == pytest.approx(10 * start.record.config["rate"])
    said = f"with three changes together: {tuned.mean:.1f} ± {tuned.std:.1f}.** They are the start, ten times the rate"
    assert_said("results/conditional/README.md", said)
    assert_said("results/conditional/README.md", f"the start alone gives {start.mean:.1f}")
    muprop, pooled = (
        results[f"Conditional MNIST (mean): {words}, epochs 500, schedule cosine, pixel bias mean", start.metric].mean
        for words in ("muprop", "arsm:pooled=True")
    )
    said = f"and 500 epochs, it reaches {muprop:.1f}, {muprop - pooled:.1f} behind pooled ARSM"
    assert_said("results/conditional/README.md", said)
    assert tuned.mean < 58.3 < start.mean
    assert_said(
        "results/README.md", "with ten times its rate, a cosine schedule and biases that start from the mean image"
    )


def test_no_number_of_the_paper_that_it_does_not_have(results: dict[tuple[str, str], Result]) -> None:
    plain = results["Conditional MNIST: gumbel-softmax", "test, 1,000 samples"]
    sampled = results["Conditional MNIST (sampled): gumbel-softmax, sampled pixels True", "test, 1,000 samples"]
    assert plain.paper is None
    assert_said("results/conditional/README.md", f"A difference of that size, {sampled.mean - plain.mean:.1f} nats")
