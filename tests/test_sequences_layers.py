"""One compiled layer for all layers of a model: the same tokens and gradients, and few programs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import arsm
from arsm.sequences import (
    Branch,
    Decoding,
    Group,
    SequenceEstimate,
    Slots,
    Strategy,
    Transformers,
    estimate,
)
from tests.slot_models import EOS, MODELS, by_place, llama, ragged, wrapped
from tests.test_sequences_transformers import Adapted

layers: Any = pytest.importorskip(
    "arsm.sequences.transformers_layers", reason="transformers is in the extra `transformers`"
)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the functions that were compiled, once per program; the programs run as they
    are, which takes a fraction of the compiler's time.
    """
    made: list[str] = []
    torch.compiler.reset()
    functions: dict[Any, Any] = {}

    def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
        def backend(graph: Any, inputs: list[Any]) -> Any:
            made.append(run.__name__)
            return graph.forward

        if run not in functions:
            # an interruption of the program would be a second one, in every step
            functions[run] = torch.compile(run, dynamic=True, fullgraph=True, backend=backend)
        return functions[run]

    monkeypatch.setattr(layers, "compiled", compiled)
    yield made
    torch.compiler.reset()


@pytest.mark.parametrize("make", MODELS)
def test_compiled_steps_draw_the_same_tokens(make: Callable[[], Any], programs: list[str]) -> None:
    plain = wrapped(make)
    prompts, mask = ragged(11)
    row = torch.arange(11).repeat_interleave(3)
    found = []
    for model in (plain, Transformers(plain.model, compiled=True)):
        # halved as sequences end: several numbers of rows
        slots = Slots(model.slots(), 20, look_every=1)
        found.append(slots.sample(prompts, mask, row, Decoding(9, EOS), 3, noise=by_place(3)))
        assert slots.tally.row_steps < 20 * slots.tally.steps
    assert torch.equal(found[0].tokens, found[1].tokens)
    torch.testing.assert_close(found[0].log_probs, found[1].log_probs, rtol=1e-6, atol=1e-6)
    assert "one_token" in programs


def three_layers() -> nn.Module:
    torch.manual_seed(0)
    module = llama(num_hidden_layers=3).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def test_all_layers_and_rows_have_one_program(programs: list[str]) -> None:
    slots = Slots(Transformers(three_layers(), compiled=True).slots(), 40)
    for count in (40, 17, 9):
        prompts, mask = ragged(count)
        slots.sample(prompts, mask, torch.arange(count), Decoding(9), noise=by_place(1))
    assert slots.tally.captures == 3
    # three layers and three numbers of rows, two of which happened to agree with another size
    assert 1 <= len(programs) <= 2
    assert set(programs) == {"one_token"}


def even(prompts: Tensor, tokens: Tensor) -> Tensor:
    return (tokens % 2 == 0).double().sum(-1)


def credited(
    strategy: Strategy,
    model: Transformers,
    prompts: Tensor,
    mask: Tensor,
    micro_batch: int,
    generator: torch.Generator,
) -> SequenceEstimate:
    """Six tokens per prompt, rewarded for even ones."""
    return estimate(
        strategy,
        model,
        prompts,
        even,
        max_tokens=6,
        eos=EOS,
        mask=mask,
        micro_batch=micro_batch,
        generator=generator,
    )


@pytest.mark.parametrize("wrap", [lambda module: module, Adapted], ids=["bare", "PEFT"])
@pytest.mark.parametrize("strategy", [Branch(arsm.RLOO(4)), Group(4)], ids=["branch", "group"])
def test_gradients_are_the_same(
    strategy: Strategy, wrap: Callable[[nn.Module], nn.Module], programs: list[str]
) -> None:
    module = wrap(three_layers())
    prompts, mask = ragged(11)
    plain, compiled = Transformers(module), Transformers(module, compiled=True)

    def gradients(model: Transformers, micro_batch: int, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        out = credited(strategy, model, prompts, mask, micro_batch, generator)
        return list(torch.autograd.grad(out.value.mean(), list(module.parameters())))

    for seed, micro_batch in enumerate((11, 4, 7)):
        expected = gradients(plain, micro_batch, seed)
        torch.testing.assert_close(gradients(compiled, micro_batch, seed), expected)
        assert max(float(each.abs().max()) for each in expected) > 0
        # an optimiser's step: both have the same weights
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    # with and without a mask
    assert 1 <= programs.count("pass_with_graph") <= 2
    assert 1 <= programs.count("pass_without_graph") <= 2


def test_a_deep_copy_has_weights_of_its_own(programs: list[str]) -> None:
    model = Transformers(three_layers(), compiled=True)
    copied = copy.deepcopy(model)
    prompts, _ = ragged(3)
    before = copied.logits(prompts, prompts)
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.zero_()
    assert torch.equal(copied.logits(prompts, prompts), before)
    assert not torch.equal(model.logits(prompts, prompts), before)


def test_dropout_follows_the_model(programs: list[str]) -> None:
    module = llama(attention_dropout=0.5).double().train()
    model = Transformers(module, compiled=True)
    prompts, _ = ragged(3)
    first, second = (model.logits(prompts, prompts) for _ in range(2))
    assert not torch.equal(first, second)
    module.eval()
    first, second = (model.logits(prompts, prompts) for _ in range(2))
    assert torch.equal(first, second)


def test_models_that_cannot_be_compiled_are_named() -> None:
    with pytest.raises(ValueError, match="compiled already; pass it as it was before"):
        Transformers(torch.compile(llama(), backend="eager"), compiled=True)  # pyright: ignore[reportArgumentType]
    module = llama()
    module.model.layers = nn.ModuleDict({str(i): x for i, x in enumerate(module.model.layers)})
    with pytest.raises(ValueError, match="one list of 2 layers, but LlamaForCausalLM has 0; leave"):
        Transformers(module, compiled=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and its compiler")
def test_compiled_and_captured_on_a_gpu() -> None:
    module = three_layers().float().cuda()
    prompts, mask = (x.cuda() for x in ragged(40))
    models = [Transformers(module, compiled=compiled) for compiled in (False, True)]
    drawn = []
    for model in models:
        generator = torch.Generator("cuda").manual_seed(0)
        drawn.append(credited(Branch(arsm.RLOO(4)), model, prompts, mask, 16, generator).tokens)
    # rounding moves a draw now and then
    assert float((drawn[0] == drawn[1]).double().mean()) > 0.9

    # given completions: both have the same sequences, and the same credit
    generator = torch.Generator("cuda").manual_seed(1)
    given = credited(Group(2), models[0], prompts[::2], mask[::2], 16, generator).tokens
    expected, found = (credit_of_given(model, prompts, mask, given) for model in models)
    largest = max(float(each.abs().max()) for each in expected)
    assert largest > 1e-3
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4 * largest)


def credit_of_given(
    model: Transformers, prompts: Tensor, mask: Tensor, completions: Tensor
) -> list[Tensor]:
    """The gradient of a group's credit: nothing is drawn, so that it depends on the model alone."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        out = estimate(
            Group(2),
            model,
            prompts[::2],
            even,
            max_tokens=6,
            eos=EOS,
            mask=mask[::2],
            completions=completions,
            micro_batch=16,
        )
        gradients = torch.autograd.grad(out.value.mean(), list(model.model.parameters()))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return list(gradients)


def test_credit_of_given_completions_is_the_same(programs: list[str]) -> None:
    """The comparison that runs on a GPU, by programs that run as they are."""
    module = three_layers()
    prompts, mask = ragged(40)
    plain, compiled = (Transformers(module, compiled=compiled) for compiled in (False, True))
    generator = torch.Generator().manual_seed(0)
    drawn = credited(Group(2), plain, prompts[::2], mask[::2], 16, generator).tokens
    expected = credit_of_given(plain, prompts, mask, drawn)
    assert max(float(each.abs().max()) for each in expected) > 1e-3
    torch.testing.assert_close(credit_of_given(compiled, prompts, mask, drawn), expected)
    # it can fail: other weights of one matrix give another gradient
    weight = module.get_parameter("model.layers.1.mlp.down_proj.weight")
    with torch.no_grad():
        weight.mul_(1.1)
    moved = credit_of_given(plain, prompts, mask, drawn)
    assert not all(torch.allclose(one, other) for one, other in zip(moved, expected, strict=True))
