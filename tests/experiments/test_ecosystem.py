"""The audit of released packages: entries run or say why not, and the table keeps what was not run
again.
"""

from __future__ import annotations

import csv
import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arsm_experiments.ecosystem import ENTRIES
from arsm_experiments.ecosystem.__main__ import main
from arsm_experiments.ecosystem.coverage import PACKAGES, answered, choices_of, compared_with
from arsm_experiments.ecosystem.entry import Entry, Found, refereed
from arsm_experiments.ecosystem.environments import environment_of, folder_of
from arsm_experiments.ecosystem.figure import angle, kind
from arsm_experiments.ecosystem.partly import AbsentError, absent, without_init
from arsm_experiments.ecosystem.relaxed import torch_surrogate
from arsm_experiments.ecosystem.stable_baselines3 import compared
from arsm_experiments.ecosystem.table import Audited, export, run_entry

TABLE = Path(__file__).parents[2] / "results" / "audit" / "table.csv"


def test_a_missing_package_is_skipped() -> None:
    entry = Entry(
        "none: nothing", "no-such-package", "no_such_module", "unbiased", lambda: Found("")
    )
    found = run_entry(entry)
    assert found.verdict == "not installed"
    assert "pip install no-such-package" in found.finding


def test_a_package_that_raises_is_reported() -> None:
    def run() -> Found:
        raise RuntimeError("not with this version")

    found = run_entry(Entry("torch: nothing", "torch", "torch", "unbiased", run))
    assert found.verdict == "does not run"
    assert "not with this version" in found.finding


def test_the_usual_surrogate_is_a_loss() -> None:
    logits = torch.zeros(2, 1, 3, requires_grad=True)
    torch_surrogate()(logits, lambda z: z[..., 0].float()).backward()
    assert logits.grad is not None


def test_a_loss_without_gradient_has_no_direction() -> None:
    found = refereed(lambda: lambda batch: 0 * batch.log_p().sum())()
    assert (found.verdict, found.scale) == ("wrong", "0.000")
    assert angle({"scale": found.scale}) is None


def test_draws_are_compared_with_their_mean() -> None:
    draws = (
        torch.randn(4000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
    )
    assert compared(draws, torch.ones(3, dtype=torch.float64))[0] == "unbiased"
    assert compared(draws, torch.full((3,), 1.3, dtype=torch.float64))[0] == "wrong"


def test_a_table_keeps_the_rows_of_other_runs(tmp_path: Path) -> None:
    first, second = ENTRIES[0].name, ENTRIES[1].name
    result = Audited(first, "torch 1", "unbiased", "unbiased", "", "1", "10", "1", "here", "abc")
    export([result], tmp_path)
    export([replace(result, row=second), replace(result, verdict="not installed")], tmp_path)
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [(row["row"], row["verdict"]) for row in rows] == [
        (first, "unbiased"),
        (second, "unbiased"),
    ]


def test_an_unknown_entry_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nothing like it"])
    assert "no entry matches" in capsys.readouterr().err


def test_the_committed_table_is_of_these_entries() -> None:
    rows = list(csv.DictReader(TABLE.open()))
    names = {entry.name for entry in ENTRIES}
    assert {row["row"] for row in rows} == names
    assert (TABLE.parent / "directions.png").exists()
    for row in rows:
        assert all(
            row[name] for name in ("version", "claim", "verdict", "seconds", "hardware", "commit")
        )


def test_every_broken_promise_is_reproduced_by_its_package_alone() -> None:
    """Old releases need none: the newer one beside them is the fix."""
    with TABLE.open() as file:
        rows = [row for row in csv.DictReader(file) if row["verdict"] in ("unbiased", "wrong")]
    broken = {r["row"].split(":")[0] for r in rows if kind(r) == "not as documented"}
    scripts = [path.stem for path in (TABLE.parent / "upstream").glob("*.py")]
    for package in broken:
        if " " not in package:
            name = package.replace("-", "_")
            assert any(script.startswith(name) for script in scripts), package


def test_every_part_of_the_registries_has_a_verdict_or_a_reason() -> None:
    rows = {row["row"]: row for row in csv.DictReader(TABLE.open())}
    for entry in ENTRIES:
        if entry.name.split(":")[0] in PACKAGES:
            row = rows[entry.name]
            assert row["verdict"] in ("unbiased", "wrong") or row["finding"], entry.name
            assert float(row["seconds"]) <= 60, entry.name


def test_the_committed_coverage_is_what_the_entries_cover() -> None:
    with (TABLE.parent / "coverage.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 100
    for row in rows:
        (line,) = answered(row["package"], {row["registry"]: [row["name"]]})
        assert line._asdict() == row
        assert line.entry or line.reason, line


def test_a_name_without_entry_or_reason_is_noticed() -> None:
    known, new = answered("verl", {"advantages": ["rloo", "something new"]})
    assert known.entry == "verl: advantages rloo"
    assert not new.entry
    assert not new.reason


def test_choices_are_read_from_a_command_line() -> None:
    source = "parser.add_argument('--other')\nparser.add_argument('--kl', choices=['k1', 'k2'])"
    assert choices_of(source, "--kl") == ["k1", "k2"]
    with pytest.raises(ValueError, match="no option --loss"):
        choices_of(source, "--loss")


def test_a_part_of_a_package_is_imported_without_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "a_trainer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "a_trainer" / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("raise ImportError('needs a GPU')")
    (inner / "loss.py").write_text("import a_kernel\n\ndef fast():\n    a_kernel.Fast()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("a_trainer", "a_trainer.inner", "a_trainer.inner.loss", "a_kernel"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match="needs a GPU"):
        importlib.import_module("a_trainer.inner.loss")
    without_init("a_trainer.inner")
    absent("a_kernel", "Fast")
    loss = importlib.import_module("a_trainer.inner.loss")
    with pytest.raises(AbsentError, match=r"a_kernel\.Fast is used"):
        loss.fast()


def test_the_values_of_an_option_are_read_from_the_code() -> None:
    class Trainer:
        def loss(self, mode: str) -> int:
            if self.kind == "a" or self.kind in ["b", "c"]:  # type: ignore[attr-defined]
                return 1
            return 2 if mode == "d" else 3

    assert compared_with([Trainer.loss], "kind") == ["a", "b", "c"]
    assert compared_with([Trainer.loss], "mode") == ["d"]


@pytest.mark.parametrize(
    ("name", "old", "mended"),
    [
        (
            "GRPO trainer, loss_type=luspo, scale_rewards=none",
            ("trl 1.9.2", "wrong", "[mask]"),
            ("trl", "unbiased", ""),
        ),
        (
            "GRPO trainer, beta = 0.3, dr_grpo",
            ("trl 1.9.2", "wrong", "the other way round"),
            ("trl", "wrong", "token by token: what a token does"),
        ),
        (
            "aggregation seq-mean-token-sum-norm, loss_scale_factor=1",
            ("verl 0.7.0", "wrong", "a sum over the rows"),
            ("verl", "unbiased", ""),
        ),
    ],
    ids=["TRL 6654", "TRL 6503", "verl 5417"],
)
def test_defects_of_old_releases_are_found_and_gone_where_they_were_mended(
    name: str, old: tuple[str, str, str], mended: tuple[str, str, str]
) -> None:
    rows = {row["row"]: row for row in csv.DictReader(TABLE.open())}
    for package, verdict, words in (old, mended):
        row = rows[f"{package}: {name}"]
        assert row["verdict"] == verdict
        assert words in row["finding"]


@pytest.mark.parametrize(
    ("claim", "verdict", "expected"),
    [
        ("leave-one-out: unbiased", "unbiased", "unbiased"),
        ("leave-one-out: unbiased", "wrong", "not as documented"),
        ("normalised; no claim of being unbiased", "wrong", "biased, no promise broken"),
        ("the policy gradient but for some tokens", "wrong", "biased, no promise broken"),
    ],
)
def test_a_promise_decides_what_is_a_defect(claim: str, verdict: str, expected: str) -> None:
    assert kind({"claim": claim, "verdict": verdict}) == expected


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(words: list[str], check: bool) -> None:
        commands.append(words)
        (tmp_path / "some-1.0").mkdir(exist_ok=True)

    monkeypatch.setattr("arsm_experiments.ecosystem.environments.subprocess.run", run)
    first = environment_of(("some==1.0",), tmp_path)
    assert first == tmp_path / "some-1.0" / "bin" / "python"
    assert commands[-1][-1] == "some==1.0"
    assert any(word.startswith("torch==") for word in commands[1])
    made = len(commands)
    assert environment_of(("some==1.0",), tmp_path) == first
    assert len(commands) == made


def test_requirements_with_options_are_installed_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(words: list[str], check: bool) -> None:
        commands.append(words)
        (tmp_path / "plain+some-1.0").mkdir(exist_ok=True)

    monkeypatch.setattr("arsm_experiments.ecosystem.environments.subprocess.run", run)
    needed = ("plain", "--no-deps some==1.0")
    assert folder_of(needed) == "plain+some-1.0"
    environment_of(needed, tmp_path)
    assert commands[-2][-1] == "plain"
    assert commands[-1][-2:] == ["--no-deps", "some==1.0"]


def test_the_guide_says_what_was_measured_of_the_audit() -> None:
    """False alarms stay below every declared rate, and would not with shorter intervals."""
    rows = list(csv.DictReader((TABLE.parent / "referee.csv").open()))
    guide = (TABLE.parents[2] / "docs" / "guides" / "check_my_gradient.md").read_text()
    rates = {
        float(row["declared"]): row
        for row in rows
        if row["row"] == "reduced audits of correct losses"
    }
    (halved,) = (row for row in rows if "half their length" in row["row"])

    def count(row: dict[str, str]) -> int:
        return round(float(row["value"]) * int(row["audits"]))

    assert all(
        int(row["audits"]) == 2000 and float(row["high"]) < rate for rate, row in rates.items()
    )
    assert float(halved["low"]) > float(halved["declared"])
    assert f"at most 100 alarms are expected; {count(rates[0.05])} were raised" in guide
    assert f"the rate is below {100 * float(rates[0.05]['high']):.2f} %" in guide
    assert f"at most 1,000 are, and {count(rates[0.5])} were raised" in guide
    assert f"{count(halved)} of 2,000 raised one at 5 %" in guide
    for name, words in (("leave-one-out, 4 samples", "an error of"), ("score function", "one of")):
        caught = [row for row in rows if row["metric"] == "caught" and row["row"].startswith(name)]
        first = next(row for row in caught if float(row["value"]) >= 0.99)
        error = first["row"].removeprefix(f"{name}, ").removesuffix("% too long")
        assert f"{words} {error} %" in guide
        assert f"in {count(first)} of {first['audits']} audits" in guide
        assert f"in more than {int(100 * float(first['low']))} % of all audits" in guide
    seconds = [float(row["value"]) for row in rows if row["metric"].startswith("CPU seconds")]
    assert len(seconds) == 20
    assert f"{min(seconds):.1f} to {max(seconds):.1f} CPU seconds" in guide
    assert max(seconds) < 20
