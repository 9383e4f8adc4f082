"""The tables and sentences of results/compare/README.md are those of its table.csv."""

import pytest

import arsm
from arsm_experiments.compare import FLOOR
from arsm_experiments.report.compare_page import GROUPS, PAGE, filled, read_numbers, short, tables

TEXT = PAGE.read_text()
NUMBERS = read_numbers(PAGE.parent / "table.csv")
DOCS = (PAGE.parents[2] / "docs" / "estimators.md").read_text()


def test_the_tables_are_what_the_runs_say() -> None:
    made = tables(NUMBERS)
    assert filled(TEXT, made) == TEXT, "stale: run `python -m arsm_experiments.report.compare_page`"
    assert all(f"<!-- table: {name} -->\n" in TEXT for name in made)


def test_arsm_and_the_ridge_beside_leave_one_out() -> None:
    networks = [NUMBERS[problem] for problem in GROUPS["network"]]
    ratios = [rows["arsm"]["variance"] / rows["rloo"]["variance"] for rows in networks]
    words = f"{min(ratios):.0f} to {max(ratios):.0f} times"
    assert words in TEXT
    assert words in DOCS
    plus, pooled = (
        [rows[words]["cost"] / rows["arsm"]["cost"] for rows in networks] for words in ("arsm-plus", "arsm:pooled=True")
    )
    assert max(plus) < 0.5  # half or more
    assert max(pooled) < 0.29  # three quarters
    assert "removes half of that or more" in TEXT
    assert "pooling three quarters" in TEXT
    ridge = [rows["rloo:ridge=1.0"]["cost"] for rows in networks]
    assert f"{max(ridge):.2f} to {min(ridge):.2f} of plain leave-one-out's error" in TEXT


def test_nobody_unbiased_is_below_the_floor() -> None:
    for rows in NUMBERS.values():
        if FLOOR in rows:
            unbiased = [words for words in rows if words != FLOOR and arsm.estimator(words).unbiased]
            assert rows[FLOOR]["cost"] < 1.05 * min(rows[words]["cost"] for words in unbiased)


def test_no_unbiased_estimator_shows_a_bias() -> None:
    """Beyond four times what the noise alone shows: the root of a sum of squares has no heavy tail."""
    for rows in NUMBERS.values():
        for words, metrics in rows.items():
            if words == FLOOR or arsm.estimator(words).unbiased:
                assert metrics["bias"] < 4 * metrics["bias that noise alone shows"], words


def test_ugc_beside_disarm() -> None:
    less = []
    for problem in GROUPS["binary"]:
        ugc, disarm = NUMBERS[problem]["ugc"], NUMBERS[problem]["disarm"]
        less.append(1 - 4 * ugc["variance"] / (6 * disarm["variance"]))  # 4 and 6 draws for 12 evaluations
    assert "`ugc` has {:.0%} (scale 1) and {:.0%} (scale 3) less variance".format(*less).replace("%", " %") in TEXT


def test_trained_vaes() -> None:
    short, confident = (NUMBERS[name] for name in sorted(NUMBERS, reverse=True) if name.startswith("vae"))

    def removed(words: str) -> list[float]:
        return sorted(100 * (1 - rows[words]["cost"]) for rows in (short, confident))

    assert f"leaves {short[FLOOR]['cost']:.2f} of leave-one-out's error" in TEXT
    assert "The logits as a surrogate remove {:.0f} to {:.0f} %".format(*removed("rloo:surrogate=logits")) in TEXT
    assert 5 < removed("rloo:ridge=1.0")[0] < 15  # a tenth
    assert 40 < removed("rloo:ridge=1.0")[1] < 60  # half
    assert confident["straight-through"]["cost"] > 1 > short["straight-through"]["cost"]


def test_the_floor_of_the_network() -> None:
    for problem in GROUPS["network"]:
        rows = NUMBERS[problem]
        assert rows[FLOOR]["cost"] < 0.1  # more than nine tenths removed
        assert rows["double-control"]["cost"] < 1.3 * rows[FLOOR]["cost"]  # comes close
        assert 1.5 < rows["4*rodeo:samples=11"]["cost"] / rows["double-control"]["cost"] < 2.6  # about twice


def test_one_variable() -> None:
    rows = NUMBERS["toy-30"]
    unbiased = [words for words in rows if arsm.estimator(words).unbiased]
    assert min(unbiased, key=lambda words: rows[words]["cost"]) == "arsm-plus"
    for problem in GROUPS["toy"]:
        assert 0.25 < NUMBERS[problem]["ars-plus"]["cost"] / NUMBERS[problem]["ars"]["cost"] < 0.42  # a third


@pytest.mark.parametrize(
    ("number", "words"), [(0.0173, "0.017"), (0.283, "0.28"), (1.0, "1.0"), (45.6, "46"), (2345.0, "2,345"), (0, "0")]
)
def test_two_digits(number: float, words: str) -> None:
    assert short(number) == words
