"""The third stage of sequences: credit in micro-batches, and whether completions are samples of the
model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import arsm
from arsm import sequences
from arsm.sequences import Branch, Group
from arsm.sequences.credit import ROUNDED
from arsm.sequences.draws import inverse
from arsm.sequences.ends import live_tokens
from arsm.sequences.fit import Fit
from tests.test_sequences_memory import peak_bytes

V, ROWS, T = 7, 10, 5


class Bigram(nn.Module):
    """Logits of the next token from the last two."""

    def __init__(self, vocabulary: int = V, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.one, self.two = (
            nn.Parameter(
                torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)
            )
            for _ in "12"
        )

    def forward(self, tokens: Tensor) -> Tensor:
        before = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
        return self.one[tokens] + self.two[before].tanh()


def reward(prompts: Tensor, tokens: Tensor) -> Tensor:
    return (tokens * torch.arange(1, tokens.shape[1] + 1)).sum(-1).double().sin()


def estimate(
    strategy: sequences.Strategy, model: Any, **options: Any
) -> sequences.SequenceEstimate:
    prompts = torch.arange(ROWS).unsqueeze(-1) % V
    generator = torch.Generator().manual_seed(3)
    return sequences.estimate(
        strategy,
        model,
        prompts,
        reward,
        max_tokens=T,
        eos=1,
        temperature=0.8,
        generator=generator,
        **options,
    )


def gradients(value: Tensor, module: Bigram) -> list[Tensor]:
    return list(
        torch.autograd.grad((value * torch.arange(1.0, ROWS + 1)).sum(), list(module.parameters()))
    )


class Along:
    """`Branch`, with some weights for the branches' own tokens."""

    unbiased, samples, draws = False, None, 4

    def check(self, logits: Tensor) -> None:
        pass

    def credit(self, batch: sequences.Batch) -> sequences.TokenCredit:
        credit = Branch(arsm.RLOO(4)).credit(batch)
        assert credit.branches is not None
        tokens = credit.branches.tokens
        return replace(credit, along=(tokens + torch.arange(T)).double().cos())


STRATEGIES: dict[str, sequences.Strategy] = {
    "along branches": Along(),
    "draws": Branch(arsm.RLOO(4)),
    "draws that do not sum to 0": Branch(arsm.Reinforce(0.3)),
    "budget": Branch(arsm.RLOO(4), budget=9),
    "chance": Branch(arsm.RLOO(4), chance=sequences.by_likelihood(0.3)),
    "logits": Branch(arsm.ARSM()),
    "group": Group(3),
    "energies": Group(arsm.OTB(3)),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_micro_batches_have_the_gradient_of_an_ordinary_graph(strategy: sequences.Strategy) -> None:
    module = Bigram()
    plain = lambda tokens: module(tokens)  # noqa: E731  a function hides its parameters: an ordinary graph is made
    whole = estimate(strategy, sequences.Recompute(plain), micro_batch=1000)
    expected = gradients(whole.value, module)
    assert all(float(x.abs().max()) > 1e-3 for x in expected)
    for model in (plain, module):
        for micro_batch in (1, 3, 1000):
            out = estimate(strategy, sequences.Recompute(model), micro_batch=micro_batch)
            assert torch.equal(out.value.detach(), whole.value.detach())
            torch.testing.assert_close(gradients(out.value, module), expected)


class Passes(sequences.Recompute):
    """Keeps the tokens of every pass with a graph."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.read: list[Tensor] = []

    def logits(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled():
            self.read.append(tokens)
        return super().logits(prompts, tokens, mask)


@pytest.mark.parametrize("micro_batch", [2, 3, 16, 1000])
@pytest.mark.parametrize(
    "strategy",
    [Branch(arsm.RLOO(2)), Branch(arsm.RLOO(3), keep=0.2), Group(2)],
    ids=["Branch", "keep", "Group"],
)
def test_only_what_has_credit_is_computed(strategy: sequences.Strategy, micro_batch: int) -> None:
    """No pass over sequences without credit but for those that make a part's size round, none over
    the steps after a part's last credit, and as few parts as can be, of equal size.
    """
    model = Passes(Bigram())
    prompts = torch.arange(6 * ROWS).unsqueeze(-1) % V
    out = sequences.estimate(
        strategy,
        model,
        prompts,
        lambda prompts, tokens: (tokens == 3).any(-1).double(),
        max_tokens=T,
        eos=1,
        temperature=0.4,
        micro_batch=micro_batch,
        generator=torch.Generator().manual_seed(3),
    )
    assert out.credit is not None
    credited = (out.credit.weights != 0).any(-1)
    # some sequences have none, and some end before the last step
    have = credited.any(-1)
    lengths = (credited[have] * torch.arange(1, T + 1)).amax(-1)
    assert 0 < int(have.sum()) < have.shape[0]
    assert int(lengths.min()) < T

    model.read.clear()
    out.value.sum().backward()
    parts = -(-int(have.sum()) // micro_batch)
    sizes = [len(tokens) for tokens in model.read]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= micro_batch
    more = sum(sizes) - int(have.sum())
    if more:
        # of other sizes than before hardly any memory could be used again
        assert {size % ROUNDED for size in sizes} == {0}
        assert more < ROUNDED * parts
    else:
        assert micro_batch < ROUNDED or sum(sizes) % (ROUNDED * parts) == 0
        assert micro_batch < 1000
    # the longest together, and first; rows without credit have length 0
    length = (credited * torch.arange(1, T + 1)).amax(-1).sort(descending=True).values
    expected = [int(some.max()) for some in length[: sum(sizes)].split(sizes)]
    assert [tokens.shape[1] for tokens in model.read] == expected


class Casts(TorchDispatchMode):
    """Counts the matrices that are made narrower."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].shape == (V, V):
            self.count += options.get("dtype") == torch.bfloat16
        return func(*args, **options)


def test_weights_are_cast_once_for_all_micro_batches() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(V, V), nn.Linear(V, V, bias=False))
    found = []
    for micro_batch in (1000, 3):
        with torch.autocast("cpu", torch.bfloat16):
            out = estimate(
                Branch(arsm.RLOO(4)), sequences.Recompute(module), micro_batch=micro_batch
            )
        with Casts() as casts:
            found.append(torch.autograd.grad(out.value.sum(), list(module.parameters())))
        assert casts.count == 1
    # equal up to the rounding of a sum in bfloat16
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.02)
    assert float(found[0][1].abs().max()) > 0.1


@pytest.mark.parametrize("strategy", [Branch(arsm.RLOO(4)), Group(3)], ids=["Branch", "Group"])
def test_the_credit_is_enough_for_another_trainer(strategy: sequences.Strategy) -> None:
    """sum w ln p of the tokens in `out.credit` has the gradient of the summed values."""
    module = Bigram()
    out = estimate(strategy, sequences.Recompute(module))
    expected = torch.autograd.grad(out.value.sum(), list(module.parameters()))
    credit, tokens = out.credit, out.tokens.reshape(-1, T)
    assert credit is not None
    prompts = (torch.arange(ROWS).unsqueeze(-1) % V).repeat_interleave(len(tokens) // ROWS, 0)
    log_p = (
        (sequences.Recompute(module).logits(prompts, tokens) / 0.8)
        .log_softmax(-1)
        .gather(-1, credit.tokens)
    )
    torch.testing.assert_close(
        torch.autograd.grad((credit.weights * log_p).sum(), list(module.parameters())), expected
    )


def test_branches_own_tokens_count_up_to_their_ends() -> None:
    module = Bigram()
    out = estimate(Along(), sequences.Recompute(module))
    parameters = list(module.parameters())
    assert out.credit is not None
    assert out.branches is not None
    assert out.credit.along is not None
    plain = estimate(Branch(arsm.RLOO(4)), sequences.Recompute(module))
    added = [
        found - expected
        for found, expected in zip(
            torch.autograd.grad(out.value.sum(), parameters),
            torch.autograd.grad(plain.value.sum(), parameters),
            strict=True,
        )
    ]
    tokens = out.branches.tokens
    prompts = (torch.arange(ROWS).unsqueeze(-1) % V)[out.branches.row]
    logits = sequences.Recompute(module).logits(prompts, tokens) / 0.8
    log_p = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    live = live_tokens(tokens, 1)
    assert not bool(live.all())
    total = (out.credit.along * log_p)[live].sum()
    torch.testing.assert_close(added, list(torch.autograd.grad(total, parameters)))


def test_backward_twice_and_after_a_step() -> None:
    module = Bigram()
    out = estimate(Branch(arsm.RLOO(4)), sequences.Recompute(module))
    out.value.sum().backward(retain_graph=True)
    once = [
        parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None
    ]
    out.value.sum().backward(retain_graph=True)
    torch.testing.assert_close(
        [parameter.grad for parameter in module.parameters()], [2 * x for x in once]
    )
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="parameters were changed between"):
        out.value.sum().backward()


def test_a_tensor_that_would_get_no_gradient_is_named() -> None:
    module = Bigram()
    hidden = torch.zeros(V, dtype=torch.float64, requires_grad=True)
    inner = module.forward
    module.forward = lambda tokens: inner(tokens) + hidden  # pyright: ignore[reportAttributeAccessIssue]
    out = estimate(Branch(arsm.RLOO(4)), sequences.Recompute(module))
    with pytest.raises(
        RuntimeError, match=r"depend on a tensor \[7\] that is not among its parameters"
    ):
        out.value.sum().backward()


def test_no_credit_is_a_gradient_of_zeros() -> None:
    module = Bigram()
    prompts = torch.zeros(2, 1, dtype=torch.int64)
    constant = lambda prompts, tokens: torch.ones(len(tokens))  # noqa: E731
    out = sequences.estimate(Group(2), sequences.Recompute(module), prompts, constant, max_tokens=2)
    found = torch.autograd.grad(out.value.sum(), list(module.parameters()))
    assert not any(bool(x.any()) for x in found)


# ---------------------------------------------------------------- several epochs


@pytest.mark.parametrize("strategy", [Branch(arsm.RLOO(4)), Group(3)], ids=["Branch", "Group"])
def test_the_first_clipped_epoch_has_the_gradient_itself(strategy: sequences.Strategy) -> None:
    module = Bigram()
    out = estimate(strategy, sequences.Recompute(module), micro_batch=3)
    assert out.clipped is not None
    again = out.clipped(0.2)
    torch.testing.assert_close(gradients(again(), module), gradients(out.value, module))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)  # ratios far from 1
    found = torch.autograd.grad(again().sum(), list(module.parameters()))
    credit, tokens = out.credit, out.tokens.reshape(-1, T)
    assert credit is not None
    prompts = (torch.arange(ROWS).unsqueeze(-1) % V).repeat_interleave(len(tokens) // ROWS, 0)

    def log_p(module: Bigram) -> Tensor:
        return (
            (sequences.Recompute(module).logits(prompts, tokens) / 0.8)
            .log_softmax(-1)
            .gather(-1, credit.tokens)
        )

    ratio, w = (log_p(module) - log_p(Bigram()).detach()).exp(), credit.weights
    by_hand = torch.where(w > 0, w * ratio.clamp_max(1.2), w * ratio.clamp_min(0.8)).sum()
    assert bool(((ratio > 1.2) & (w > 0)).any())
    torch.testing.assert_close(found, torch.autograd.grad(by_hand, list(module.parameters())))


def test_clipping_begins_before_the_first_step() -> None:
    module = Bigram()
    out = estimate(Branch(arsm.RLOO(4)), sequences.Recompute(module))
    out.value.sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert out.clipped is not None
    with pytest.raises(RuntimeError, match="call clipped before the optimiser's step"):
        out.clipped(0.2)


class Forbidding(Bigram):
    """A model that never gives the last token."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).masked_fill(torch.arange(V) == V - 1, -torch.inf)


def test_a_forbidden_token_of_another_sampler_has_no_gradient() -> None:
    """Its importance weight is 0, while other draws of its state have credit."""
    module = Forbidding()
    completions = torch.full((ROWS, T), 3)
    completions[0, 2] = V - 1
    out = estimate(
        Branch(arsm.RLOO(4)),
        sequences.Recompute(module),
        completions=completions,
        log_probs=torch.full((ROWS, T), -2.0),
        importance=sequences.Importance(),
    )
    assert out.credit is not None
    assert out.credit.weights[0, 2, 0] == 0
    assert out.credit.weights[0, 2].any()
    assert out.clipped is not None
    again = out.clipped(0.2)()
    found = gradients(again, module)
    assert all(bool(x.isfinite().all()) for x in found)
    torch.testing.assert_close(found, gradients(out.value, module))


def test_clipping_needs_single_tokens() -> None:
    out = estimate(Branch(arsm.ARSM()), sequences.Recompute(Bigram()))
    assert out.clipped is not None
    with pytest.raises(ValueError, match="credit of single tokens"):
        out.clipped(0.2)
    with pytest.raises(ValueError, match=r"clip must lie in \(0, 1\)"):
        estimate(Group(2), sequences.Recompute(Bigram())).clipped(1.5)  # pyright: ignore[reportOptionalCall]


# ---------------------------------------------------------------- memory


class Wide(nn.Module):
    """A model whose logits are by far its largest tensor."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, 8)
        self.head = nn.Linear(8, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.tokens(tokens))


@pytest.mark.parametrize(
    "strategy", [Branch(arsm.RLOO(4), budget=64), Group(4)], ids=["Branch", "Group"]
)
def test_no_logits_of_all_rows_and_steps_exist(strategy: sequences.Strategy) -> None:
    torch.manual_seed(0)
    vocabulary, prompts, width = 4000, torch.zeros(32, 1, dtype=torch.int64), 12
    model = sequences.Recompute(Wide(vocabulary).eval())
    lengthy = lambda prompts, tokens: tokens.double().mean(-1)  # noqa: E731
    rows = 32 * (strategy.samples or 1)
    all_logits = rows * width * vocabulary * 4

    def call() -> None:
        out = sequences.estimate(
            strategy, model, prompts, lengthy, max_tokens=width, rows=16, micro_batch=4
        )
        out.value.sum().backward()

    # `Recompute` itself computes the logits of a whole prefix for up to 16 rows at a time
    assert peak_bytes(call) < 0.75 * all_logits + 16 * width * vocabulary * 4 * 3


# ---------------------------------------------------------------- are these samples of the model?

TOKENS = 16_000


def states(seed: int, temperature: float = 1.0) -> Tensor:
    """Logits [TOKENS, 200] as a language model has them: some states sure, some open."""
    generator = torch.Generator().manual_seed(seed)
    scale = 1 + 7 * torch.rand(TOKENS, 1, generator=generator)
    return scale * torch.randn(TOKENS, 200, generator=generator)


def cooled(logits: Tensor) -> Tensor:
    return (logits / 0.9).softmax(-1)


def cut(logits: Tensor) -> Tensor:
    """Top-p 0.95."""
    p, order = logits.softmax(-1).sort(-1, descending=True)
    p = torch.where(p.cumsum(-1) - p < 0.95, p, 0)
    return torch.zeros_like(p).scatter(-1, order, p / p.sum(-1, keepdim=True))


def drawn(p: Tensor, seed: int) -> Tensor:
    u = torch.rand(len(p), 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return inverse(p, u).squeeze(-1)


@pytest.mark.parametrize(("sampler", "name"), [(cooled, "temperature 0.9"), (cut, "top-p 0.95")])
def test_other_samplers_are_found(sampler: Callable[[Tensor], Tensor], name: str) -> None:
    found = 0
    for seed in range(5):
        logits, fit = states(seed), Fit()
        fit.add(logits, drawn(sampler(logits), seed))
        found += fit.alarm() == name
    assert found == 5


def test_samples_of_the_model_are_not_refused() -> None:
    """Also those of a sampler in bfloat16, which reports its own probabilities."""
    for seed in range(5):
        logits, fit = states(seed), Fit()
        rounded = logits.bfloat16().float().log_softmax(-1)
        tokens = drawn(rounded.exp(), seed)
        fit.add(logits, tokens, rounded.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
        assert fit.alarm() is None


def test_the_mean_of_the_likelihood_ratios_is_one() -> None:
    """What the false-alarm rate stands on: E[q(y)/p(y)] = 1 for every alternative, by enumeration
    of y.
    """
    logits = states(0)[:3]
    p = logits.double().softmax(-1)
    total = torch.zeros(len(Fit().names), dtype=torch.float64)
    for token in range(200):
        for row in range(3):
            fit = Fit()
            fit.add(logits[row : row + 1], torch.tensor([token]))
            total += p[row, token] * fit.log_ratios.exp() / 3
    torch.testing.assert_close(total, torch.ones_like(total))


def test_stale_weights_are_found_by_what_the_sampler_reports() -> None:
    logits, fit = states(0), Fit()
    stale = (
        logits + 0.3 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    ).log_softmax(-1)
    tokens = drawn(stale.exp(), 0)
    fit.add(logits, tokens, stale.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
    assert fit.alarm() == "other weights"
