r"""The head of a causal model: ln p of single tokens, and tokens drawn beside a true one.

ln p of another token is TRL's own ln p of the true token plus a difference of two
logits, from two rows of the head:

    ln p(a) = ln p(y) + z(a) - z(y),    z(a) = h . W[a] / temperature
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LOGITS_PER_PART = 1 << 24
"""The most logits that are held while the other tokens are drawn."""


class DrawnBeside(NamedTuple):
    """Tokens that were drawn in S states beside the true ones."""

    p: Tensor
    """[S]: of the true token."""
    squares: Tensor
    """[S]: sum_c p_c^2."""
    others: Tensor
    """[S, n - 1]: the drawn tokens."""


@dataclass(frozen=True, eq=False)
class TokenHead:
    """The head of a causal model of transformers, at a temperature."""

    model: Any
    temperature: float

    def log_probs(self, hidden: Tensor, tokens: Tensor, log_p: Tensor) -> Tensor:
        """ln p of tokens [B, T, n], from hidden states [B, T, H] and ln p [B, T] of the
        true tokens.
        """
        # only tokens that differ from the true one: in most states there is none
        other = tokens != tokens[..., :1]
        row, step, _ = other.nonzero(as_tuple=True)
        state = hidden[row, step].float()
        difference = self.logit(state, tokens[other]) - self.logit(state, tokens[row, step, 0])
        added = torch.zeros_like(tokens, dtype=difference.dtype).masked_scatter(other, difference)
        return log_p.unsqueeze(-1) + added

    def logit(self, state: Tensor, token: Tensor) -> Tensor:
        """The scaled logit [S] of one token [S] after each state [S, H]."""
        head = self.model.get_output_embeddings()
        # in float32: the difference of two logits is small beside them
        with torch.autocast(state.device.type, enabled=False):
            logit = (state * head.weight[token].float()).sum(-1)
            if head.bias is not None:
                logit = logit + head.bias[token].float()
        return self.scaled(logit)

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits after the model's soft cap, if it has one, and the temperature."""
        config = self.model.config.get_text_config()
        cap = getattr(config, "final_logit_softcapping", None)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits / self.temperature

    def draw(self, hidden: Tensor, true: Tensor, count: int) -> DrawnBeside:
        """Draw so many tokens after each hidden state [S, H], beside the true ones [S]."""
        head = self.model.get_output_embeddings()
        # the logits of all states and the whole vocabulary would not fit into memory
        at_once = max(1, LOGITS_PER_PART // head.weight.shape[0])
        found = []
        for some, token in zip(hidden.split(at_once), true.split(at_once), strict=True):
            logits = nn.functional.linear(some.to(head.weight.dtype), head.weight, head.bias)
            # in double precision the sums over a large vocabulary keep its rarest tokens
            p = self.scaled(logits.float()).double().softmax(-1)
            others = torch.multinomial(p, count, replacement=True)
            of_true = p.gather(-1, token.unsqueeze(-1)).squeeze(-1)
            found.append((of_true, p.square().sum(-1), others))
        p, squares, others = (torch.cat(each) for each in zip(*found, strict=True))
        return DrawnBeside(p.float(), squares.float(), others)
