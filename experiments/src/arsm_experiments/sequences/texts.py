"""Questions as text for a model with a tokenizer: tasks in words, the small tasks, or a file of
prompts.

A record is a row of a TRL dataset: `prompt`, a string or a list of messages; `completion`, a right
answer to imitate, where there is one; all other columns go to the reward function.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arsm.sequences import TextReward
from arsm.sequences.text import TextFunction
from arsm_experiments.sequences.countdown import hits_the_target, make_countdown
from arsm_experiments.sequences.questions import Asked
from arsm_experiments.sequences.tasks import TASKS, decode, load
from arsm_experiments.sequences.translate import FILE, closeness, load_messages

CHAIN_TOKENS = 72
"""The most tokens of an answer to a sum; right ones have about 45."""
LONG_TERMS = 24
"""Numbers of a long sum; its right answers have 260 to 330 tokens."""
FILE_TOKENS = 128
"""The most tokens of an answer to a prompt of a file, unless the user says otherwise."""
OWN = ("prompt", "completion")
"""Columns that the reward function does not get by name."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Written:
    """A task in words, whose questions need no files of reasoning-gym."""

    records: Callable[[Path], Sequence[Record]]
    """From the folder of data files; questions for testing come first."""
    reward: TextFunction
    max_tokens: int


@dataclass(frozen=True, eq=False)
class Texts:
    """`Questions` whose reward judges decoded text; they are tokenised when they are asked."""

    records: Sequence[Record]
    tokenizer: Any
    function: TextFunction
    """With TRL's signature."""
    max_tokens: int

    @property
    def eos(self) -> int:
        return self.tokenizer.eos_token_id

    def __len__(self) -> int:
        return len(self.records)

    def split(self, held_out: int) -> tuple[Texts, Texts]:
        """Training and held-out questions."""
        return replace(self, records=self.records[held_out:]), replace(
            self, records=self.records[:held_out]
        )

    def first(self, count: int) -> Texts:
        """At most so many of them."""
        return replace(self, records=self.records[:count])

    def ask(self, rows: Tensor, device: torch.device | str = "cpu") -> Asked:
        """The questions `rows` [N], padded in front."""
        records = [self.records[row] for row in rows.tolist()]
        ids = [self._prompt_ids(record["prompt"]) for record in records]
        width = max(map(len, ids))
        prompts = torch.full((len(ids), width), self.tokenizer.pad_token_id)
        mask = torch.zeros(len(ids), width, dtype=torch.bool)
        for row, known in enumerate(ids):
            prompts[row, width - len(known) :] = torch.tensor(known)
            mask[row, width - len(known) :] = True
        prompts, mask = prompts.to(device), mask.to(device)
        reward = TextReward(
            self.function,
            partial(self.tokenizer.batch_decode, skip_special_tokens=True),
            prompts,
            [record["prompt"] for record in records],
            eos=self.eos,
            columns={
                name: [record[name] for record in records] for name in records[0] if name not in OWN
            },
        )
        return Asked(prompts, None if bool(mask.all()) else mask, reward)

    def answers(self, rows: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Right answers [N, T] to the questions `rows` [N], each with its end, padded with ends."""
        texts = [_content(self.records[row]["completion"]) for row in rows.tolist()]
        found = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        longest = max(map(len, found)) + 1
        if longest > self.max_tokens:
            text = max(zip(map(len, found), texts, strict=True))[1]
            raise ValueError(
                f"The right answer {text!r} has {longest} tokens with its end, but answers have at "
                f"most {self.max_tokens}; raise --max-tokens."
            )
        return torch.tensor(
            [ids + [self.eos] * (longest - len(ids)) for ids in found], device=device
        )

    def _prompt_ids(self, prompt: str | list[dict[str, str]]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        if self.tokenizer.chat_template is None:
            text = "".join(message["content"] + "\n" for message in prompt)
        else:
            text = self.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False
            )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def load_texts(
    tokenizer: Any,
    task: str,
    data: Path,
    *,
    prompts: Path | None = None,
    reward: str | None = None,
    max_tokens: int | None = None,
) -> Texts:
    """The questions of a task, or of a file.

    Args:
        tokenizer: the model's.
        task: one of `WRITTEN` or of `TASKS`.
        data: the folder with the files of `TASKS`, and with the messages to translate.
        prompts: a file of JSON lines that replaces the task.
        reward: FILE.py:FUNCTION, which replaces the task's own.
        max_tokens: the most tokens of an answer; None for the task's own.
    """
    own: TextFunction | None
    if prompts is not None:
        records, own, most = read_prompts(prompts), None, FILE_TOKENS
    elif task in WRITTEN:
        written = WRITTEN[task]
        records, own, most = written.records(data), written.reward, written.max_tokens
    else:
        records, own, most = (
            _characters(data / f"{task}.pt"),
            is_the_answer,
            TASKS[task].answer_tokens,
        )
    function = own if reward is None else load_function(reward)
    if function is None:
        raise ValueError("--prompts needs --reward FILE.py:FUNCTION, which judges the answers.")
    return Texts(records, tokenizer, function, max_tokens or most)


# ---------------------------------------------------------------- the tasks


def make_sums(count: int, seed: int, terms: int = 4) -> list[Record]:
    """Different sums of numbers below 100 that never fall below zero, with answers in steps."""
    draw = random.Random(seed)
    found: dict[str, Record] = {}
    while len(found) < count:
        total = draw.randint(1, 99)
        question, steps = str(total), []
        for _ in range(terms - 1):
            term = draw.randint(1, 99)
            sign, after = (
                ("-", total - term)
                if draw.random() < 0.5 and term <= total
                else ("+", total + term)
            )
            question += f" {sign} {term}"
            steps.append(f"{total} {sign} {term} = {after}.")
            total = after
        found[question] = {
            "prompt": [{"role": "user", "content": f"What is {question}?"}],
            "completion": " ".join([*steps, f"The answer is {total}."]),
            "answer": str(total),
        }
    return list(found.values())


def last_number_is_right(
    completions: Sequence[Any], answer: Sequence[str], **_: Any
) -> list[float]:
    """1 where the last number of a completion is the answer, else 0."""
    numbers = [re.findall(r"-?\d+", _content(completion)) for completion in completions]
    return [float(found[-1:] == [right]) for found, right in zip(numbers, answer, strict=True)]


def is_the_answer(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where a completion is the answer but for spaces around it, else 0."""
    return [
        float(_content(text).strip() == right)
        for text, right in zip(completions, answer, strict=True)
    ]


WRITTEN: dict[str, Written] = {
    "chain": Written(lambda _: make_sums(20_000, 0), last_number_is_right, CHAIN_TOKENS),
    "countdown": Written(lambda _: make_countdown(10_000, 0), hits_the_target, 64),
    "translate": Written(lambda data: load_messages(data / FILE), closeness, 48),
    "long": Written(lambda _: make_sums(2_000, 0, LONG_TERMS), last_number_is_right, 384),
}
"""Tasks in words by name."""


def _characters(path: Path) -> list[Record]:
    """A task of characters: the question is the prompt, the answer is to be matched."""
    data = load(path)
    pairs = zip(data.prompts.tolist(), data.answers.tolist(), strict=True)
    texts = [(decode(question), decode(answer)) for question, answer in pairs]
    return [
        {"prompt": [{"role": "user", "content": question}], "completion": answer, "answer": answer}
        for question, answer in texts
    ]


def _content(completion: Any) -> str:
    """The text of a completion, which for a conversation is a list of messages."""
    return completion if isinstance(completion, str) else completion[0]["content"]


# ---------------------------------------------------------------- the user's files


def read_prompts(path: Path) -> list[Record]:
    """Records of a file of JSON lines, which must all have the same columns."""
    records: list[Record] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"Line {number} of {path} is no JSON: {error}.") from None
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str | list):
            raise ValueError(
                f'Line {number} of {path} must be an object with a "prompt", which is a string or '
                "a list of messages."
            )
        if records and record.keys() != records[0].keys():
            raise ValueError(
                f"Line {number} of {path} has other columns than line 1; give all lines the same."
            )
        records.append(record)
    if len(records) < 2:
        raise ValueError(
            f"{path} must have at least 2 lines: one prompt to learn from and one to be tested on."
        )
    return records


def load_function(words: str) -> TextFunction:
    """The function FUNCTION of a Python file, from FILE.py:FUNCTION."""
    file, _, name = words.rpartition(":")
    if not file or not name:
        raise ValueError(f"--reward must be FILE.py:FUNCTION, but is {words}.")
    if not Path(file).is_file():
        raise ValueError(f"--reward names the file {file}, but there is none.")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"--reward names the file {file}, which is no Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Any = getattr(module, name, None)
    if function is None:
        raise ValueError(f"--reward names the function {name}, but {file} has none.")
    return function
