"""Draws of tokens: they follow the model's distribution, beside sampled and given sequences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from arsm.sequences import Decoding, Slots, live_tokens
from arsm.sequences.draws import draw_beside, draw_tokens
from tests.slot_models import EOS, V, llama, ragged, wrapped
from tests.statistics import deviations


@pytest.mark.parametrize("vocabulary", [V, 700], ids=["one piece", "blocks"])
def test_draws_follow_the_distribution(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 0.5 * torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    logits[3] = -torch.inf
    u = torch.rand(1 << 13, 4, dtype=torch.float64, generator=generator)
    drawn = draw_tokens(logits.expand(1 << 13, -1), u, 1.5)
    p = (logits / 1.5).softmax(-1)
    counted = nn.functional.one_hot(drawn.tokens.flatten(), vocabulary).double()
    assert deviations(counted, p).max() < 1
    assert not (drawn.tokens == 3).any()
    torch.testing.assert_close(drawn.log_probs, p.log()[drawn.tokens])
    torch.testing.assert_close(drawn.largest, p.max().log().expand(1 << 13))


def test_masked_tokens_are_not_drawn_among_tiny_ones() -> None:
    """Tokens 64 to 126 share a probability of 1e-15, which is a few units of the sums; 127 has
    none.
    """
    logits = torch.full((1, 640), -torch.inf, dtype=torch.float64)
    logits[0, 0] = 0
    logits[0, 64:127] = math.log(1e-15 / 63)
    token = int(draw_tokens(logits, torch.tensor([[1 - 2.0**-53]], dtype=torch.float64)).tokens)
    assert 64 <= token < 127


def test_other_draws_are_samples_of_the_model() -> None:
    """Every draw of a state has the model's own distribution, and the draws are independent."""
    model = wrapped(llama)
    prompts, mask = ragged(2)
    row = torch.arange(2).repeat_interleave(4000)
    slots = Slots(model.slots(), 1000, look_every=3)
    found = slots.sample(
        prompts, mask, row, Decoding(2), 3, generator=torch.Generator().manual_seed(0)
    )
    p = model.logits(prompts, torch.zeros(2, 1, dtype=torch.int64), mask).softmax(-1)[:, 0].detach()
    for prompt in range(2):
        counted = nn.functional.one_hot(found.tokens[row == prompt, 0], V).double()  # [4000, 3, V]
        assert deviations(counted, p[prompt].expand(3, -1)).max() < 1
        pairs = counted[:, 1].unsqueeze(-1) * counted[:, 2].unsqueeze(-2)
        assert deviations(pairs, p[prompt].unsqueeze(-1) * p[prompt]).max() < 1
    # in the second state given the first token
    first = found.tokens[:, 0, 0]
    likely = int(p[0].argmax())
    after = (
        model.logits(prompts[:1], torch.tensor([[likely, 0]]), mask[:1]).softmax(-1)[0, 1].detach()
    )
    counted = nn.functional.one_hot(found.tokens[(row == 0) & (first == likely), 1], V).double()
    assert deviations(counted, after.expand(3, -1)).max() < 1


def test_draws_beside_given_sequences() -> None:
    model = wrapped(llama)
    prompts, mask = ragged(5)
    tokens = torch.randint(V, (5, 6), generator=torch.Generator().manual_seed(5))
    live = live_tokens(tokens, EOS)
    tokens = tokens.where(live, EOS)
    found = draw_beside(
        model,
        prompts,
        mask,
        tokens,
        live,
        4,
        Decoding(1).limit,
        0.7,
        rows=2,
        generator=torch.Generator().manual_seed(0),
    )
    log_p = (model.logits(prompts, tokens, mask) / 0.7).log_softmax(-1)
    assert torch.equal(found.tokens[..., 0], tokens)
    torch.testing.assert_close(found.log_probs[live], log_p.gather(-1, found.tokens)[live])
    torch.testing.assert_close(found.largest[live], log_p.amax(-1)[live])
    assert bool((found.tokens[~live] == EOS).all())
    prompts, mask, tokens, live = (x[:1].expand(4000, -1) for x in (prompts, mask, tokens, live))
    generator = torch.Generator().manual_seed(0)
    limit = Decoding(1).limit
    many = draw_beside(
        model, prompts, mask, tokens, live, 2, limit, 0.7, rows=1000, generator=generator
    )
    counted = nn.functional.one_hot(many.tokens[:, 0, 1], V).double()
    assert deviations(counted, log_p[0, 0].exp().detach()).max() < 1
