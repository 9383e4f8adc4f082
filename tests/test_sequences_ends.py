"""Ends that are forbidden before a length, and ends by a function of the tokens so far."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import arsm
from arsm import sequences
from arsm.sequences import Branch, Decoding, Group, Slots, Waves
from arsm.sequences.ends import live_tokens
from tests.statistics import deviations
from tests.tables import Setting, Table, reward

ROWS = 6000


def over(tokens: list[int]) -> bool:
    """After 2, 0 or after 0, 0."""
    return tokens[-2:] in ([2, 0], [0, 0])


SETTINGS = {
    "min_tokens": Setting(eos=1, max_tokens=3, min_tokens=2, temperature=0.8),
    "min_tokens and kl": Setting(eos=[1, 2], max_tokens=3, min_tokens=1, kl=0.3),
    "stop": Setting(eos=1, max_tokens=3, stop=over),
    "stop without eos": Setting(max_tokens=3, stop=over, kl=0.3),
    "both": Setting(eos=1, max_tokens=4, min_tokens=3, stop=over),
}
STRATEGIES: dict[str, sequences.Strategy] = {
    "Branch": Branch(arsm.RLOO(3)),
    "logits": Branch(arsm.ARSM()),
    "Group": Group(2),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_unbiased(setting: Setting, strategy: sequences.Strategy) -> None:
    assert deviations(setting.estimates(strategy, ROWS), setting.exact()).max() < 1


@pytest.mark.parametrize("name", ["min_tokens", "stop"])
def test_the_plain_policy_has_another_gradient(name: str) -> None:
    """So that the test above can fail."""
    plain = Setting(eos=1, temperature=SETTINGS[name].temperature)
    found = SETTINGS[name].estimates(Branch(arsm.RLOO(3)), ROWS)
    assert deviations(found, plain.exact()).max() > 1


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_given_completions_have_the_same_ends(setting: Setting) -> None:
    rows = 2000
    prompts, mask = setting.prompts(rows)
    how = Decoding(
        setting.max_tokens,
        setting.eos,
        setting.temperature,
        1 << 20,
        setting.min_tokens,
        setting.stop,
    )
    row = torch.arange(rows)
    done = Waves(setting.model(rows)).sample(
        prompts, mask, row, how, 1, torch.Generator().manual_seed(0)
    )
    tokens, log_probs = done.tokens[..., 0], done.log_probs[..., 0]
    found = setting.estimates(Branch(arsm.RLOO(3)), rows, completions=tokens, log_probs=log_probs)
    assert deviations(found, setting.exact()).max() < 1
    live = setting.live(tokens)
    assert bool((live.sum(-1) >= setting.min_tokens).all())
    assert bool(log_probs[live].isfinite().all())
    assert not bool(log_probs[~live].any())


def test_live_tokens() -> None:
    tokens = torch.tensor([[2, 0, 2, 0], [0, 1, 0, 0], [2, 2, 2, 2]])
    assert live_tokens(tokens, 1, over).sum(-1).tolist() == [2, 2, 4]
    assert live_tokens(tokens, None, over).sum(-1).tolist() == [2, 4, 4]
    assert live_tokens(tokens, None, over, 3).sum(-1).tolist() == [4, 4, 4]


@pytest.mark.parametrize(("rows", "look_every"), [(3, 1), (5, 4), (400, 9)])
def test_slots_end_where_waves_do(rows: int, look_every: int) -> None:
    pytest.importorskip("transformers", reason="transformers is in the extra `transformers`")
    from tests.slot_models import EOS, by_place, llama, ragged, some_prefixes, wrapped

    model = wrapped(llama)
    prompts, mask = ragged(11)
    row = torch.arange(11)
    odd = lambda tokens: len(tokens) > 2 and sum(tokens[-3:]) % 3 == 0  # noqa: E731
    how = Decoding(9, EOS, 0.8, min_tokens=2, stop=odd)
    slots, waves, noise = Slots(model.slots(), rows, look_every=look_every), Waves(model), by_place
    expected = waves.sample(prompts, mask, row, how, 4, noise=noise(4))
    found = slots.sample(prompts, mask, row, how, 4, noise=noise(4))
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.log_probs, expected.log_probs)
    ended = ~how.live(found.tokens[..., 0])[:, -1]
    assert int(ended.sum()) > 0
    prefixes = some_prefixes(found.tokens[..., 0], draw_some=True)
    forbidden = (prefixes.step < how.min_tokens) & (prefixes.action == EOS)
    prefixes = replace(prefixes, action=torch.where(forbidden, 5, prefixes.action))
    branches = [
        each.complete(prompts, mask, prefixes, how, noise=noise(1)) for each in (waves, slots)
    ]
    assert torch.equal(branches[0].tokens, branches[1].tokens)


def refused(message: str, kind: type[Exception] = ValueError, **options: object) -> None:
    model = sequences.Recompute(Table(2, 3))
    prompts = torch.tensor([[0, 2], [1, 2]])
    with pytest.raises(kind, match=message):
        sequences.estimate(Group(2), model, prompts, reward, max_tokens=3, eos=1, **options)  # pyright: ignore


def test_wrong_options() -> None:
    class Engine:
        def complete(self) -> None: ...

    refused("min_tokens must be at most max_tokens = 3, but is 4", min_tokens=4)
    refused("stop must be a function of a completion's tokens", TypeError, stop="END")
    refused("An engine ends sequences at eos alone", engine=Engine(), min_tokens=1)
    early: Tensor = torch.tensor([[[0, 1, 1], [0, 0, 0]]] * 2)
    refused("ends within its first 2 tokens", completions=early, min_tokens=2)
