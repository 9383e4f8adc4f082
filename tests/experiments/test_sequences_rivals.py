"""Other ways to give credit, against enumeration; tests/statistics.py has the error rate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import arsm
from arsm import sequences
from arsm_experiments.sequences.rivals import BestOf, Unsure, ValueModel, VinePPO, by_success
from tests.experiments.tiny_llama import save_tiny_llama
from tests.statistics import deviations
from tests.tables import Setting, reward

SETTINGS = {
    "ends": Setting(eos=1),
    "four tokens": Setting(vocabulary=2, max_tokens=4, eos=0, temperature=1.5),
}


def of_the_prefix(
    prompts: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """A value in 0 to 1 that depends on the tokens before each state."""
    before = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], -1).cumsum(-1)
    return (before + prompts.sum(-1, keepdim=True)).double().sin().abs()


STRATEGIES: dict[str, sequences.Strategy] = {
    "unsure": Unsure(2, 4, 0.5),
    "vineppo": VinePPO(2),
    "chance by value": sequences.Branch(arsm.RLOO(3), chance=by_success(of_the_prefix, 0.2)),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_unbiased(setting: Setting, strategy: sequences.Strategy) -> None:
    assert strategy.unbiased
    assert deviations(setting.estimates(strategy, 6000), setting.exact()).max() < 1


def test_the_best_answer_is_imitated_unless_it_earned_nothing() -> None:
    setting = SETTINGS["ends"]
    prompts, _ = setting.prompts(40)

    def some(prompts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return (reward(prompts, tokens) - 3).clamp_min(0)

    out = sequences.estimate(BestOf(3), setting.model(40), prompts, some, max_tokens=3, eos=1)
    assert out.credit is not None
    weights = out.credit.weights.squeeze(-1).view(40, 3, 3)
    best = out.rewards.max(-1)
    for row in range(40):
        expected = torch.zeros(3, 3, dtype=weights.dtype)
        if best.values[row] > 0:
            expected[best.indices[row]] = out.mask[row, best.indices[row]].to(weights.dtype)
        assert torch.equal(weights[row], expected)
    assert (best.values == 0).any()
    assert (best.values > 0).any()


def test_a_value_model_learns_what_a_state_is_worth(tmp_path: Path) -> None:
    """Answers that begin with token 3 are right, so that the first state is worth a half and all
    others nothing or one.
    """
    transformers = pytest.importorskip("transformers")
    folder = save_tiny_llama(tmp_path / "tiny")
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder)
    critic = ValueModel(policy, rate=3e-3, micro_batch=5)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 5, (32, 4), generator=generator)
    prompts = torch.tensor([[1, 6, 7]]).expand(32, -1)
    mask = torch.tensor([[False, True, True]]).expand(32, -1)
    right = (tokens[:, 0] == 3).double()
    live = torch.ones_like(tokens, dtype=torch.bool)
    first = last = critic.fit(prompts, tokens, live, right, mask)
    for _ in range(80):
        last = critic.fit(prompts, tokens, live, right, mask)
    assert last < 0.6 * first
    v = critic(prompts, tokens, mask)
    assert v.shape == (32, 4)
    assert v[right == 1, 1:].mean() > 0.8
    assert v[right == 0, 1:].mean() < 0.2
    # what stands under the padding does not matter
    other = prompts.clone()
    other[:, 0] = 9
    torch.testing.assert_close(critic(other, tokens, mask), v)
    # nor whether there is any
    torch.testing.assert_close(critic(prompts[:, 1:], tokens, None), v)
    with torch.no_grad():
        read = torch.cat([prompts[:, 1:], tokens[:, :-1]], -1)
        hidden = critic.layers(input_ids=read, use_cache=False).last_hidden_state[:, 1:]
        torch.testing.assert_close(critic.head(hidden).squeeze(-1).sigmoid(), v)
