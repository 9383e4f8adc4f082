"""The cost of leaving a reference model: ln p - ln p_reference of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.sequences.batch import LogitsOf, token_log_probs
from arsm.sequences.decode import Decoding, Prefixes
from arsm.sequences.draws import Sampled, log_probabilities
from arsm.sequences.heads import logits_in_parts
from arsm.sequences.memory import limited_by
from arsm.sequences.model import Model


@dataclass(frozen=True, eq=False)
class Costs:
    """ln p - ln p_reference of tokens; zeros without a reference."""

    reference: Model | None
    prompts: Tensor
    """[N, P]."""
    mask: Tensor | None
    decoding: Decoding
    vocabulary: int
    micro_batch: int

    @torch.no_grad()
    def __call__(self, which: Tensor, tokens: Tensor, log_p: Tensor, counts: Tensor) -> Tensor:
        """[R, T] of completions of the prompts `which` [R], where `counts` [R, T]."""
        # zeros where nothing counts: returns are sums over all columns
        ratio = torch.zeros_like(log_p)
        if self.reference is None or tokens.shape[0] == 0:
            return ratio
        with limited_by("micro_batch", self.micro_batch, "computing the reference's logits"):
            for part in torch.arange(tokens.shape[0], device=tokens.device).split(self.micro_batch):
                self._add(self.reference, part, which, tokens, log_p, counts, ratio)
        return ratio

    def _add(
        self,
        reference: Model,
        part: Tensor,
        which: Tensor,
        tokens: Tensor,
        log_p: Tensor,
        counts: Tensor,
        ratio: Tensor,
    ) -> None:
        """Write the ratios of some completions."""
        width = tokens.shape[1]
        mask = None if self.mask is None else self.mask[which[part]]
        states = logits_in_parts(
            reference,
            self.prompts[which[part]],
            tokens[part],
            mask,
            counts[part],
            self.decoding.limit,
        )
        for some, logits in states:
            if logits.shape[-1] != self.vocabulary:
                raise ValueError(
                    f"The reference has a vocabulary of {logits.shape[-1]} tokens, but the "
                    f"model's has {self.vocabulary}; they must share one."
                )
            row = part[some // width]
            step = some % width
            log_q = token_log_probs(logits, tokens[row, step], self.decoding.temperature)
            ratio[row, step] = log_p[row, step] - log_q.to(log_p.dtype)


def with_actions(
    log_p: Tensor,
    prefixes: Prefixes,
    sampled: Sampled,
    logits_of: LogitsOf,
    temperature: float,
    micro_batch: int,
) -> Tensor:
    """ln p [R, T] of completions with that of the tokens that they were given, which
    their sampler does not know.
    """
    given = (prefixes.action >= 0).nonzero().squeeze(-1)
    row = prefixes.row[given]
    step = prefixes.step[given]
    action = prefixes.action[given]
    # the true sequence's sampler recorded ln p of all draws of the state
    drawn = sampled.tokens[row, step] == action.unsqueeze(-1)
    which = drawn.byte().argmax(-1, keepdim=True)
    found = sampled.log_probs[row, step].gather(-1, which).squeeze(-1)
    # not drawn, but asked for by an estimator that reads all logits
    missing = (~drawn.any(-1)).nonzero().squeeze(-1)
    if missing.shape[0]:
        shape = sampled.largest.shape
        state = row[missing] * shape[1] + step[missing]
        log_probs = _log_probs(state, action[missing], shape, logits_of, temperature, micro_batch)
        found = found.index_put((missing,), log_probs.to(found.dtype))
    return log_p.index_put((given, step), found.to(log_p.dtype))


def _log_probs(
    state: Tensor,
    action: Tensor,
    shape: torch.Size,
    logits_of: LogitsOf,
    temperature: float,
    micro_batch: int,
) -> Tensor:
    """ln p [n] of actions [n] in states [n] of the [M T] of true sequences, some of which may be
    the same.
    """
    rows, width = shape
    wanted = torch.zeros(rows * width, dtype=torch.bool, device=state.device)
    wanted = wanted.index_fill(0, state, True).view(rows, width)
    found = torch.zeros(state.shape, dtype=torch.float64, device=state.device)
    for start in range(0, rows, micro_batch):
        some = slice(start, min(start + micro_batch, rows))
        for states, logits in logits_of(some, wanted):
            here = states + start * width
            members = torch.isin(state, here).nonzero().squeeze(-1)
            # the states of a part ascend
            place = torch.searchsorted(here, state[members])
            log_p = log_probabilities(logits, temperature)
            found[members] = log_p[place, action[members]].double()
    return found
