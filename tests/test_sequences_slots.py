"""Decoding in slots: the same tokens as step by step in waves, whatever the number of slots;
records of all draws.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
from arsm.sequences import (
    Branch,
    Decoding,
    Ends,
    Group,
    Prefixes,
    Slots,
    Strategy,
    Waves,
    complete,
    estimate,
    live_tokens,
)
from arsm.sequences.board import Rows, step
from arsm.sequences.draws import Sampled
from tests.slot_models import (
    EOS,
    MODELS,
    V,
    by_place,
    gemma3,
    llama,
    qwen,
    ragged,
    some_prefixes,
    wrapped,
)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("padded", [False, True])
def test_sampled_tokens_equal_those_of_waves(make: Callable[[], Any], padded: bool) -> None:
    model = wrapped(make)
    prompts, mask = ragged(11)
    mask = mask if padded else None
    row = torch.arange(11).repeat_interleave(2)
    decoding, noise = Decoding(9, EOS, 0.8), by_place(4)
    expected = Waves(model).sample(prompts, mask, row, decoding, 4, noise=noise)
    assert expected.tokens.shape == (22, 9, 4)
    assert 0 < int((expected.tokens[..., 0] == EOS).any(-1).sum()) < 22
    found = Slots(model.slots(), 5).sample(prompts, mask, row, decoding, 4, noise=noise)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.largest, expected.largest, atol=1e-5, rtol=0)
    # the record belongs to the model's own distributions
    true = found.tokens[..., 0]
    live = live_tokens(true, EOS)
    log_p = (
        model.logits(prompts[row], true, None if mask is None else mask[row]) / 0.8
    ).log_softmax(-1)
    assert (found.log_probs - log_p.gather(-1, found.tokens))[live].abs().max() < 1e-5
    assert (found.largest - log_p.amax(-1))[live].abs().max() < 1e-5
    assert not found.log_probs[~live].any()
    assert bool((found.tokens[~live] == EOS).all())


@pytest.mark.parametrize("make", MODELS)
def test_branches_equal_those_of_waves(make: Callable[[], Any]) -> None:
    model = wrapped(make)
    prompts, mask = ragged(6)
    known = torch.randint(3, V, (6, 8), generator=torch.Generator().manual_seed(2))
    prefixes, decoding = some_prefixes(known, True), Decoding(8, EOS)
    expected = complete(model, prompts, mask, prefixes, decoding, noise=by_place(1))
    found = Slots(model.slots(), 16).complete(prompts, mask, prefixes, decoding, noise=by_place(1))
    assert torch.equal(found.tokens, expected.tokens)


def test_several_ends() -> None:
    model = wrapped(llama)
    prompts, mask = ragged(11)
    row = torch.arange(11).repeat_interleave(2)
    ends = [EOS, 7, 4]
    decoding, noise = Decoding(9, ends), by_place(3)
    expected = Waves(model).sample(prompts, mask, row, decoding, 3, noise=noise)
    slots = Slots(model.slots(), 5)
    found = slots.sample(prompts, mask, row, decoding, 3, noise=noise)
    assert torch.equal(found.tokens, expected.tokens)
    # every end ends some sequence, and the first is the padding
    true = found.tokens[..., 0]
    live = live_tokens(true, ends)
    last = true[torch.arange(22), live.sum(-1) - 1]
    assert set(ends) <= set(last.tolist())
    assert int((true[live] == 7).sum()) == int((last == 7).sum())
    assert bool((true[~live] == EOS).all())
    # branches whose first token is 7 end with it
    prefixes = some_prefixes(torch.where(live, true, 5)[:6], True)
    expected = complete(model, prompts[:6], mask[:6], prefixes, decoding, noise=by_place(1))
    played = slots.complete(prompts[:6], mask[:6], prefixes, decoding, noise=by_place(1))
    assert torch.equal(played.tokens, expected.tokens)
    ended = (prefixes.action == 7).nonzero().squeeze(-1)
    after = torch.arange(9) > prefixes.step[ended].unsqueeze(-1)
    assert bool((played.tokens[ended][after] == EOS).all())


@pytest.mark.parametrize("rows", [1, 3, 7, 400])
@pytest.mark.parametrize("look_every", [1, 4, 9])
def test_numbers_of_slots_and_looks_change_nothing(rows: int, look_every: int) -> None:
    model = wrapped(llama)
    prompts, mask = ragged(6)
    for width in (1, 2, 20) if rows in (3, 400) else (5,):
        known = torch.randint(3, V, (6, width), generator=torch.Generator().manual_seed(2))
        decoding = Decoding(width, EOS)
        slots = Slots(model.slots(), rows, look_every=look_every, known=4)
        prefixes = some_prefixes(known, False)
        expected = complete(model, prompts, mask, prefixes, decoding, noise=by_place(1))
        found = slots.complete(prompts, mask, prefixes, decoding, noise=by_place(1))
        assert torch.equal(found.tokens, expected.tokens)
        given = torch.arange(width) == prefixes.step.unsqueeze(-1)
        torch.testing.assert_close(
            found.log_probs, expected.log_probs.masked_fill(given, 0), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("width", range(1, 21))
def test_all_lengths_without_an_end(width: int) -> None:
    model = wrapped(llama)
    prompts, mask = ragged(3)
    row, decoding = torch.tensor([2, 0, 1, 1]), Decoding(width)
    expected = Waves(model).sample(prompts, mask, row, decoding, 2, noise=by_place(2))
    found = Slots(model.slots(), 3).sample(prompts, mask, row, decoding, 2, noise=by_place(2))
    assert torch.equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("strategy", [Branch(arsm.RLOO(3)), Group(3)], ids=["Branch", "Group"])
def test_slots_are_an_engine(strategy: Strategy) -> None:
    model = wrapped(llama)
    prompts, mask = ragged(6)
    out = estimate(
        strategy,
        model,
        prompts,
        lambda prompts, tokens: (tokens == 7).double().sum(-1),
        max_tokens=6,
        eos=EOS,
        mask=mask,
        engine=Slots(model.slots(), 4),
        generator=torch.Generator().manual_seed(0),
    )
    assert float(out.info["mismatch"]) < 1e-6
    (-out.value.mean()).backward()
    assert all(parameter.grad is not None for parameter in model.model.parameters())


def test_slots_are_used_again_and_halved() -> None:
    model = wrapped(llama)
    prompts, mask = ragged(8)
    slots = Slots(model.slots(), 8, look_every=2)
    row, decoding = torch.arange(8), Decoding(12, EOS, 5.0)
    first = slots.sample(prompts, mask, row, decoding, 3, noise=by_place(3))
    computed = slots.tally.row_steps
    assert computed < 8 * slots.tally.steps
    held = slots._held()
    other = slots.complete(
        prompts, mask, some_prefixes(first.tokens[..., 0], False), decoding, noise=by_place(1)
    )
    assert slots._held() is held
    again = slots.sample(prompts, mask, row, decoding, 3, noise=by_place(3))
    assert torch.equal(first.tokens, again.tokens)
    assert other.tokens.shape == (8 * 12 * 2, 12)


def test_new_weights_are_seen() -> None:
    model = wrapped(llama)
    prompts, _ = ragged(4)
    slots = Slots(model.slots(), 4)
    for dtype in (None, torch.float32):
        slots = Slots(model.slots(dtype), 4)
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            found = slots.sample(prompts, None, torch.arange(4), Decoding(6), noise=by_place(1))
            log_p = model.logits(prompts, found.tokens[..., 0]).log_softmax(-1)
            apart = found.log_probs[..., 0] - log_p.gather(-1, found.tokens).squeeze(-1)
            assert apart.abs().max() < (1e-6 if dtype is None else 1e-4)


def test_sampling_in_bfloat16_keeps_the_model_as_it_is() -> None:
    model = wrapped(llama, torch.float32)
    inner: Any = model.model
    before = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    attention = inner.config._attn_implementation
    slots = Slots(model.slots(torch.bfloat16), 4)
    prompts, mask = ragged(4)
    found = slots.sample(
        prompts, mask, torch.arange(4), Decoding(6), generator=torch.Generator().manual_seed(0)
    )
    log_p = model.logits(prompts, found.tokens[..., 0], mask).log_softmax(-1)
    apart = (found.log_probs[..., 0] - log_p.detach().gather(-1, found.tokens).squeeze(-1)).abs()
    assert 1e-4 < float(apart.max()) < 0.3
    assert inner.config._attn_implementation == attention
    assert all(torch.equal(tensor, before[name]) for name, tensor in inner.state_dict().items())
    assert all(
        parameter.requires_grad and parameter.dtype == torch.float32
        for parameter in inner.parameters()
    )


def test_own_attention_is_restored_after_an_error() -> None:
    model = wrapped(llama)
    inner: Any = model.model
    slots = Slots(model.slots(), 4)

    def fails(sequence: Tensor, step: Tensor) -> Tensor:
        assert inner.config._attn_implementation == "arsm_folded"
        raise RuntimeError("noise")

    prompts, _ = ragged(4)
    with pytest.raises(RuntimeError, match="noise"):
        slots.sample(prompts, None, torch.arange(4), Decoding(6), noise=fails)
    assert inner.config._attn_implementation == "sdpa"
    expected = Waves(model).sample(prompts, None, torch.arange(4), Decoding(6), noise=by_place(1))
    found = slots.sample(prompts, None, torch.arange(4), Decoding(6), noise=by_place(1))
    assert torch.equal(found.tokens, expected.tokens)


@pytest.mark.parametrize(("make", "eos"), [*((make, EOS) for make in MODELS), (llama, [EOS, 7])])
def test_step_is_one_graph(make: Callable[[], Any], eos: Ends) -> None:
    model = wrapped(make).slots()
    cache = model.cache(3, 8)
    rows = Rows.idle(3, 4, 2, torch.float64, torch.device("cpu"))
    rows.ended.fill_(False)
    with torch.no_grad(), model.decoding():
        decode = model.decoder(cache)
        torch.compile(step, backend="eager", fullgraph=True)(decode, rows, eos, 1.0)
    assert rows.index.tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["rows", "look_every", "known"])
def test_numbers_below_one_are_refused(name: str) -> None:
    model = wrapped(llama).slots()
    with pytest.raises(ValueError, match=f"{name} must be at least 1, but is 0"):
        Slots(model, **{name: 0})  # pyright: ignore[reportArgumentType]


def test_logits_that_are_not_finite_are_named() -> None:
    model = wrapped(llama)
    slots = Slots(model.slots(), 2)
    with torch.no_grad():
        model.model.get_output_embeddings().weight[0, 0] = torch.nan  # pyright: ignore
    prompts, _ = ragged(3)
    with pytest.raises(ValueError, match="logits after 0 tokens of completion 0 are NaN"):
        slots.sample(prompts, None, torch.arange(3), Decoding(3))


def test_nothing_is_computed_for_actions_that_end() -> None:
    model = wrapped(llama)
    slots = Slots(model.slots(), 2)
    known = torch.full((1, 4), 5)
    prefixes = Prefixes(
        torch.zeros(2, dtype=torch.int64), torch.tensor([1, 3]), torch.tensor([EOS, 7]), known
    )
    found = slots.complete(ragged(1)[0], None, prefixes, Decoding(4, EOS))
    assert found.tokens.tolist() == [[5, EOS, EOS, EOS], [5, 5, 5, 7]]
    assert slots.tally.steps == 0


# ---------------------------------------------------------------- on a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("make", [llama, qwen, gemma3])
def test_a_captured_step_draws_the_tokens_of_an_eager_one(make: Callable[[], Any]) -> None:
    model = wrapped(make, torch.float32)
    model.model.cuda()
    prompts, mask = (x.cuda() for x in ragged(40))
    row = torch.arange(40, device="cuda")
    table = torch.rand(
        20_000, 32, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    ).cuda()
    found = []
    for captured in (False, True):
        slots = Slots(model.slots(), 64, captured=captured)
        sampled = Sampled.empty(0, 9, 3, EOS, row.device)
        for _ in range(2):  # the second call replays the graphs of the first
            sampled = slots.sample(
                prompts, mask, row, Decoding(9, EOS), 3, noise=lambda s, t: table[s, t.clamp(0, 31)]
            )
            gc.collect()
            # over memory that a graph must not need any more
            torch.empty(1 << 22, device="cuda").fill_(torch.nan)
        known = sampled.tokens[..., 0]
        state = torch.arange(40 * 9, device="cuda")
        prefixes = Prefixes(state // 9, state % 9, torch.full_like(state, 5), known)
        played = slots.complete(
            prompts,
            mask,
            prefixes,
            Decoding(9, EOS),
            noise=lambda s, t: table[s, t.clamp(0, 31), :1],
        )
        found.append((sampled.tokens, sampled.log_probs, played.tokens))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)
    assert torch.equal(found[0][2], found[1][2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_are_captured_again_after_a_longer_prompt() -> None:
    """Longer prompts need another cache, and so new graphs, in memory of their own."""
    model = wrapped(llama, torch.float32)
    model.model.cuda()
    slots = Slots(model.slots(), 64)
    row = torch.arange(8, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for width in (4, 40, 4, 40):
            prompts = torch.randint(V, (8, width), device="cuda")
            slots.sample(prompts, None, row, Decoding(9, EOS), 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_estimate_on_a_gpu_has_the_gradient_of_a_cpu() -> None:
    """The same completions and draws by the same generator seed are not to be had: given
    completions instead.
    """
    prompts, mask = ragged(6)
    tokens = torch.randint(V, (6, 2, 4), generator=torch.Generator().manual_seed(5))
    gradients = []
    for device in ("cpu", "cuda"):
        model = wrapped(llama)
        model.model.to(device)
        out = estimate(
            Group(2),
            model,
            prompts.to(device),
            lambda prompts, tokens: tokens.double().sin().sum(-1),
            max_tokens=4,
            mask=mask.to(device),
            completions=tokens.to(device),
            micro_batch=5,
        )
        out.value.sum().backward()
        gradients.append(
            [
                parameter.grad.cpu()
                for parameter in model.model.parameters()
                if parameter.grad is not None
            ]
        )
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)
