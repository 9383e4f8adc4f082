"""Tasks in words: their questions, right answers and judges."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from arsm_experiments.sequences.countdown import (
    hits_the_target,
    is_solution,
    is_test,
    make_countdown,
    read_expression,
    solutions,
)
from arsm_experiments.sequences.texts import LONG_TERMS, make_sums
from arsm_experiments.sequences.translate import chrf, closeness, load_messages


def test_countdown_answers_are_right_and_questions_repeatable() -> None:
    records = make_countdown(500, 3)
    assert records == make_countdown(500, 3)
    assert len({record["prompt"][0]["content"] for record in records}) == 500
    columns = {name: [record[name] for record in records] for name in ("numbers", "target")}
    completions = [record["completion"] for record in records]
    assert hits_the_target(completions, **columns) == [1.0] * 500
    for record in records:
        steps = record["completion"].split(". The answer is ")[0]
        for step in steps.split(". "):
            left, right = step.split(" = ")
            assert read_expression(left)[0] == int(right)


def test_countdown_keeps_a_fifth_for_testing_whatever_the_order_of_the_numbers() -> None:
    records = make_countdown(500, 0)
    tested = [is_test(record["numbers"], record["target"]) for record in records]
    assert tested == [True] * 100 + [False] * 400
    assert is_test([3, 5, 7], 38) == is_test([7, 3, 5], 38)


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("2 + 3 * 4", 14, [2, 3, 4]),
        ("(2 + 3) * 4", 20, [2, 3, 4]),
        ("9 - 4 - 3", 2, [9, 4, 3]),
        ("9 - (4 - 3)", 8, [9, 4, 3]),
        ("((7))", 7, [7]),
    ],
)
def test_expressions_are_read_by_the_usual_rules(text: str, value: int, numbers: list[int]) -> None:
    assert read_expression(text) == (value, numbers)


@pytest.mark.parametrize(
    "text", ["", "2 +", "+ 2", "2 3", "(2", "2)", "2 ** 3", "__import__('os')", "2" * 61, "9999"]
)
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_expression(text)


def test_solutions_have_the_value_that_they_claim() -> None:
    found = list(solutions([12, 5, 3]))
    assert len({term.text for term in found}) > 40
    for term in found:
        value, used = read_expression(term.text)
        assert value == term.value
        assert sorted(used) == [3, 5, 12]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("The answer is 3 * 5 + 7.", True),
        ("3 * 5 = 16. 16 + 7 = 22. The answer is 7 + 5 * 3.", True),
        ("The answer is 22.", False),
        ("The answer is 3 * 5 + 7 + 0.", False),
        ("The answer is 3 * 5 + 8.", False),
        ("3 * 5 + 7", False),
        ("The answer is 3 * 5 + 7. The answer is 3.", False),
    ],
)
def test_the_last_expression_decides(text: str, right: bool) -> None:
    assert is_solution(text, [3, 5, 7], 22) == right


def test_long_sums_need_many_steps() -> None:
    record = make_sums(1, 0, LONG_TERMS)[0]
    assert record["completion"].count("=") == LONG_TERMS - 1
    assert record["completion"].endswith(f"The answer is {record['answer']}.")


def test_chrf_of_equal_and_of_different_texts() -> None:
    assert chrf("ein Haus", "einHaus") == pytest.approx(1)
    assert chrf("xyz", "ab") == 0
    assert chrf("", "ab") == 0
    # runs of one character: 2 of 2 and 2 of 3; of two: 1 of 1 and 1 of 2
    precision, recall = 1.0, (2 / 3 + 1 / 2) / 2
    assert chrf("ab", "abc") == pytest.approx(5 * precision * recall / (4 * precision + recall))
    assert closeness([[{"role": "assistant", "content": "ab"}]], ["ab"]) == [pytest.approx(1)]


@pytest.mark.skipif(importlib.util.find_spec("sacrebleu") is None, reason="needs sacrebleu")
def test_chrf_is_that_of_sacrebleu() -> None:
    from sacrebleu.metrics import CHRF  # pyright: ignore[reportMissingImports]

    judge = CHRF()
    pairs = [
        ("Passwort ändern", "Kennwort ändern"),
        ("Das Haus", "Ein kleines Haus"),
        ("a", "abcdefgh"),
        ("Seite nach oben bewegen", "Seite bewegen"),
    ]
    for ours, right in pairs:
        assert 100 * chrf(ours, right) == pytest.approx(judge.sentence_score(ours, [right]).score)


def test_a_missing_or_changed_catalogue_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "messages.json"
    with pytest.raises(ValueError, match="pip download"):
        load_messages(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="make it again"):
        load_messages(path)
