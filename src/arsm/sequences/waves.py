"""Decoding of any `Model`, in waves; and the choice between waves and slots."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from arsm.sequences.decode import Completions, Decoding, Prefixes, complete
from arsm.sequences.draws import Noise, Sampled
from arsm.sequences.model import Model, SlotsRefused
from arsm.sequences.slots import Slots


class Waves:
    """The same as `Slots` for any `Model`, by `complete`: all rows of a batch stand at
    the same step.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def sample(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        row: Tensor,
        decoding: Decoding,
        draws: int = 1,
        generator: torch.Generator | None = None,
        noise: Noise | None = None,
    ) -> Sampled:
        """Sample one sequence per entry of `row`, and n draws from each of its states."""
        done = Sampled.empty(row.shape[0], decoding.max_tokens, draws, decoding.eos, prompts.device)
        bare = Prefixes.bare(row, decoding.max_tokens)
        complete(self.model, prompts, mask, bare, decoding, generator, noise, done)
        return done

    def complete(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        prefixes: Prefixes,
        decoding: Decoding,
        generator: torch.Generator | None = None,
        noise: Noise | None = None,
    ) -> Completions:
        """Complete every prefix."""
        return complete(self.model, prompts, mask, prefixes, decoding, generator, noise)


def decoder(
    model: Any, rows: int = 1024, *, dtype: torch.dtype | None = None, **options: Any
) -> Slots | Waves:
    """`Slots` for a model that offers them, else `Waves`; a model that refuses is named
    in a warning.

    Args:
        model: a `Model`.
        rows: the most rows per step.
        dtype: the type of the weights' copies that are sampled with; None for the
            weights themselves.
        options: further options of `Slots`.
    """
    if not hasattr(model, "slots"):
        return Waves(model)
    try:
        return Slots(model.slots(dtype), rows, **options)
    except SlotsRefused as reason:
        warnings.warn(
            f"{type(model).__name__} is decoded in waves, which is slower than in slots: {reason}",
            stacklevel=2,
        )
        return Waves(model)
