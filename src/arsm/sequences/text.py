"""Rewards of decoded text, written for TRL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from arsm.sequences.ends import Ends, is_end, live_tokens

TextFunction = Callable[..., Sequence[float | None]]
"""`f(prompts=[...], completions=[...], completion_ids=[...], **columns)`: a number per
completion, None to abstain.
"""


class TextReward:
    """A `Reward` from functions with TRL's signature: decodes, finds each prompt's
    columns, adds up.

    A completion's reward is the weighted sum over the functions that do not return None
    for it.
    """

    def __init__(
        self,
        functions: TextFunction | Sequence[TextFunction],
        decode: Callable[[list[list[int]]], list[str]],
        prompts: Tensor,
        texts: Sequence[Any],
        *,
        eos: Ends = None,
        columns: dict[str, Sequence[Any]] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        """
        Args:
            functions: one or several.
            decode: tokens to text, such as `partial(tokenizer.batch_decode,
                skip_special_tokens=True)`.
            prompts: [N, P] int64, as `estimate` gets them.
            texts: N prompts as the functions expect them: strings, or conversations
                (lists of messages), whose completions become messages of the assistant.
            eos: the token that ends a sequence, or a list of several; it and what
                follows are not decoded.
            columns: further arguments of the functions, N values each.
            weights: of the functions; 1 each by default.
        """
        self.functions = [functions] if callable(functions) else list(functions)
        self.weights = [1.0] * len(self.functions) if weights is None else list(weights)
        self.decode = decode
        self.eos = eos
        self.texts = list(texts)
        self.columns = dict(columns or {})
        if len(self.weights) != len(self.functions) or not self.functions:
            raise ValueError(
                f"{len(self.functions)} functions have {len(self.weights)} weights; give one each."
            )
        for name, values in {"texts": self.texts, **self.columns}.items():
            if len(values) != prompts.shape[0]:
                raise ValueError(
                    f"{name} must hold one value per prompt, {prompts.shape[0]}, but holds "
                    f"{len(values)}."
                )
        # branches come in any number and order: a prompt is known by its tokens
        self._row: dict[tuple[int, ...], int] = {}
        for row, prompt in enumerate(prompts.tolist()):
            first = self._row.setdefault(tuple(prompt), row)
            known = self.texts, *self.columns.values()
            if any(values[first] != values[row] for values in known):
                raise ValueError(
                    f"Prompts {first} and {row} are equal but their texts or columns differ, so a "
                    "completion could not be judged; make the prompts differ or drop one."
                )

    def __call__(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        rows = [self._row.get(tuple(prompt), -1) for prompt in prompts.tolist()]
        if min(rows) < 0:
            raise ValueError(
                "A prompt is none of those that this reward was made with; make one reward per "
                "batch."
            )
        # the end itself is not part of the text
        before = (live_tokens(tokens, self.eos) & ~is_end(tokens, self.eos)).sum(-1).tolist()
        ids = [row[:length] for row, length in zip(tokens.tolist(), before, strict=True)]
        completions: list[Any] = list(self.decode(ids))
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        columns["prompts"] = [self.texts[row] for row in rows]
        # TRL's functions get messages where the prompts are conversations
        if not isinstance(columns["prompts"][0], str):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        columns |= {"completions": completions, "completion_ids": ids}
        return self._judged(columns).to(tokens.device)

    def _judged(self, columns: dict[str, list[Any]]) -> Tensor:
        """The weighted sums [R] of what the functions return."""
        count = len(columns["completions"])
        total = torch.zeros(count, dtype=torch.float64)
        judged = torch.zeros(count, dtype=torch.bool)
        for function, weight in zip(self.functions, self.weights, strict=True):
            name = getattr(function, "__name__", type(function).__name__)
            values = function(**columns)
            if len(values) != count:
                raise ValueError(
                    f"{name} must return {count} rewards, one per completion, but returned "
                    f"{len(values)}."
                )
            # a function that abstains adds nothing; somebody must judge, though
            numbers = [0.0 if value is None else float(value) for value in values]
            total += weight * torch.tensor(numbers, dtype=torch.float64)
            judged |= torch.tensor([value is not None for value in values])
        if not bool(judged.all()):
            missing = int((~judged).nonzero()[0])
            raise ValueError(
                "No function gave a reward for the completion "
                f"{columns['completions'][missing]!r}; at least one must."
            )
        return total
