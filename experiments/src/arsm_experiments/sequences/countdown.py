"""Countdown: make a target from three numbers, each used once, with +, - and *.

A question has several right answers: terms may change places, and often different expressions hit
the target. The task is that of reasoning-gym's `countdown` (Stojanovski and others, Reasoning Gym,
2025), with small numbers; questions and verifier are written here.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

NUMBERS = 3
LARGEST = 12
"""Numbers are 1 to this."""
TARGETS = range(1, 100)
LONGEST = 60
"""Most characters of an expression that is read."""
TOKEN = re.compile(r"\s*(\d{1,3}|[-+*()])")
RANK = {"+": 1, "-": 1, "*": 2}


@dataclass(frozen=True)
class Term:
    """An expression that was built step by step."""

    value: int
    text: str
    rank: int = 3
    """How strongly it binds: 1 for sums, 2 for products, 3 for numbers."""
    steps: tuple[str, ...] = ()


def solutions(numbers: Sequence[int]) -> Iterator[Term]:
    """All expressions of these numbers whose intermediate results are positive."""
    return _combine([Term(number, str(number)) for number in numbers])


def _combine(terms: list[Term]) -> Iterator[Term]:
    if len(terms) == 1:
        yield terms[0]
        return
    for i, left in enumerate(terms):
        for j, right in enumerate(terms):
            if i == j:
                continue
            others = [term for k, term in enumerate(terms) if k not in (i, j)]
            for sign in RANK:
                value = _apply(sign, left.value, right.value)
                if value > 0:
                    yield from _combine([*others, _join(sign, left, right, value)])


def _apply(sign: str, left: int, right: int) -> int:
    if sign == "+":
        return left + right
    return left - right if sign == "-" else left * right


def _join(sign: str, left: Term, right: Term, value: int) -> Term:
    rank = RANK[sign]
    before = left.text if left.rank >= rank else f"({left.text})"
    # a - (b - c) and a - (b + c) need their parentheses; a + (b + c) and a * (b * c) do not
    bare = right.rank > rank or (right.rank == rank and sign != "-")
    after = right.text if bare else f"({right.text})"
    step = f"{left.value} {sign} {right.value} = {value}."
    text = f"{before} {sign} {after}"
    return Term(value, text, rank, (*left.steps, *right.steps, step))


@cache
def _by_target(numbers: tuple[int, ...]) -> dict[int, list[Term]]:
    found: dict[int, dict[str, Term]] = {}
    for term in solutions(numbers):
        if term.value in TARGETS:
            found.setdefault(term.value, {})[term.text] = term
    return {target: list(terms.values()) for target, terms in sorted(found.items())}


def is_test(numbers: Sequence[int], target: int) -> bool:
    """Whether a question is kept for testing, by its hash: a fifth are, in whatever order its
    numbers come.
    """
    words = f"countdown {sorted(numbers)} {target}"
    return hashlib.sha256(words.encode()).digest()[0] < 51


def make_countdown(count: int, seed: int) -> list[dict[str, Any]]:
    """Different questions, those for testing first: a fifth of them; each with one of its solutions
    at random.
    """
    draw = random.Random(seed)
    tests: dict[str, dict[str, Any]] = {}
    others: dict[str, dict[str, Any]] = {}
    while len(tests) < count // 5 or len(others) < count - count // 5:
        numbers = [draw.randint(1, LARGEST) for _ in range(NUMBERS)]
        by_target = _by_target(tuple(sorted(numbers)))
        if not by_target:
            continue
        target = draw.choice(list(by_target))
        solution = draw.choice(by_target[target])
        kept, most = (
            (tests, count // 5) if is_test(numbers, target) else (others, count - count // 5)
        )
        if len(kept) == most:
            continue
        first, second, third = numbers
        question = (
            f"Make {target} from the numbers {first}, {second} and {third}, each used once, "
            "with +, - and *."
        )
        kept[question] = {
            "prompt": [{"role": "user", "content": question}],
            "completion": " ".join([*solution.steps, f"The answer is {solution.text}."]),
            "numbers": numbers,
            "target": target,
        }
    return [*tests.values(), *others.values()]


def hits_the_target(
    completions: Sequence[Any], numbers: Sequence[Sequence[int]], target: Sequence[int], **_: Any
) -> list[float]:
    """1 where the expression after the last "The answer is" uses each number once and equals the
    target, else 0.
    """
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [
        float(is_solution(text, some, wanted))
        for text, some, wanted in zip(texts, numbers, target, strict=True)
    ]


def is_solution(text: str, numbers: Sequence[int], target: int) -> bool:
    """Judge one answer."""
    _, found, last = text.rpartition("The answer is ")
    if not found:
        return False
    expression = last.partition(".")[0]
    try:
        value, used = read_expression(expression)
    except ValueError:
        return False
    return value == target and sorted(used) == sorted(numbers)


def read_expression(text: str) -> tuple[int, list[int]]:
    """The value of an expression of +, -, * and parentheses, and the numbers in it; ValueError for
    anything else.
    """
    if len(text) > LONGEST:
        raise ValueError(f"An expression has at most {LONGEST} characters.")
    text = text.strip()
    tokens: list[str] = []
    place = 0
    while place < len(text):
        matched = TOKEN.match(text, place)
        if matched is None:
            raise ValueError(f"{text!r} is no expression.")
        tokens.append(matched.group(1))
        place = matched.end()
    reader = _Reader(tokens)
    value = reader.sum()
    if reader.next is not None:
        raise ValueError(f"{text!r} goes on after its end.")
    return value, reader.numbers


class _Reader:
    """Sums of products of numbers and parentheses, from left to right."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.place = 0
        self.numbers: list[int] = []

    @property
    def next(self) -> str | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def take(self) -> str:
        token = self.next
        if token is None:
            raise ValueError("The expression ends too early.")
        self.place += 1
        return token

    def sum(self) -> int:
        value = self.product()
        while self.next in ("+", "-"):
            value = _apply(self.take(), value, self.product())
        return value

    def product(self) -> int:
        value = self.factor()
        while self.next == "*":
            value = _apply(self.take(), value, self.factor())
        return value

    def factor(self) -> int:
        token = self.take()
        if token.isdigit():
            self.numbers.append(int(token))
            return int(token)
        if token != "(":
            raise ValueError(f"There is no number before {token!r}.")
        value = self.sum()
        if self.take() != ")":
            raise ValueError("A parenthesis is not closed.")
        return value
