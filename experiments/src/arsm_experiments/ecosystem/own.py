"""This library's own strategies for sequences, judged as everybody else's are."""

from __future__ import annotations

from torch import Tensor

import arsm
from arsm import sequences
from arsm.referee.sequences import SequenceLoss
from arsm_experiments.ecosystem.entry import SAMPLES, UNBIASED, Entry, Found, judged

LARGE = 1 << 20
"""Rows at once: the referee draws all its samples in one call."""


def by_strategy(strategy: sequences.Strategy) -> SequenceLoss:
    """The loss of `sequences.estimate` with this strategy."""

    def loss(model, prompts, reward, max_tokens, eos) -> Tensor:
        out = sequences.estimate(
            strategy,
            sequences.Recompute(model),
            prompts,
            reward,
            max_tokens=max_tokens,
            eos=eos,
            rows=LARGE,
            micro_batch=LARGE,
        )
        return out.value.sum()

    return loss


def entry(name: str, claim: str, strategy: sequences.Strategy) -> Entry:
    """An entry of this library, in the environment that runs it."""

    def run() -> Found:
        found = arsm.audit_sequences(by_strategy(strategy), samples=SAMPLES)
        return judged(found, f"{SAMPLES:,}")

    return Entry(f"arsm: {name}", "arsm", "arsm", claim, run)


NORMALISED = "normalised; no claim of being unbiased"
ENTRIES = (
    entry("Group(RLOO(3))", UNBIASED, sequences.Group(arsm.RLOO(3))),
    entry("Group(OTB(3))", UNBIASED, sequences.Group(arsm.OTB(3))),
    entry("Group(GRPO(4))", NORMALISED, sequences.Group(arsm.GRPO(4))),
    entry("Branch(RLOO(2))", UNBIASED, sequences.Branch(arsm.RLOO(2))),
    entry("Branch(RLOO(3), keep=0.5)", UNBIASED, sequences.Branch(arsm.RLOO(3), keep=0.5)),
)
