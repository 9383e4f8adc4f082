"""The planted defects are wrong and the correct losses are right, by enumeration alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from arsm.referee.language import (
    AFTER,
    ANSWERS,
    CONTEXTS,
    INSIDE,
    MAX_TOKENS,
    PROMPTS,
    LanguageModel,
    random_table,
)
from arsm.referee.worlds import NEUTRAL, REWARDS, SETTINGS, Objective, Setting, World, mean_gradient
from tests.trainer_losses import CORRECT, DEFECTS, Loss

ROUNDING = 1e-5
SMALL = [s for s in SETTINGS if s.role in ("", "f") and s.answers < 4 and len(s.prompts) == 1]
PAIR = [s for s in SETTINGS if len(s.prompts) == 2]


def errors(loss: Loss, objective: Objective, settings: list[Setting]) -> Iterator[float]:
    """The largest error of the mean gradient in any entry, of each setting."""
    world = World(objective)
    for setting in settings:
        yield float((mean_gradient(loss, world, setting) - world.truth(setting)).abs().max())


def test_there_are_enough_of_both() -> None:
    assert len(CORRECT) >= 30
    assert len(DEFECTS) >= 16


@pytest.mark.parametrize("page", ["results/audit/README.md", "docs/guides/trainer_refereed.md"])
def test_the_pages_say_how_many_there_are(page: str) -> None:
    words = (Path(__file__).parents[1] / page).read_text()
    assert f"{len(DEFECTS)} planted defects" in words
    assert f"{len(CORRECT)} correct losses" in words


@pytest.mark.parametrize("name", CORRECT)
def test_correct_losses_have_the_right_mean(name: str) -> None:
    assert max(errors(*CORRECT[name], SMALL)) < ROUNDING


@pytest.mark.parametrize("name", DEFECTS)
def test_planted_defects_do_not(name: str) -> None:
    loss, _, objective = DEFECTS[name]
    assert any(error > 100 * ROUNDING for error in errors(loss, objective, SMALL + PAIR))


@pytest.mark.parametrize(
    "objective", [Objective(), Objective(0.3), Objective(0.2, 0.7), Objective(0.3, stale=True)]
)
def test_the_truth_is_a_difference_quotient(objective: Objective) -> None:
    """By enumeration of the answers through the model's own forward pass."""
    world = World(objective)

    def value(table: torch.Tensor) -> float:
        total = 0.0
        for prompt, answers, rewards in zip(PROMPTS, ANSWERS, REWARDS, strict=True):
            for answer, reward in zip(answers, rewards, strict=True):
                tokens = torch.tensor([[*prompt, *answer]])
                places = torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1)
                chosen = torch.tensor(answer)
                log_p, reference = (
                    float(
                        (LanguageModel(t)(tokens) / objective.temperature)
                        .log_softmax(-1)[0, places, chosen]
                        .sum()
                    )
                    for t in (table, world.reference)
                )
                total += (
                    math.exp(log_p) * (reward - objective.beta * (log_p - reference)) / len(PROMPTS)
                )
        return total

    truth = world.truth(SETTINGS[0])
    for context, row in CONTEXTS.items():
        for token in range(4):
            step = torch.zeros_like(world.table)
            step[row, token] = 1e-4
            found = (value(world.table + step) - value(world.table - step)) / 2e-4
            assert found == pytest.approx(float(truth[row, token]), abs=1e-6), context


def test_prompts_and_what_follows_the_end_have_no_gradient() -> None:
    truth = World(Objective(beta=0.3)).truth(SETTINGS[0])
    assert not bool(truth[[*INSIDE, AFTER]].any())


def test_a_divergence_from_itself_is_nothing() -> None:
    with_, without = World(Objective(beta=0.3)), World(Objective())
    for setting in NEUTRAL:
        torch.testing.assert_close(with_.truth(setting), without.truth(setting))


def test_a_batch_is_what_trainers_have() -> None:
    world = World(Objective(stale=True))
    setting = Setting("both", (0, 1), 2, padding=1)
    batch = world.batch(setting, torch.tensor([[0, 3], [1, 2]]), world.table)
    assert batch.prompts.tolist() == [[0, 0, 2], [0, 0, 2], [3, 2, 3], [3, 2, 3]]
    assert batch.completions.tolist() == [[1, 0, 0, 0], [2, 2, 3, 0], [2, 1, 0, 0], [2, 3, 1, 0]]
    assert batch.mask.sum(-1).tolist() == [1, 3, 2, 3]
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.rewards.tolist() == pytest.approx([0.6, 0.1, 0.8, -0.2])
    live = batch.mask.bool()
    sampled = LanguageModel(world.sampler)(
        torch.cat([batch.prompts, batch.completions], 1),
        torch.cat([batch.prompt_mask, batch.mask], 1),
    )[:, 2:-1].log_softmax(-1)
    found = sampled.gather(-1, batch.completions.unsqueeze(-1)).squeeze(-1)[live]
    torch.testing.assert_close(batch.sampler_log_p[live].double(), found)
    assert not bool(batch.sampler_log_p[~live].any())
    assert float((batch.log_p().detach() - batch.sampler_log_p)[live].abs().max()) > 0.1
    assert batch.max_tokens == MAX_TOKENS


def test_tables_share_their_tree() -> None:
    first, second = ((random_table(s) < -10).nonzero().tolist() for s in (1, 5))
    assert first == second
