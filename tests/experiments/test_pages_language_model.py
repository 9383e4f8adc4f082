"""Sentences and tables of results/language_model, on records worked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from arsm_experiments.report.pages import (
    claims,
    language_model,
    language_model_candidates,
    language_model_history,
    language_model_training,
)
from arsm_experiments.report.pages.tables import Cell, Tables
from tests.experiments.made_up_tables import HEADER, write_lines

RATIO = "variance x tokens / best rival"
Line = tuple[str, str, float, float, int]
"""Row, metric, mean, standard deviation and number of estimates or seeds."""


def ratio(where: str, method: str, mean: float, half: float = 0.0) -> Line:
    """A ratio with half of its 95% interval, over four estimates."""
    return f"{where}, {method}", RATIO, mean, half * 2 / 1.96, 4


NOISE = [
    # at fresh questions: ahead, undecided and behind
    ratio("chain, level 0.8b (accuracy 0.770)", "branch 8, fresh", 0.3, 0.1),
    ratio("chain, level 0.8b (accuracy 0.770)", "branch 4, fresh", 1.5, 0.6),
    ratio("countdown, level 0.3b (accuracy 0.320)", "branch 8, fresh", 0.9, 0.2),
    ratio("countdown, level 0.3b (accuracy 0.320)", "branch 32, fresh", 0.5, 0.1),
    ratio("translate, level 0.3 (accuracy 0.316)", "branch 8, fresh", 1.5, 0.2),
    # at fixed ones; the first measurement of a level that has a second one counts for targets alone
    ratio("chain, level 0.1 (accuracy 0.150)", "branch 8", 0.9, 0.3),
    ratio("chain, level 0.1 (accuracy 0.150)", "branch 4", 0.8, 0.3),
    ratio("chain, level 0.8 (accuracy 0.820)", "branch 8", 0.4, 0.1),
    ratio("chain, level 0.8b (accuracy 0.770)", "branch 8", 0.2, 0.1),
    ratio("countdown, level 0.1 (accuracy 0.120)", "branch 8", 2.0, 0.5),
    ratio("countdown, level 0.1 (accuracy 0.120)", "branch 4", 1.1, 0.3),
    ratio("countdown, level 0.1 (accuracy 0.120)", "value head", 0.5, 0.1),
    ratio("countdown, level 0.3b (accuracy 0.320)", "branch 16", 0.7, 0.1),
    ratio("countdown, level 0.3b (accuracy 0.320)", "value head", 0.4, 0.1),
    ratio("long, level 0.1b (accuracy 0.152)", "group 8", 1.0),
    ratio("long, level 0.1b (accuracy 0.152)", "branch 2, budget 40 per prompt", 2.0, 0.5),
    ratio("long, level 0.1b (accuracy 0.152)", "value or branch 8, by doubt 0.1", 1.2, 0.3),
    ratio("long, level 0.1b (accuracy 0.152)", "value head", 0.8, 0.2),
]


def result(task: str, method: str, final: float, seconds: float, **more: float) -> list[Line]:
    """A method's rows; `less_x` are differences with intervals 0.01 wide on both sides."""
    row = f"{task}, all seeds: {method}, rate 1e-05"
    lines = [
        (row, "final accuracy", final, 0.01, 3),
        (row, "learning seconds", seconds, 0.0, 3),
    ]
    for name, value in more.items():
        metric = name.replace("_", " ").replace("grpo", "grpo, 4 epochs")
        lines.append((row, metric, value, 0.0, 3))
        if metric.startswith("less "):
            lines += [
                (row, f"{metric}, lower end", value - 0.01, 0.0, 3),
                (row, f"{metric}, upper end", value + 0.01, 0.0, 3),
            ]
    return lines


TRAINED = [
    *result("countdown", "branch", 0.47, 40, less_ppo=-0.03, less_grpo=0.0),
    *result("countdown", "branch, 4 epochs", 0.495, 50, less_ppo=-0.005, less_grpo=0.025),
    *result("countdown", "grpo, 4 epochs", 0.47, 80, less_ppo=-0.03, less_grpo=0.0),
    *result("countdown", "ppo", 0.5, 100, less_ppo=0.0, less_grpo=0.03),
    *result("translate", "branch", 0.4, 25, less_ppo=-0.004, less_grpo=0.004),
    *result("translate", "branch, 4 epochs", 0.39, 30, less_ppo=-0.014, less_grpo=-0.006),
    *result("translate", "ppo", 0.404, 100, less_ppo=0.0, less_grpo=0.008),
    *result("translate", "grpo, 4 epochs", 0.396, 90, less_ppo=-0.008, less_grpo=0.0),
]


def write(folder: Path, lines: Sequence[Line]) -> Tables:
    write_lines(folder / "language_model" / "table.csv", HEADER, lines)
    return Tables(folder)


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return write(tmp_path, [*NOISE, *TRAINED])


def test_the_finding_tells_what_is_decided(tables: Tables) -> None:
    assert language_model.finding(tables) == (
        "**Finding. For the same gradient noise, with its default of 8 draws, branching needs 30% "
        "of the best group method's tokens on sums (77% right); on translation it needs more; on "
        "countdown the saving is undecided.** With few right answers (15% on sums and 12% on "
        "countdown; fixed questions) no number of draws saves decidedly. Trained on equal tokens, "
        "the better of two forms of branching ends level with PPO (undecided), after half of its "
        "seconds on countdown and a quarter of its seconds on translation; it is ahead of GRPO on "
        "countdown, undecided on translation."
    )


def test_the_noise_is_bold_where_it_is_decidedly_below_one(tables: Tables) -> None:
    assert language_model.noise(tables).splitlines() == [
        "| | 4 draws | 8 draws (default) | 16 draws | 32 draws | n |",
        "|---|---|---|---|---|---|",
        "| sums (77% right) | 1.50±0.60 | **0.30±0.10** | | | 4 |",
        "| countdown (32% right) | | 0.90±0.20 | | **0.50±0.10** | 4 |",
        "| translation (mean chrF 0.32) | | 1.50±0.20 | | | 4 |",
    ]
    assert "| countdown | 0.32 | | 0.90 ± 0.20 | | 0.50 ± 0.10 |" in language_model.in_short(tables)


def test_the_best_come_first_and_are_bold_unless_decidedly_below(tables: Tables) -> None:
    assert language_model_training.training(tables).splitlines()[2:] == [
        "| ppo | **0.500±0.010** | 100 | **0.404±0.010** | 100 |",
        "| branch, 4 epochs | **0.495±0.010** | 50 | 0.390±0.010 | 30 |",
        "| branch | 0.470±0.010 | 40 | **0.400±0.010** | 25 |",
        "| grpo, 4 epochs | 0.470±0.010 | 80 | **0.396±0.010** | 90 |",
    ]


def test_differences_name_the_form_that_is_behind(tables: Tables) -> None:
    ppo, grpo, target = language_model_training.in_short(tables)
    assert ppo == (
        "**The better form less `ppo`**: -0.005 (-0.015 to +0.005) on countdown and -0.004 (-0.014 "
        "to +0.006) on translation. On countdown, `branch` is behind it: -0.030 (-0.040 to "
        "-0.020). On translation, `branch, 4 epochs` is behind it: -0.014 (-0.024 to -0.004)."
    )
    assert grpo == (
        "**The better form less `grpo, 4 epochs`**: +0.025 (+0.015 to +0.035) on countdown and "
        "+0.004 (-0.006 to +0.014) on translation."
    )
    assert target.endswith("is missed on countdown and translation.")


def test_losses_and_gains_at_fixed_questions(tables: Tables) -> None:
    assert language_model.more_right(tables).endswith(
        "0.80±0.30 (15% right; undecided) and 0.20±0.10 (77% right) on sums, 1.10±0.30 (12% right; "
        "undecided) and 0.70±0.10 (32% right) on countdown."
    )
    assert language_model.losses(tables).endswith(
        "fixed questions: 2.00±0.50 on countdown (12% right, a value head 0.50±0.10)."
    )
    assert language_model.long(tables).endswith(
        "the best of 2 forms of branching has 1.20±0.30, a value head 0.80±0.20."
    )


def test_history_has_both_measurements(tables: Tables) -> None:
    assert language_model_history.best_fixed(tables).endswith(
        "chain 0.20±0.10 at 0.77 (8), 0.80±0.30 at 0.15 (4); countdown 0.70±0.10 at 0.32 (16), "
        "1.10±0.30 at 0.12 (4)."
    )
    targets = language_model_history.targets(tables)
    assert "missed at first, 0.40±0.10 at 0.82 (8), and met later, 0.20±0.10 at 0.77" in targets


def test_the_default_has_the_least_noise_at_fresh_questions(tmp_path: Path) -> None:
    """Geometric means: the square root of 0.2 x 0.8, and of 0.5 x 0.5. The cheapest at fixed
    questions is another number.
    """
    chain, countdown = (
        "chain, level 0.8b (accuracy 0.770)",
        "countdown, level 0.3b (accuracy 0.320)",
    )
    lines = [
        ratio(chain, "branch 8, fresh", 0.2),
        ratio(chain, "branch 16, fresh", 0.5),
        ratio(countdown, "branch 8, fresh", 0.8),
        ratio(countdown, "branch 16, fresh", 0.5),
    ]
    costs = {8: 3.0, 16: 4.0, 32: 2.0, 64: 5.0}
    levels = (chain, countdown, "chain, level 0.3b (accuracy 0.293)")
    for place, where in enumerate(levels):
        for n, cost in costs.items():
            # with the third level 64 draws are the cheapest
            less = 100 if n == 64 and place == 2 else 1
            row = f"{where}, branch {n}"
            lines.append((row, language_model_history.COST, cost / less, 0.0, 4))
    told = language_model_history.default_draws(write(tmp_path, lines))
    assert "questions: 8 draws 0.40, 16 draws 0.50. So `Branch()` draws 8." in told
    assert "names 32 draws by the third amendment's two levels, 64 with chain at 0.3" in told


class Ended(NamedTuple):
    """A run that ended."""

    task: str
    metrics: list[dict[str, float]]


def test_tokens_per_update_are_those_of_countdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {
        "branch": [(100, 10), (120, 12)],
        "branch, 4 epochs": [(90, 10)],
        "ppo": [(200, 10)],
        "raft": [(400, 10)],
    }
    runs = {
        name: [Ended("countdown", [{"tokens": tokens, "step": step}]) for tokens, step in own]
        for name, own in ends.items()
    }
    other = Ended("translate", [{"tokens": 1, "step": 1}])
    every = [other, *(run for own in runs.values() for run in own)]
    monkeypatch.setattr(language_model_history, "read_archive", lambda _: {})
    monkeypatch.setattr(language_model_history, "read_trained", lambda _: every)

    def reported(found: list[Ended]) -> dict[str, list[Ended]]:
        assert other not in found
        return runs

    monkeypatch.setattr(language_model_history, "reported", reported)
    lines = [ratio("chain, level 0.3 (accuracy 0.300)", "branch 8", 0.5)]
    told = language_model_history.deviations(write(tmp_path, lines))
    assert told.startswith("- Noise: 4 to 4 estimates.\n")
    assert "`branch` 10, `branch, 4 epochs` 9, others 30. Branching made 10 to 12 updates" in told
    assert told.endswith("the others 10.")


def test_the_value_head_is_compared_with_the_default(tmp_path: Path) -> None:
    """Over nine rounds Student's half is 2.306 / 3 standard deviations."""
    lines: list[Line] = []
    for where, mean in (
        ("chain, level 0.8c (accuracy 0.770)", 2.5),
        ("countdown, level 0.3c (accuracy 0.320)", 0.9),
        ("translate, level 0.3c (accuracy 0.316)", 0.8),
    ):
        metric = language_model_candidates.TO_PLAIN
        lines.append((f"{where}, branch 8, fresh", metric, 1.0, 0.0, 9))
        lines.append((f"{where}, value head, fresh", metric, mean, 0.3903, 9))
    told = language_model.value_head(write(tmp_path, lines))
    assert "questions: 2.50±0.30 on sums (77% right), 0.80 to 0.90 elsewhere (undecided)." in told


def test_tokens_to_a_rivals_reward_are_shares_of_its_own(tmp_path: Path) -> None:
    spent = {"branch": (50.0, 10.0), "grpo, 4 epochs": (100.0, 40.0), "ppo": (40.0, 90.0)}
    lines: list[Line] = [
        (f"countdown, all seeds: {method}, rate 1e-05", f"{what} to grpo, 4 epochs", value, 0.0, 3)
        for method, values in spent.items()
        for what, value in zip(("tokens", "seconds"), values, strict=True)
    ]
    ours = result("countdown", "branch", 0.49, 40, less_ppo=-0.01, less_grpo=0.02)
    others = [line for line in TRAINED if str(line[0]).startswith("countdown, all seeds: ")]
    rest = [line for line in others if ": branch" not in str(line[0])]
    tables = write(tmp_path, [*ours, *rest, *lines])
    rows = language_model_training.results(tables)["countdown"]
    told = language_model_training._beside("countdown", rows, "grpo, 4 epochs")
    assert "It needs 0.50 of that method's tokens and 0.25 of its seconds" in told
    assert told.endswith("`ppo` needs 0.40 of these tokens.")


def test_a_ratio_is_undecided_where_its_interval_contains_one() -> None:
    """Half of the interval is 1.96 x 0.1 / sqrt(4) = 0.098."""
    assert language_model._unsure(Cell(1.05, 0.1, 4)) == "; undecided"
    assert not language_model._unsure(Cell(1.2, 0.1, 4))
    assert not language_model._unsure(Cell(0.8, 0.1, 4))


def test_the_readmes_claim(tables: Tables) -> None:
    told = claims.language_models(tables)
    shares = (
        "30% ± 10% on sums (77% right), 90% ± 20% on countdown (32%) and 150% ± 20% on translat"
    )
    assert f"(95% intervals): {shares}ion." in told
    assert "ends at a reward of 0.495 after 50 s, PPO at 0.500 after 100 s" in told
