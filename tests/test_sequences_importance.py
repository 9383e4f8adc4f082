"""Importance weights for completions that another distribution drew."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

import arsm
from arsm import sequences
from arsm.sequences import Branch, Decoding, Group, Importance, Prefixes
from arsm.sequences.ends import live_tokens
from tests.statistics import deviations
from tests.tables import CODES, Setting, Table, reward

SETTING = Setting(eos=1, temperature=0.9)
ROWS = 20_000


def stale(rows: int) -> sequences.Recompute:
    """Other weights than the model's."""
    table = Table(rows, SETTING.vocabulary)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, CODES, SETTING.vocabulary, generator=generator, dtype=torch.float64)
    table.table = table.table.detach() + 0.6 * noise
    return sequences.Recompute(table)


def drawn(strategy: sequences.Strategy, rows: int) -> tuple[Tensor, Tensor]:
    """Completions of the stale model and its ln q of them."""
    prompts, mask = SETTING.prompts(rows)
    row = torch.arange(rows).repeat_interleave(strategy.samples or 1)
    bare = Prefixes.bare(row, SETTING.max_tokens)
    how = Decoding(SETTING.max_tokens, SETTING.eos, SETTING.temperature, 1 << 20)
    generator = torch.Generator().manual_seed(2)
    done = sequences.complete(stale(rows), prompts, mask, bare, how, generator)
    shape = (rows, SETTING.max_tokens)
    if strategy.samples is not None:
        shape = (rows, strategy.samples, SETTING.max_tokens)
    return done.tokens.view(shape), done.log_probs.view(shape)


def estimates(strategy: sequences.Strategy, importance: Importance | None) -> Tensor:
    tokens, log_probs = drawn(strategy, ROWS)
    return SETTING.estimates(
        strategy, ROWS, completions=tokens, log_probs=log_probs, importance=importance
    )


STRATEGIES: dict[str, sequences.Strategy] = {
    "Branch": Branch(arsm.RLOO(3)),
    "budget": Branch(arsm.RLOO(3), budget=40_000),
    "logits": Branch(arsm.ARSM()),
    "Group": Group(2),
    "energies": Group(arsm.OTB(3)),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_ratios_of_sequences_are_unbiased(strategy: sequences.Strategy) -> None:
    found = estimates(strategy, Importance(math.inf, per="sequence"))
    if isinstance(strategy, Branch) and strategy.budget is not None:
        # one budget for all rows makes their estimates dependent: only their mean is independent
        found = found.unflatten(0, (100, -1)).mean(1)
    assert deviations(found, SETTING.exact()).max() < 1


def gradient_at_states_of_the_sampler() -> Tensor:
    """sum_t E_q[ sum_c p(c) Q_q(c) dln p(c) ] of rows 0 and 1, by enumeration: [2, CODES, V]."""
    every = torch.tensor(list(product(range(SETTING.vocabulary), repeat=SETTING.max_tokens)))
    live = live_tokens(every, SETTING.eos)
    every = every.masked_fill(~live, 1).unique(dim=0)
    live = live_tokens(every, SETTING.eos)
    table = Table(2, SETTING.vocabulary)
    prompts, _ = SETTING.prompts(2)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        some = prompts[row : row + 1].repeat(len(every), 1)

        def log_of(model: sequences.Recompute, some: Tensor = some) -> Tensor:
            logits = model.logits(some, every) / SETTING.temperature
            log_p = logits.log_softmax(-1).gather(-1, every.unsqueeze(-1)).squeeze(-1)
            return torch.where(live, log_p, 0)

        log_p, log_q = log_of(sequences.Recompute(table)), log_of(stale(2))
        # rho_t grad ln p_t = grad p_t / q_t
        ratio = (log_p - log_q).exp()
        total = total + (log_q.sum(-1).exp() * reward(some, every) * ratio.sum(-1)).sum()
    return torch.autograd.grad(total, table.table)[0]


def test_ratios_of_tokens_have_the_mean_that_they_claim() -> None:
    found = estimates(Group(2), Importance(math.inf))
    assert deviations(found, gradient_at_states_of_the_sampler()).max() < 1
    assert deviations(found, SETTING.exact()).max() > 1


def test_without_weights_and_with_a_cap_the_gradient_is_biased() -> None:
    capped = estimates(Group(2), Importance(1.0, per="sequence"))
    assert deviations(capped, SETTING.exact()).max() > 1
    with pytest.raises(ValueError, match=r"not samples of this model.*or correct them with import"):
        estimates(Group(2), None)


def test_weights_of_the_models_own_samples_change_nothing() -> None:
    out = []
    for importance in (None, Importance()):
        prompts, _ = SETTING.prompts(10)
        table = Table(10, SETTING.vocabulary)
        model = sequences.Recompute(table)
        tokens = torch.tensor([[0, 2, 1], [2, 1, 1]]).repeat(5, 1)
        log_probs = model.logits(prompts, tokens).log_softmax(-1).detach()
        log_probs = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        generator = torch.Generator().manual_seed(0)
        out.append(
            sequences.estimate(
                Branch(arsm.RLOO(3)),
                model,
                prompts,
                reward,
                max_tokens=3,
                eos=1,
                completions=tokens,
                log_probs=log_probs,
                importance=importance,
                generator=generator,
            )
        )
        out[-1].value.sum().backward()
    first, second = out
    assert float(second.info["effective_share"]) == pytest.approx(1)
    assert first.credit is not None
    assert second.credit is not None
    torch.testing.assert_close(first.credit.weights, second.credit.weights)


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="cap must be at least 1"):
        Importance(0.5)
    with pytest.raises(ValueError, match='per must be "token" or "sequence"'):
        Importance(per="word")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="pass completions and log_probs"):
        SETTING.estimates(Group(2), 4, importance=Importance())
    with pytest.raises(ValueError, match="per token need a credit of single tokens"):
        estimates(Branch(arsm.ARSM()), Importance())
