"""The pages as the runs that were added last to the VAE and to half a digit arrive, with made-up
numbers.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from arsm_experiments.conditional import Conditional
from arsm_experiments.plans import (
    FULL,
    algorithm2,
    algorithm2_fresh,
    conditional_sampled,
    free_logits,
    free_logits_fresh,
    one_layer_fresh,
    precision,
    two_layers,
    two_layers_fresh,
)
from arsm_experiments.report.conditional import conditional_sections
from arsm_experiments.report.pages import conditional, paper, remake, vae
from arsm_experiments.report.pages.tables import Tables
from arsm_experiments.report.sections import results_csv
from arsm_experiments.report.vae import vae_sections
from arsm_experiments.runs.reader import Record, read_runs
from arsm_experiments.training.options import Training
from arsm_experiments.vae import Vae
from tests.experiments import training_runs

ROOT = Path(__file__).parents[2]
write_run = partial(training_runs.write_run, train_gap=-7.0, evaluations=40.0)
AT_END = {"vae": {"best_test": 0.5, "bound": -10.0}, "conditional": {"best_test": 0.5}}


ADDED = (
    "two-layers",
    "two-layers-fresh",
    "free-logits",
    "free-logits-fresh",
    "one-layer-fresh",
    "precision-fresh",
)
"""Groups of runs that were added last."""
ADDED_RUNS = (
    *(f"algorithm2-2layer-arsm-rate{rate:g}" for rate in algorithm2.rates),
    "recipe-1layer-rloo-samples=46-live=1-rate0.0008-dropout0.2-seed-1-decay0.03",
    "sampled-rloo-samples=46-live=1-rate0.0001-seed-2",
)
SECTIONS = {"vae": vae_sections, "conditional": conditional_sections}
KIND = {"vae": Vae, "conditional": Conditional}


def made_up(
    root: Path,
    planned: Training,
    name: str,
    epochs: Sequence[int] | None = None,
    least: float = 0.0,
) -> Record:
    """A run of one of its folders, finished unless `epochs` end earlier; seeds differ by a tenth of
    a nat, and the rate nearest to `least` is the best.
    """
    folders = {folder.name: config for folder, config in planned.runs().items()}
    own = folders[name]
    one = replace(planned, rates=(own["rate"],), dropouts=(own["dropout"],))
    best = 80 + 1e3 * abs(own["rate"] - least)
    validation = [[best + 30, best + 5, best + 0.1 * place] for place in range(len(one.seeds))]
    return write_run(root, one, validation, epochs, at_end=AT_END[planned.experiment])


def all_of(root: Path, planned: Training, epochs: Sequence[int] | None = None) -> list[Record]:
    """All run folders of a command."""
    return [made_up(root, planned, path.name, epochs) for path in planned.runs()]


def chosen_rate(planned: Training) -> float:
    """The rate at which a grid's fresh seeds are planned; 0 without any."""

    def setting(each: Training) -> tuple[object, ...]:
        names = ("estimator", "layers", "first_logit_fixed", "afresh")
        return each.experiment, *(getattr(each, name, None) for name in names)

    fresh = (
        each
        for each in FULL
        if isinstance(each, Training) and each.name in ADDED and len(each.rates) == 1
    )
    return next((each.rates[0] for each in fresh if setting(each) == setting(planned)), 0.0)


@pytest.fixture(scope="module")
def known() -> list[Record]:
    """The archived runs without those that were added last."""
    return [
        record
        for record in read_runs(ROOT / "results" / "runs")
        if record.experiment in KIND and record.group not in ADDED and record.name not in ADDED_RUNS
    ]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory, known: list[Record]) -> Path:
    """results/ with these runs alone."""
    return pages(tmp_path_factory.mktemp("earlier"), known, [])


def pages(folder: Path, known: Sequence[Record], new: Sequence[Record]) -> Path:
    """results/ with these runs, and its pages made again."""
    results = folder / "results"
    shutil.copytree(ROOT / "results", results, ignore=shutil.ignore_patterns("*.png"))
    for experiment, sections in SECTIONS.items():
        own = [record for record in (*known, *new) if record.experiment == experiment]
        (results / experiment / "table.csv").write_text(results_csv(sections(own)))
    remake(results)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, known: list[Record]) -> Path:
    """results/ with all planned runs."""
    folder = tmp_path_factory.mktemp("everything")
    names = {record.name for record in known}
    new = [
        made_up(folder, each, path.name, least=chosen_rate(each))
        for each in FULL
        # a short run serves the comparison's checkpoint alone
        if isinstance(each, Training) and each.name != "short"
        for path in each.runs()
        if path.name not in names
    ]
    return pages(folder, known, new)


def test_every_row_of_the_pages_is_there(results: Path) -> None:
    tables = Tables(results)
    early = {name for name, row in vae.ROWS.items() if re.search(r"epochs (460|850)$", row)}
    assert len(early) == 2
    assert vae.ran(tables, vae.ROWS).keys() == vae.ROWS.keys() - early
    assert all(conditional.sampled(tables, words) for words in conditional.JANG)
    assert conditional.sampled(tables, "arsm")
    assert conditional.sampled(tables, "rloo:samples=46,live=1")


def test_no_seed_of_the_vaes_table_chose_its_rate(results: Path) -> None:
    tables = Tables(results)
    assert "*" not in vae.table(tables)
    assert "TF32" not in vae.table(tables)
    assert vae.arsm_rows(tables).keys() == {"ARSM, f in bfloat16", "ARSM, float32"}
    assert vae.all_arsm(tables).seeds == 12
    told = {claim.claim: claim for claim in paper.claims(tables) if claim.task == "VAE"}
    assert "*" not in "".join(claim.ours for claim in told.values())


def test_sentences_name_the_new_runs(results: Path) -> None:
    tables = Tables(results)
    assert "which chose nothing, are those of two precisions" in vae.finding(tables)
    assert "with the recipe chosen for it straight-through Gumbel-Softmax 88.5 (" in vae.finding(
        tables
    )
    assert "leave-one-out 81.4" in vae.finding(tables)
    assert "With all 200 logits free, at a rate" in vae.others(tables)
    assert "ARSM by Algorithm 2, all logits free, reaches" in vae.others(tables)
    assert len(vae.limits(tables).splitlines()) == 1
    pixels = conditional.pixels(tables)
    assert "not comparable" not in pixels
    assert "ARSM reaches 65.5" in pixels
    assert pixels.count("nats better") == 2


def test_half_a_digit_is_judged_on_sampled_pixels(results: Path) -> None:
    told = [each for each in paper.claims(Tables(results)) if each.task == "Half a digit"]
    assert len(told) == 5
    assert "not comparable" not in [claim.verdict for claim in told]
    assert all("sampled pixels" in claim.ours for claim in told[:2])
    assert not any("thresholded" in claim.ours for claim in told)


@pytest.mark.parametrize("name", ["vae/README.md", "conditional/README.md", "README.md"])
def test_the_page_stays_short(results: Path, name: str) -> None:
    words = (results / name).read_text().split()
    assert len(words) <= 900


STRAIGHT = "gumbel-softmax:hard=True"
RELAX = "| RELAX | 3"


def page(results: Path, name: str = "README.md") -> str:
    return (results / "vae" / name).read_text()


def test_an_unfinished_run_changes_no_page(
    tmp_path: Path, known: list[Record], earlier: Path
) -> None:
    running = (
        one_layer_fresh("relax", rates=(5e-4,)),
        two_layers(STRAIGHT),
        two_layers_fresh(STRAIGHT, rates=(1e-4,)),
        free_logits,
        free_logits_fresh,
        algorithm2,
        precision("arsm", seeds=tuple(range(10, 16))),
    )
    new = [run for each in running for run in all_of(tmp_path, each, (10, 400, 990))]
    results = pages(tmp_path, known, new)
    for name in ("vae/README.md", "README.md", "conditional/README.md"):
        assert (results / name).read_text() == (earlier / name).read_text()


def test_a_grid_alone_is_trials(tmp_path: Path, known: list[Record], earlier: Path) -> None:
    """Until other seeds report the rate, no row shows it, and the runs count as missing."""
    grids = (two_layers(STRAIGHT), free_logits, algorithm2)
    results = pages(tmp_path, known, [run for each in grids for run in all_of(tmp_path, each)])
    assert page(results) == page(earlier)
    trials = page(results, "HISTORY.md")
    straight = "| two layers: straight-through Gumbel-Softmax | 400 | **80.1** | 80.2 | 80.3 |"
    assert straight in trials
    assert "| ARSM, 200 free logits | 1000 | **80.1** |" in trials
    # the real run at 1e-4 has 1,000 epochs, and joins them once fresh seeds report a rate
    assert "| two layers: ARSM, Algorithm 2 | 400 | | **80.2** | 80.3 | 80.4 | 80.5 |" in trials


def test_fresh_seeds_replace_those_that_chose(
    tmp_path: Path, known: list[Record], earlier: Path
) -> None:
    assert f"{RELAX}* |" in page(earlier)
    new = all_of(tmp_path, one_layer_fresh("relax", rates=(5e-4,)))
    told = page(pages(tmp_path, known, new))
    assert f"{RELAX} | 38 | 81.1 ± 0.1 |" in told
    # the other rows still have theirs
    assert "One of the seeds chose the rate" in told
    assert "other seeds for the rows with" in told


def test_fresh_seeds_of_two_commands_are_one_row(tmp_path: Path, known: list[Record]) -> None:
    """ARS has fresh seeds already; of ARSM's some ran before the others."""
    new = [
        run
        for each in (
            one_layer_fresh("ars", rates=(2e-4,)),
            precision("arsm", seeds=(10, 11)),
            precision("arsm", seeds=(12, 13, 14)),
        )
        for run in all_of(tmp_path, each)
    ]
    told = page(pages(tmp_path, known, new))
    assert "| ARS | 6† |" in told
    assert "| ARSM, f in bfloat16 | 5 |" in told
    assert "| ARSM, TF32 |" not in told
    assert "at other precisions, where one seed of three chose the rate" in told
    assert "float32 with seeds that chose nothing" in told


def test_a_grid_that_was_cut_short_counts(tmp_path: Path, known: list[Record]) -> None:
    grids = [two_layers(STRAIGHT), replace(algorithm2, epochs=700)]
    reports = [
        two_layers_fresh(STRAIGHT, rates=(1e-4,)),
        replace(algorithm2_fresh, rates=(2e-4,)),
    ]
    new = [run for each in (*grids, *reports) for run in all_of(tmp_path, each)]
    results = pages(tmp_path, known, new)
    told = page(results)
    assert "| two layers: straight-through Gumbel-Softmax | 3† |" in told
    assert "| two layers: ARSM, Algorithm 2 | 3† |" in told
    assert "† The rate was chosen in 400 to 890 epochs instead of 1,000" in told
    assert "Algorithm 2 at other rates" not in told
    assert "one rate" not in (results / "README.md").read_text()
    trials = page(results, "HISTORY.md")
    assert "| two layers: straight-through Gumbel-Softmax | 400 | **80.1** |" in trials
    # the trial at 1e-4, a real run, counts as far as the others came
    assert "| two layers: ARSM, Algorithm 2 | 700 | 90.5 | **80.2** |" in trials


def test_the_list_of_missing_runs_shrinks(
    tmp_path: Path, known: list[Record], earlier: Path
) -> None:
    def missing(results: Path) -> list[str]:
        (line,) = (line for line in page(results).splitlines() if "Planned, not run:" in line)
        told = line.partition(": ")[2].rstrip(".")
        return [word for words in told.split(", ") for word in words.split(" and ")]

    new = all_of(tmp_path, replace(free_logits_fresh, rates=(1e-4,)))
    before = missing(earlier)
    # without a grid nothing says which rate to show
    assert missing(pages(tmp_path / "fresh", known, new)) == before
    new += all_of(tmp_path, free_logits)
    shorter = missing(pages(tmp_path / "both", known, new))
    assert set(before) - set(shorter) == {"one layer with the paper's 200 free logits"}
    assert set(shorter) < set(before)


def test_a_seed_that_is_run_again_takes_its_place(
    tmp_path: Path, known: list[Record], earlier: Path
) -> None:
    """On sampled pixels one seed of leave-one-out overflowed."""
    before = (earlier / "conditional" / "README.md").read_text()
    assert "(n = 2)" in before
    assert "three seeds is left out" in before
    new = all_of(tmp_path, conditional_sampled("rloo:samples=46,live=1", seeds=(2,)))
    told = (pages(tmp_path, known, new) / "conditional" / "README.md").read_text()
    assert "(n = 2)" not in told
    assert "three seeds is left out" not in told
