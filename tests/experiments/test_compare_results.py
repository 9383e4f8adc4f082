"""What the comparison's table says of bias, the floor and one variable, where a page says so in
words.
"""

from pathlib import Path

import pytest

import arsm
from arsm_experiments.compare import FLOOR
from arsm_experiments.report.pages.compare import NETWORKS, VAES, read_numbers
from arsm_experiments.report.pages.tables import Tables, short

NUMBERS = read_numbers(Tables(Path(__file__).parents[2] / "results"))


def test_nobody_unbiased_is_below_the_floor() -> None:
    for rows in NUMBERS.values():
        if FLOOR in rows:
            unbiased = [
                words for words in rows if words != FLOOR and arsm.estimator(words).unbiased
            ]
            assert rows[FLOOR]["cost"] < 1.05 * min(rows[words]["cost"] for words in unbiased)


def test_no_unbiased_estimator_shows_a_bias() -> None:
    """Beyond four times what the noise alone shows: the root of a sum of squares has no heavy
    tail.
    """
    for rows in NUMBERS.values():
        for words, metrics in rows.items():
            if words == FLOOR or arsm.estimator(words).unbiased:
                assert metrics["bias"] < 4 * metrics["bias of noise alone"], words


def test_the_floor_of_the_network() -> None:
    for problem in NETWORKS:
        rows = NUMBERS[problem]
        assert rows[FLOOR]["cost"] < 0.1  # more than nine tenths removed
        assert rows["double-control"]["cost"] < 1.3 * rows[FLOOR]["cost"]  # comes close
        assert (
            1.5 < rows["4*rodeo:samples=11"]["cost"] / rows["double-control"]["cost"] < 2.6
        )  # about twice


def test_straight_through_is_worse_than_leave_one_out_on_the_confident_vae() -> None:
    broad, confident = (NUMBERS[name]["straight-through"]["cost"] for name in VAES)
    assert confident > 1 > broad


def test_one_variable() -> None:
    rows = NUMBERS["toy-30"]
    unbiased = [words for words in rows if arsm.estimator(words).unbiased]
    assert min(unbiased, key=lambda words: rows[words]["cost"]) == "arsm-plus"
    for problem in ("toy-30", "toy-1000"):
        assert (
            0.25 < NUMBERS[problem]["ars-plus"]["cost"] / NUMBERS[problem]["ars"]["cost"] < 0.42
        )  # a third


@pytest.mark.parametrize(
    ("number", "words"),
    [(0.0173, "0.017"), (0.283, "0.28"), (1.0, "1.0"), (45.6, "46"), (2345.0, "2,345"), (0, "0")],
)
def test_two_digits(number: float, words: str) -> None:
    assert short(number) == words
