"""Sequences against enumeration of all completions; tests/statistics.py states the false-alarm rate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import arsm
from arsm import sequences
from arsm.sequences import Branch, Group
from tests.statistics import deviations
from tests.tables import Setting, Table, reward

SETTINGS = {
    "plain": Setting(),
    "ends": Setting(eos=1),
    "ragged, ends, temperature": Setting(eos=0, ragged=True, temperature=0.7),
    "masked tokens": Setting(vocabulary=4, banned=2, eos=3),
    "four tokens": Setting(vocabulary=2, max_tokens=4, eos=0, temperature=1.5),
    "kl": Setting(eos=2, kl=0.4, temperature=0.8),
}


def critic(prompts: Tensor, tokens: Tensor) -> Tensor:
    """Some guess that depends on the state alone: the tokens before it."""
    before = torch.cat([prompts[:, 1:2], tokens[:, :-1]], -1).cumsum(-1)
    return torch.sin(before.unsqueeze(-1) + torch.arange(VOCABULARY[0]).double())


VOCABULARY = [3]

STRATEGIES = {
    "RLOO": Branch(arsm.RLOO(3)),
    "ARSM": Branch(arsm.ARSM()),
    "ARSM references": Branch(arsm.ARSM(references=1)),
    "local expectation": Branch(arsm.LocalExpectation()),
    "exact plus sampled": Branch(arsm.ExactPlusSampled(1, 1)),
    "REINFORCE": Branch(arsm.Reinforce()),
    "keep": Branch(arsm.RLOO(3), keep=0.6),
    "critic": Branch(arsm.RLOO(3), keep=0.7, critic=critic),
    "leave-one-out": Group(3),
    "optimal token baseline": Group(3, baseline="token"),
}
BIASED = {"GRPO": Group(3, normalise="std"), "Dr. GRPO": Group(3, baseline="mean")}
ROWS = 6000


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_unbiased(setting: Setting, strategy: sequences.Strategy) -> None:
    assert strategy.unbiased
    VOCABULARY[0] = setting.vocabulary
    assert deviations(setting.estimates(strategy, ROWS), setting.exact()).max() < 1


@pytest.mark.parametrize("strategy", BIASED.values(), ids=BIASED.keys())
def test_bias_is_caught(strategy: sequences.Strategy) -> None:
    assert not strategy.unbiased
    setting = SETTINGS["ends"]
    assert deviations(setting.estimates(strategy, 4 * ROWS), setting.exact()).max() > 1
