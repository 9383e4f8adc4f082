"""`sequences.compare`: what it measures, how it ranks, and that it leaves the model alone."""

from __future__ import annotations

import csv
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import arsm
from arsm import sequences
from arsm.sequences import Branch, Group
from arsm.sequences.comparison import _Spread, label_of
from arsm.sequences.measured import Comparison, Measured
from tests.statistics import deviations
from tests.tables import CODES, Setting, Table, reward

SETTING = Setting(eos=1)


class Tables(nn.Module):
    """A `Table` whose logits are a parameter."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.inner = Table(rows, 3)
        self.table = nn.Parameter(self.inner.table.detach())
        self.inner.table = self.table

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens)


def compared(
    strategies: Any, rows: int = 2, model: Any = None, seed: int = 3, **options: Any
) -> Comparison:
    prompts, _ = SETTING.prompts(rows)
    model = model or SETTING.model(rows)
    generator = torch.Generator().manual_seed(seed)
    return sequences.compare(
        strategies, model, prompts, reward, max_tokens=3, eos=1, generator=generator, **options
    )


def row(label: str, cost: float, error: float, strategy: Any = None) -> Measured:
    return Measured(label, strategy or Group(2), cost / 10, error / 10, 10.0, 0.0, 0.5, None, 1.0)


def test_moments_are_those_of_all_gradients() -> None:
    gradients = (
        torch.randn(6, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 5
    )
    moments = _Spread()
    for gradient in gradients:
        moments.add([gradient[:30].view(5, 6), gradient[30:]])
    assert math.isclose(sum(moments.growth) / 5, float(gradients.var(0).sum()), rel_tol=1e-12)
    assert math.isclose(
        moments.squared_mean(), float(gradients.mean(0).square().sum()), rel_tol=1e-12
    )


@pytest.mark.parametrize("strategy", [Branch(arsm.RLOO(3)), Group(arsm.GRPO(3))], ids=label_of)
def test_variance_and_signal_agree_with_those_of_many_estimates(
    strategy: sequences.Strategy,
) -> None:
    # rows of a batch are independent: the variance of the mean over N of them is that of one row,
    # divided by N
    rows = 60
    single = SETTING.estimates(strategy, 20_000).view(20_000, CODES, 3)
    exact = torch.stack([single.var(0).sum(), single.mean(0).square().sum()]) / rows
    found = [compared([strategy], rows, repeats=3, seed=seed).rows[0] for seed in range(20)]
    samples = torch.tensor([[each.variance, each.signal] for each in found], dtype=torch.float64)
    assert deviations(samples, exact).max() < 1
    assert deviations(samples, 2 * exact).min() > 1, "the test could not fail"


def test_labels_name_the_options() -> None:
    strategy = Branch(arsm.RLOO(8), group=4, coin=0.5)
    assert label_of(strategy) == "Branch(RLOO(8), group, coin)"
    assert label_of(Branch(arsm.RLOO(8), budget=99)) == "Branch(RLOO(8), budget)"


def test_a_planted_ranking_is_found() -> None:
    class Louder:
        """The same credit, three times: nine times the variance for the same tokens."""

        unbiased, samples, draws = True, 3, 1

        def check(self, logits: Tensor) -> None:
            pass

        def credit(self, batch: sequences.Batch) -> sequences.TokenCredit:
            credit = Group(3).credit(batch)
            return sequences.TokenCredit(credit.tokens, 3 * credit.weights)

    found = compared({"loud": Louder(), "plain": Group(3)}, 30, repeats=20)
    assert [each.label for each in found.rows] == ["plain", "loud"]
    assert found.rows[1].tokens == pytest.approx(found.rows[0].tokens, rel=0.1)
    assert found.rows[1].variance == pytest.approx(9 * found.rows[0].variance, rel=0.5)
    assert found.recommendation.startswith("Use plain: loud, the next best, needs ")


def test_the_model_is_left_alone() -> None:
    module = Tables(4)
    module.table.grad = torch.full_like(module.table, 7.0)
    before = module.table.detach().clone()
    with torch.no_grad():  # as in an evaluation loop
        found = compared(
            [Branch(arsm.RLOO(3)), Group(2)], 4, sequences.Recompute(module), repeats=3
        )
    assert bool((module.table.grad == 7).all())
    assert torch.equal(module.table, before)
    assert all(each.variance > 0 and each.tokens >= 4 and each.seconds > 0 for each in found.rows)
    assert all(each.memory is None for each in found.rows)


def test_a_module_and_a_plain_model_measure_the_same() -> None:
    plain, module = (
        compared([Group(3)], 5, model, repeats=4)
        for model in (SETTING.model(5), sequences.Recompute(Tables(5)))
    )
    assert plain.rows[0].variance == pytest.approx(module.rows[0].variance, rel=1e-9)


def test_table_fits_and_says_what_it_means() -> None:
    strategies = [
        Branch(arsm.RLOO(3)),
        Branch(arsm.RLOO(3), keep=0.5),
        Group(arsm.GRPO(3)),
        Group(3),
        Group(3),
    ]
    found = compared(strategies, repeats=3)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 88
    assert "variance x tokens" in lines[0]
    assert "GB" not in lines[0]
    labels = {each.label for each in found.rows}
    assert labels == {
        "Branch(RLOO(3))",
        "Branch(RLOO(3), keep)",
        "Group(GRPO(3))",
        "Group(RLOO(3))",
        "Group(RLOO(3)) #2",
    }
    assert any(line.startswith("Group(GRPO(3)) *") for line in lines)
    assert "*: biased." in str(found)
    assert found.markdown().startswith("| strategy | variance x tokens |")
    assert found.recommendation in found.markdown()
    table = list(csv.DictReader(found.csv().splitlines()))
    assert [line["strategy"] for line in table] == [each.label for each in found.rows]
    assert float(table[0]["cost"]) == found.rows[0].cost
    assert {line["unbiased"] for line in table} == {"True", "False"}


@pytest.mark.parametrize("numbers", [1e-12, 1.0, 1e12])
def test_wide_numbers_fit_too(numbers: float) -> None:
    long = "a name that is far too long for a table"
    wide = Measured(
        long,
        Group(arsm.GRPO(2)),
        numbers,
        numbers,
        123_456_789.0,
        1.0,
        1234.5,
        120_000_000_000,
        numbers,
    )
    assert max(map(len, str(Comparison((wide, row("b", 1, 1)), 8)).splitlines())) <= 88


def test_recommendations() -> None:
    grpo = Group(arsm.GRPO(2))
    clear = Comparison((row("g", 1, 0.1, grpo), row("a", 10, 1), row("b", 30, 1)), 8)
    assert (
        clear.recommendation
        == "Use a: b, the next best, needs 3 times its tokens for one variance."
    )
    close = Comparison((row("a", 10, 1), row("b", 12, 1), row("c", 12.5, 1), row("d", 30, 1)), 8)
    assert close.recommendation == (
        "Use a, but b and c cannot be told apart from it: the differences are within the errors "
        "of 8 repeats."
    )
    assert Comparison((row("a", 0, 0), row("b", 0, 0)), 8).recommendation.startswith(
        "No strategy shows any variance"
    )
    assert (
        Comparison((row("a", 0, 0), row("b", 1, 0.1)), 8).recommendation
        == "Use a: its estimates do not vary here."
    )
    assert Comparison((row("a", 1, 0),), 8).recommendation.startswith("Only a can be recommended")


def test_figure_shows_every_strategy() -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    figure = Comparison((row("a", 1, 0.1), row("g", 3, 0.1, Group(arsm.GRPO(2)))), 8).figure()
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["g *", "a"]
    assert axes.get_xscale() == "log"


@pytest.mark.parametrize(
    ("strategies", "options", "message"),
    [
        ([], {}, "no strategies to compare"),
        (Group(2), {}, "must be a list or a dictionary of strategies, but is a Group"),
        ([Group(2)], {"repeats": 2}, "repeats must be at least 3, but is 2"),
        (
            [Group(2)],
            {"model": sequences.Recompute(Tables(2).requires_grad_(False))},
            "no parameter with requires_grad",
        ),
    ],
    ids=["none", "not a list", "too few repeats", "nothing to learn"],
)
def test_refusals(strategies: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        compared(strategies, **options)


def test_progress_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compared([Group(2)], repeats=3)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("arsm.progress.PATIENCE", 0.0)
    monkeypatch.setattr("arsm.progress.EVERY", 0.0)
    compared([Group(2)], repeats=3)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    compared([Group(2)], repeats=3)
    shown = capsys.readouterr().err
    assert "67% Group(RLOO(2)), estimate 3 of 3, about" in shown
    assert shown.endswith("\x1b[K")
