"""Logits in parts: one pass for the hidden states of all tokens, then the head for some
states at a time.

Logits [N, T, V] are by far the largest tensor of a language model, V/D times as large
as the hidden states [N, T, D] that they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from arsm.sequences.model import Model, one_pass

Limit: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""`limit(logits [S, V], step [S]) -> [S, V]`: the logits that tokens may be drawn from,
-inf for those that may not.
"""
CELLS = 1 << 25
"""Most logits at a time: 134 MB in float32, enough to occupy a GPU."""


@dataclass(frozen=True, eq=False)
class Headed:
    """A pass over N sequences up to the model's head."""

    hidden: Tensor
    """[N, T, D], with the graph: `[:, t]` leads to the logits of token t."""
    head: Callable[[Tensor], Tensor]
    """Hidden states [S, D] -> logits [S, V], before temperature."""
    vocabulary: int
    """V."""

    def parts(self, states: Tensor) -> tuple[Tensor, ...]:
        """Indices of states, [S] in [N T], as many at a time as `CELLS` allows."""
        return states.split(max(1, CELLS // self.vocabulary))


def headed(model: Model, prompts: Tensor, tokens: Tensor, mask: Tensor | None) -> Headed:
    """The pass up to the head. A model that offers none passes for one whose hidden
    states are its logits.
    """
    # an offer and no duty: a wrapped model may find at its first pass that it cannot
    if hasattr(model, "headed"):
        found = model.headed(prompts, tokens, mask)  # pyright: ignore[reportAttributeAccessIssue]
        if found is not None:
            return found
    # then the logits of a whole micro-batch exist; nothing smaller can be asked of such a model
    logits = one_pass(model, prompts, tokens, mask)
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"model.logits must return [{tokens.shape[0]}, {tokens.shape[1]}, V], but returned "
            f"{list(logits.shape)}; entry [:, t] holds the logits that token t is drawn from."
        )
    return Headed(logits, lambda logits: logits, logits.shape[-1])


@torch.no_grad()
def logits_in_parts(
    model: Model,
    prompts: Tensor,
    tokens: Tensor,
    mask: Tensor | None,
    wanted: Tensor,
    limit: Limit,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits without a graph, of some states at a time.

    Args:
        model: the model.
        prompts: [N, P] int64.
        tokens: [N, T] int64.
        mask: [N, P] bool, true for tokens of the prompt; None where all are.
        wanted: [N, T] bool: the states whose logits are needed.
        limit: which tokens may be drawn.

    Yields:
        Indices [S] in [N T] of some of them, and their logits [S, V] before
        temperature.
    """
    # padding has no credit: its logits, often half of all, are never made
    states = wanted.flatten().nonzero().squeeze(-1)
    if states.shape[0] == 0:
        return
    whole = headed(model, prompts, tokens, mask)
    # gathered before the head, where a state is D numbers and not V
    hidden = whole.hidden.flatten(0, 1)
    for some in whole.parts(states):
        yield some, limit(whole.head(hidden[some]), some % tokens.shape[1])
