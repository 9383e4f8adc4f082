"""A language model that can be enumerated.

Two prompts of different lengths have four answers each, of one to three tokens; some
end with the end token, some are cut off. The model is a table: logits for every context
that can occur, for every position inside a prompt, and one more row for whatever stands
behind the end of an answer. A correct loss leaves the rows of the last two kinds alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

PAD, END, A, B = range(4)
VOCABULARY = 4
MAX_TOKENS = 3
PROMPTS = ((A,), (B, A, B))
ANSWERS = (
    ((END,), (A, END), (A, A, END), (A, A, B)),
    ((B, END), (A, END), (A, B, END), (A, B, A)),
)
"""All answers of each prompt; those of three tokens without the end token are cut off."""
IMPOSSIBLE = -50.0
"""The logit of a token that no answer has in this place: a finite one, as networks give."""


def _contexts() -> tuple[dict[tuple[int, ...], int], list[set[int]]]:
    """The table's row of every context, and the tokens that may follow there."""
    rows: dict[tuple[int, ...], int] = {}
    allowed: list[set[int]] = []
    for prompt, answers in zip(PROMPTS, ANSWERS, strict=True):
        for answer in answers:
            for t in range(len(answer)):
                context = (*prompt, *answer[:t])
                if context not in rows:
                    rows[context] = len(rows)
                    allowed.append(set())
                allowed[rows[context]].add(answer[t])
    # positions inside a prompt, where nothing is drawn: any token may follow
    for prompt in PROMPTS:
        for t in range(1, len(prompt)):
            rows[prompt[:t]] = len(rows)
            allowed.append(set(range(VOCABULARY)))
    return rows, allowed


CONTEXTS, _ALLOWED = _contexts()
AFTER = len(CONTEXTS)
"""The table's row for every position behind the end of an answer."""
STATES = AFTER + 1
INSIDE = [
    row
    for context, row in CONTEXTS.items()
    if any(context == p[: len(context)] != p for p in PROMPTS)
]
"""The rows of positions inside a prompt."""


def _places() -> tuple[Tensor, Tensor, Tensor]:
    """[prompts, answers, T]: the table's row and the token of every place of every
    answer, and whether it has one.
    """
    shape = (len(PROMPTS), len(ANSWERS[0]), MAX_TOKENS)
    rows = torch.full(shape, AFTER)
    tokens = torch.full(shape, PAD)
    for p, (prompt, answers) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        for a, answer in enumerate(answers):
            for t, token in enumerate(answer):
                rows[p, a, t] = CONTEXTS[(*prompt, *answer[:t])]
                tokens[p, a, t] = token
    return rows, tokens, rows != AFTER


PLACES = _places()
"""[prompts, answers, T] each: the table's row of every place, its token, and whether there is
one.
"""


def random_table(seed: int, spread: float = 0.7) -> Tensor:
    """[STATES, VOCABULARY] float64 logits with the tree's impossible tokens; tables of
    all seeds have the same tree.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(STATES, VOCABULARY, dtype=torch.float64, generator=generator)
    for row, tokens in enumerate(_ALLOWED):
        for token in set(range(VOCABULARY)) - tokens:
            logits[row, token] = IMPOSSIBLE
    return logits


# Losses call the model with a few hundred different batches, thousands of times: walking through
# their tokens in Python would take most of an audit's time.
@lru_cache(maxsize=4096)
def _states(tokens: tuple[tuple[int, ...], ...], mask: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.tensor([_row_states(*row) for row in zip(tokens, mask, strict=True)])


@lru_cache(maxsize=4096)
def _row_states(tokens: tuple[int, ...], mask: tuple[int, ...]) -> list[int]:
    found = []
    context: tuple[int, ...] = ()
    ended = False
    for token, live in zip(tokens, mask, strict=True):
        if live:
            context = (*context, token)
            ended = ended or token == END
        # padding before the first token is the prompt's; after one it is the end
        elif context:
            ended = True
        # a prefix that no answer has, of a loss that shifts tokens, counts as behind the end
        found.append(AFTER if ended else CONTEXTS.get(context, AFTER))
    return found


def states(tokens: Tensor, mask: Tensor) -> Tensor:
    """The table's row at every position: tokens [N, L] and mask [N, L] (1 where a token
    counts) -> [N, L].
    """
    return _states(tuple(map(tuple, tokens.tolist())), tuple(map(tuple, mask.long().tolist())))


@dataclass(eq=False)
class Seen:
    """The gradient in the logits of one forward pass."""

    tokens: Tensor
    mask: Tensor
    states: Tensor
    gradient: Tensor
    """[N, L, V]."""


class LanguageModel:
    """The causal language model: `model(tokens [N, L], attention_mask [N, L] = None) ->
    logits [N, L, V]`.

    Positions are counted from the first token that the mask keeps: padding on the left
    does not change the logits.
    """

    def __init__(self, table: Tensor, seen: list[Seen] | None = None) -> None:
        self.table = table
        self.seen = seen

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = tokens != PAD if attention_mask is None else attention_mask
        where = states(tokens, mask)
        logits = self.table[where]
        # a local name, which is known not to be None when the hook runs
        seen = self.seen
        if seen is not None and logits.requires_grad:
            logits.register_hook(lambda gradient: seen.append(Seen(tokens, mask, where, gradient)))
        return logits
