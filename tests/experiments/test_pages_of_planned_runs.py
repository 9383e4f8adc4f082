"""The pages once every planned run of the VAE and of half a digit is there, with made-up numbers
for those that are not.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from arsm_experiments.conditional import Conditional
from arsm_experiments.plans import FULL
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


def made_up(root: Path, planned: Training, name: str) -> Record:
    """A finished run of one of its folders: seeds differ by a tenth of a nat."""
    folders = {folder.name: config for folder, config in planned.runs().items()}
    own = folders[name]
    one = replace(planned, rates=(own["rate"],), dropouts=(own["dropout"],))
    best = 80 + 1e3 * own["rate"]
    validation = [[best + 30, best + 5, best + 0.1 * place] for place in range(len(one.seeds))]
    return write_run(root, one, validation, at_end=AT_END[planned.experiment])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """results/ with all planned runs, and its pages made again."""
    folder = tmp_path_factory.mktemp("everything")
    shutil.copytree(
        ROOT / "results", folder / "results", ignore=shutil.ignore_patterns("*.png", "*.tar.xz")
    )
    records = read_runs(ROOT / "results" / "runs")
    sections = {"vae": vae_sections, "conditional": conditional_sections}
    for experiment, kind in (("vae", Vae), ("conditional", Conditional)):
        known = [record for record in records if record.experiment == experiment]
        names = {record.name for record in known}
        new = [
            made_up(folder, each, path.name)
            for each in FULL
            # a short run serves the comparison's checkpoint alone
            if isinstance(each, kind) and each.name != "short"
            for path in each.runs()
            if path.name not in names
        ]
        table = folder / "results" / experiment / "table.csv"
        table.write_text(results_csv(sections[experiment]([*known, *new])))
    remake(folder / "results")
    return folder / "results"


def test_every_row_of_the_pages_is_there(results: Path) -> None:
    tables = Tables(results)
    assert vae.ran(tables, vae.ROWS).keys() == vae.ROWS.keys()
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
    assert "With all 200 logits free" in vae.others(tables)
    assert "leave-one-out, 46 samples 80.7" in vae.others(tables)
    assert len(vae.limits(tables).splitlines()) == 1
    pixels = conditional.pixels(tables)
    assert "not comparable" not in pixels
    assert "ARSM reaches 65.5" in pixels
    assert pixels.count("nats better") == 2


def test_half_a_digit_is_judged_on_sampled_pixels(results: Path) -> None:
    told = [each for each in paper.claims(Tables(results)) if each.task == "Half a digit"]
    assert len(told) == 5
    assert "not comparable" not in [claim.verdict for claim in told]
    assert all("sampled" in claim.ours + claim.cost for claim in told)


@pytest.mark.parametrize("name", ["vae", "conditional"])
def test_the_page_stays_short(results: Path, name: str) -> None:
    words = (results / name / "README.md").read_text().split()
    assert len(words) <= 900
