"""The VAE's pages as the runs that are still missing arrive, with made-up numbers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from arsm_experiments.plans import FULL, free_logits, precision, vae_regularised
from arsm_experiments.report.pages import paper, remake, vae
from arsm_experiments.report.pages.tables import Tables
from arsm_experiments.report.sections import results_csv
from arsm_experiments.report.vae import vae_sections
from arsm_experiments.runs.reader import Record, read_runs
from arsm_experiments.vae import Vae
from tests.experiments import training_runs

ROOT = Path(__file__).parents[2]
FLOAT32 = precision("arsm", seeds=tuple(range(20, 26)), precision="float32")
DECAY = vae_regularised("arsm:pooled=True", layers=2, rates=(4e-4,), epochs=800)
TO_THE_END = [
    each
    for each in FULL
    if isinstance(each, Vae) and each.name == "two-layers-fresh" and each.rates == (1e-4,)
]
"""The two-layer trainings whose published runs ended early."""
MISSING = (FLOAT32, DECAY, free_logits, *TO_THE_END)
write_run = partial(
    training_runs.write_run,
    train_gap=-7.0,
    evaluations=40.0,
    at_end={"best_test": 0.5, "bound": -10.0},
)


def made_up(root: Path, planned: Vae, epochs: Sequence[int] | None = None) -> list[Record]:
    """All runs of a command, finished unless `epochs` end earlier; seeds differ by a tenth of a
    nat, and of several rates 5e-4 is the best.
    """
    found = []
    for rate in planned.rates:
        one = Vae(**{**vars(planned), "rates": (rate,)})
        best = 80 + 1e3 * abs(rate - 5e-4) * (len(planned.rates) > 1)
        validation = [[best + 30, best + 5, best + 0.1 * place] for place in range(len(one.seeds))]
        found.append(write_run(root, one, validation, epochs))
    return found


def pages(folder: Path, known: Sequence[Record], new: Sequence[Record]) -> Path:
    """results/ with these runs of the VAE, and its pages made again; new runs take the place of
    known ones with their names.
    """
    results = folder / "results"
    shutil.copytree(ROOT / "results", results, ignore=shutil.ignore_patterns("*.png"))
    names = {record.name for record in new}
    runs = [*(record for record in known if record.name not in names), *new]
    (results / "vae" / "table.csv").write_text(results_csv(vae_sections(runs)))
    remake(results)
    return results


@pytest.fixture(scope="module")
def known() -> list[Record]:
    """The archived runs."""
    return [record for record in read_runs(ROOT / "results" / "runs") if record.experiment == "vae"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, known: list[Record]) -> Path:
    """results/ with all planned runs."""
    folder = tmp_path_factory.mktemp("everything")
    return pages(folder, known, [run for each in MISSING for run in made_up(folder, each)])


def missing(results: Path) -> str:
    """What the page says of missing runs."""
    page = (results / "vae" / "README.md").read_text()
    return "".join(line for line in page.splitlines() if "Runs that are planned" in line)


def test_every_missing_run_is_planned() -> None:
    assert len(TO_THE_END) == 2
    assert set(MISSING) <= set(FULL)


def test_no_run_is_missing_in_the_end(results: Path) -> None:
    assert not missing(results)
    tables = Tables(results)
    assert "‡" not in vae.table(tables)
    assert "‡" not in vae.note(tables)


def test_the_table_has_the_new_runs(results: Path) -> None:
    """80.1 ± 0.1: seeds with 80, 80.1 and 80.2, plus 0.5 in the test."""
    table = vae.table(Tables(results))
    assert "| 88.2 ± 0.2" not in table
    assert table.count("80.6 ± 0.1†") == 2
    assert "On two layers pooled ARSM reaches 80.6, at 4e-4 in 800 epochs." in vae.details(
        Tables(results)
    )


def test_two_precisions_are_one_row(results: Path) -> None:
    tables = Tables(results)
    assert vae.arsm_rows(tables).keys() == {"ARSM, f in bfloat16", "ARSM, float32"}
    assert vae.all_arsm(tables).seeds == 12
    told = vae.details(tables)
    assert "(bfloat16) and 80.8 (float32), 7.1 (" in told
    assert "apart. Three other seeds each, one of which chose the rate, reach 88.7 (TF32)." in told
    (claim,) = (
        claim
        for claim in paper.claims(tables)
        if claim.task == "VAE" and claim.claim == "ARSM, test -ELBO"
    )
    assert "n = 12" in claim.ours


def test_longer_trials_choose_the_free_logits_rate(results: Path) -> None:
    tables = Tables(results)
    (line,) = (line for line in vae.trials(tables).splitlines() if "200 free logits" in line)
    assert line.startswith("| ARSM, 200 free logits | 1000 | 80.4 | 80.3 |")
    assert "shorter trials" not in vae.details(tables)


def test_the_page_stays_short(results: Path) -> None:
    for page in ("vae/README.md", "README.md"):
        assert len((results / page).read_text().split()) <= 900


def test_an_unfinished_run_changes_no_page(tmp_path: Path, known: list[Record]) -> None:
    new = [run for each in (FLOAT32, DECAY) for run in made_up(tmp_path, each, (10, 400, 790))]
    results = pages(tmp_path, known, new)
    for name in ("vae/README.md", "README.md"):
        assert (results / name).read_text() == (ROOT / "results" / name).read_text()


def test_the_list_of_missing_runs_shrinks(tmp_path: Path, known: list[Record]) -> None:
    before = missing(ROOT / "results")
    assert "float32 with seeds that chose nothing, two layers with weight decay" in before
    after = missing(pages(tmp_path, known, made_up(tmp_path, DECAY)))
    assert after == before.replace(" two layers with weight decay,", "")


def test_no_seed_of_the_table_chose_its_rate(results: Path) -> None:
    for where in (ROOT / "results", results):
        tables = Tables(where)
        rows = [row for method in vae.METHODS for row in method[1:] if row]
        chose = [vae.cell(tables, vae.as_far_as_run(tables, row), vae.CHOSE).mean for row in rows]
        assert not any(chose)
