"""Tasks as characters: questions in a short form, answers to be matched exactly.

All but one are reasoning-gym's: `python -m arsm_experiments.sequences.tasks FOLDER` writes one file
per task; it needs reasoning-gym, reading the files does not. `digit_sorting` needs neither.
"""

from __future__ import annotations

import argparse
import os
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arsm_experiments.sequences.questions import Asked

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz ,-+<>=KR"
PAD, EOS = 0, 1
FIRST = 2
"""The number of ALPHABET's first character."""
OWN_QUESTIONS = 20_000
VOCABULARY = FIRST + len(ALPHABET)


def _found(pattern: str, question: str) -> tuple[str, ...]:
    match = re.search(pattern, question)
    if match is None:
        raise ValueError(
            f"The question {question!r} does not have the form that is read here, {pattern!r}."
        )
    return match.groups()


def _sorting(question: str) -> str:
    order, numbers = _found(r"in (asc|desc)ending order: ([^\n]*)", question)
    return ("<" if order == "asc" else ">") + numbers.replace(".0", "").replace(", ", " ")


def _numbers(answer: str) -> str:
    return " ".join(number.removesuffix(".0") for number in re.findall(r"-?[\d.]+", answer))


def _filtering(question: str) -> str:
    pattern = (
        r"(Keep|Remove) all numbers (larger|smaller) than (-?[\d.]+) in this list: (\[[^]]*\])"
    )
    word, relation, limit, numbers = _found(pattern, question)
    return f"{word[0]}{'>' if relation == 'larger' else '<'}{limit} {_numbers(numbers)}"


def _digits(size: int, seed: int) -> Iterable[tuple[str, str]]:
    draw = random.Random(seed)
    for _ in range(size):
        digits = "".join(draw.choices("0123456789", k=6))
        yield digits, "".join(sorted(digits))


@dataclass(frozen=True)
class Task:
    """A generator of reasoning-gym with its options, and how its texts are shortened."""

    options: dict[str, Any]
    question: Callable[[str], str] = str
    answer: Callable[[str], str] = str
    answer_tokens: int = 16
    """max_tokens: the longest answer and its end."""
    prompt_tokens: int = 32
    own: Callable[[int, int], Iterable[tuple[str, str]]] | None = None
    """(size, seed) to questions and answers, instead of reasoning-gym's."""
    generator: str | None = None
    """reasoning-gym's name of the task, where it is another."""


TASKS = {
    "digit_sorting": Task({}, answer_tokens=7, prompt_tokens=7, own=_digits),
    "number_sorting": Task(
        {
            "min_numbers": 8,
            "max_numbers": 8,
            "min_decimals": 0,
            "max_decimals": 0,
            "min_value": 0,
            "max_value": 99,
        },
        _sorting,
        _numbers,
        answer_tokens=24,
        prompt_tokens=25,
    ),
    "spell_backward": Task(
        {"min_word_len": 8, "max_word_len": 10},
        lambda question: question.rpartition(": ")[2].strip().lower(),
        lambda answer: answer.strip().lower(),
        answer_tokens=11,
        prompt_tokens=11,
    ),
    "chain_sum": Task(
        {"min_terms": 2, "max_terms": 2, "min_digits": 6, "max_digits": 6},
        lambda question: re.sub(r"[^\d+-]", "", question.rpartition(":")[2]),
        answer_tokens=9,
        prompt_tokens=14,
    ),
    "number_filtering": Task(
        {
            "min_numbers": 8,
            "max_numbers": 8,
            "min_decimals": 0,
            "max_decimals": 0,
            "min_value": -99.0,
            "max_value": 99.0,
        },
        _filtering,
        _numbers,
        answer_tokens=32,
        prompt_tokens=40,
    ),
    "small_sorting": Task(
        {
            "min_numbers": 8,
            "max_numbers": 8,
            "min_decimals": 0,
            "max_decimals": 0,
            "min_value": 0,
            "max_value": 9,
        },
        _sorting,
        _numbers,
        answer_tokens=16,
        prompt_tokens=17,
        generator="number_sorting",
    ),
    "small_filtering": Task(
        {
            "min_numbers": 8,
            "max_numbers": 8,
            "min_decimals": 0,
            "max_decimals": 0,
            "min_value": -9.0,
            "max_value": 9.0,
        },
        _filtering,
        _numbers,
        answer_tokens=24,
        prompt_tokens=30,
        generator="number_filtering",
    ),
    "spiral_matrix": Task(
        {"min_n": 4, "max_n": 4},
        lambda question: re.sub(r"[^\d]", "", question.rpartition("?")[2]),
        lambda answer: answer.replace(" ", ""),
        answer_tokens=17,
        prompt_tokens=17,
    ),
}


def encode(text: str) -> list[int]:
    """Characters to tokens."""
    return [FIRST + ALPHABET.index(character) for character in text]


def decode(tokens: list[int]) -> str:
    """Tokens to characters, up to the end of sequence, without padding."""
    text = tokens[: tokens.index(EOS)] if EOS in tokens else tokens
    return "".join(ALPHABET[token - FIRST] for token in text if token >= FIRST)


@dataclass(frozen=True, eq=False)
class Data:
    """Questions and answers of one task."""

    prompts: Tensor
    """[M, P] uint8, padded in front; every prompt ends with "="."""
    answers: Tensor
    """[M, T] uint8, padded with EOS."""

    @property
    def max_tokens(self) -> int:
        return self.answers.shape[1]

    @property
    def eos(self) -> int:
        return EOS

    def __len__(self) -> int:
        return self.prompts.shape[0]

    def ask(self, rows: Tensor, device: torch.device | str = "cpu") -> Asked:
        """The questions `rows` [N], to be answered exactly."""
        prompts, answers = self.batch(rows, device)
        return Asked(prompts, None, ExactMatch(prompts, answers))

    def first(self, count: int) -> Data:
        """At most so many of them."""
        return Data(self.prompts[:count], self.answers[:count])

    def batch(self, rows: Tensor, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """int64 prompts [N, P] and answers [N, T]."""
        return tuple(
            x[rows.to(x.device)].to(device, torch.int64) for x in (self.prompts, self.answers)
        )  # pyright: ignore

    def split(self, held_out: int) -> tuple[Data, Data]:
        """Training and held-out questions."""
        return (
            Data(self.prompts[held_out:], self.answers[held_out:]),
            Data(self.prompts[:held_out], self.answers[:held_out]),
        )


class ExactMatch:
    """The reward: 1 where a completion is the prompt's answer, else 0."""

    def __init__(self, prompts: Tensor, answers: Tensor) -> None:
        """prompts [N, P], answers [N, T]."""
        self.code, order = self._hash(prompts).sort()
        self.answers = answers[order]

    def __call__(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        place = torch.searchsorted(self.code, self._hash(prompts))
        return (self.answers[place] == tokens).all(-1).float()

    @staticmethod
    def _hash(prompts: Tensor) -> Tensor:
        base = torch.full(
            (prompts.shape[1],), 6364136223846793005, dtype=torch.int64, device=prompts.device
        )
        return (prompts * base.cumprod(0)).sum(-1)


def generate(name: str, size: int, seed: int) -> Data:
    """Make questions; equal ones are left out."""
    task = TASKS[name]
    found = _ask_reasoning_gym(name, size, seed) if task.own is None else task.own(size, seed)
    pairs = {task.question(question) + "=": task.answer(answer) for question, answer in found}
    prompts = torch.full((len(pairs), task.prompt_tokens), PAD, dtype=torch.uint8)
    answers = torch.full((len(pairs), task.answer_tokens), EOS, dtype=torch.uint8)
    for row, (question, answer) in enumerate(pairs.items()):
        asked, told = encode(question), encode(answer)
        if len(asked) > task.prompt_tokens or len(told) >= task.answer_tokens:
            raise ValueError(f"{name}: {question!r} -> {answer!r} is longer than the task allows.")
        prompts[row, task.prompt_tokens - len(asked) :] = torch.tensor(asked, dtype=torch.uint8)
        answers[row, : len(told)] = torch.tensor(told, dtype=torch.uint8)
    return Data(prompts, answers)


def _ask_reasoning_gym(name: str, size: int, seed: int) -> Iterable[tuple[str, str]]:
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    task = TASKS[name]
    for entry in reasoning_gym.create_dataset(
        task.generator or name, size=size, seed=seed, **task.options
    ):
        yield entry["question"], entry["answer"]


def save(data: Data, path: Path) -> None:
    """Write atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save({"prompts": data.prompts, "answers": data.answers}, part)
    os.replace(part, path)


def load(path: Path, device: str = "cpu") -> Data:
    """Read what `save` wrote; a task of our own is made on the spot."""
    if path.stem in TASKS and TASKS[path.stem].own and not path.exists():
        data = generate(path.stem, OWN_QUESTIONS, 0)
        return Data(data.prompts.to(device), data.answers.to(device))
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; make it with `python -m arsm_experiments.sequences.tasks "
            f"{path.parent}`."
        )
    return Data(**torch.load(path, weights_only=True, map_location=device))


def main() -> None:
    """Write all tasks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=100_000, help="Number of questions per task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    options = parser.parse_args()
    for name in options.tasks:
        data = generate(name, options.size, options.seed)
        save(data, options.folder / f"{name}.pt")
        shown = f"{decode(data.prompts[0].tolist())} {decode(data.answers[0].tolist())}"
        print(f"{name}: {len(data.prompts)} questions, such as {shown}", flush=True)


if __name__ == "__main__":
    main()
