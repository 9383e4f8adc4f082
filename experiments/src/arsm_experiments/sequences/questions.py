"""What a trainer asks of a task: prompts as tokens, and a reward for what the model answers."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from arsm.sequences import Reward


class Asked(NamedTuple):
    """N questions."""

    prompts: Tensor
    """[N, P] int64."""
    mask: Tensor | None
    """[N, P] bool, true for tokens of the prompts; None where all are."""
    reward: Reward


class Questions(Protocol):
    """Questions of one task."""

    @property
    def max_tokens(self) -> int:
        """The most tokens of an answer, its end included."""
        ...

    @property
    def eos(self) -> int:
        """The token that ends an answer."""
        ...

    def __len__(self) -> int: ...

    def ask(self, rows: Tensor, device: torch.device | str = "cpu") -> Asked:
        """The questions `rows` [N]."""
        ...
