"""What sequences refuse: each in one sentence, before it costs anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import arsm
from arsm import sequences
from arsm.sequences import Branch, Group
from tests.tables import Setting, Table, reward

ROWS = 6
DONE = torch.tensor([[0, 2, 1]]).repeat(ROWS, 1)


class Counted(sequences.Recompute):
    """A model that counts its calls and remembers the most rows that it was ever called with."""

    calls, most = 0, 0

    def _seen(self, rows: int) -> None:
        self.calls, self.most = self.calls + 1, max(self.most, rows)

    def start(self, prompts: Tensor, mask: Tensor | None = None) -> Any:
        self._seen(prompts.shape[0])
        return super().start(prompts, mask)

    def step(self, state: Any, tokens: Tensor) -> Any:
        self._seen(tokens.shape[0])
        return super().step(state, tokens)

    def logits(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        self._seen(tokens.shape[0])
        return super().logits(prompts, tokens, mask)


def refused(message: str, error: type[Exception] = ValueError, **changes: Any) -> Counted:
    """Call with these changes and return the model."""
    model = changes.pop("model", None) or Counted(Table(ROWS, 3))
    arguments: dict[str, Any] = {
        "prompts": Setting().prompts(ROWS)[0],
        "reward": reward,
        "max_tokens": 3,
        "eos": 1,
    }
    arguments |= changes
    strategy = arguments.pop("strategy", Branch(arsm.RLOO(3)))
    with pytest.raises(error, match=message) as raised:
        sequences.estimate(
            strategy, model, arguments.pop("prompts"), arguments.pop("reward"), **arguments
        )
    sentence = str(raised.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return model


class Shifted(sequences.Recompute):
    """A cache that is wrong from the first step on."""

    def step(self, state: Any, tokens: Tensor) -> Any:
        state = super().step(state, tokens)
        return type(state)(state.logits + torch.tensor([0.3, 0.0, 0.0]), state.tokens, state.length)


@pytest.mark.parametrize("given", [False, True])
def test_a_cache_that_disagrees_with_the_one_pass(given: bool) -> None:
    tokens = torch.tensor([[0, 2, 1]]).expand(ROWS, 3)
    changes: dict[str, Any] = {"completions": tokens} if given else {}
    refused(
        r"logits differ: ln p of a token by 0\.\d+.*; check its cache",
        model=Shifted(Table(ROWS, 3)),
        **changes,
    )


def test_prompts_without_a_token() -> None:
    refused(
        r"at least one token, but are \[6, 0\]", prompts=torch.zeros(ROWS, 0, dtype=torch.int64)
    )
    mask = torch.ones(ROWS, 3, dtype=torch.bool)
    mask[4] = False
    refused("Prompt 4 has no token", mask=mask)
    refused("must be an int64 tensor", TypeError, prompts=torch.zeros(ROWS, 3))
    refused("hold the token -100", prompts=torch.full((ROWS, 3), -100))
    refused(
        r"mask must be a bool or int64 tensor .* but is torch.float32 \[6, 3\]",
        TypeError,
        mask=mask.float(),
    )
    refused("mask must hold 0 and 1 only", mask=2 * mask.long())


def test_a_budget_below_what_one_step_can_need() -> None:
    model = refused(
        "A budget of 1 rollouts is less than the 2 pseudo actions",
        strategy=Branch(arsm.RLOO(4), budget=1),
    )
    assert model.calls == 1, "refused before anything is sampled"


def test_vocabularies_that_differ() -> None:
    refused("eos = 3 is not in the model's vocabulary of 3 tokens", eos=3)
    refused(
        "tokens from 0 to 3, but the model's vocabulary is 0 to 2",
        completions=torch.tensor([[0, 3, 1]] * ROWS),
    )
    refused(
        "vocabulary of 4 tokens, but the model's has 3", reference=Counted(Table(ROWS, 4)), kl=0.1
    )

    embedding = torch.nn.Embedding(3, 3)
    prompts = torch.tensor([[0, 1], [2, 7], [1, 1]])
    message = (
        r"cannot read a prompt whose largest token is 7 \(index out of range in self\); use tokens"
    )
    refused(message, model=sequences.Recompute(embedding), prompts=prompts)

    class Wider(Counted):
        def logits(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            return torch.nn.functional.pad(super().logits(prompts, tokens, mask), (0, 1))

    refused(
        r"model.logits must return \[6, 3, 3\], but returned \[6, 3, 4\]",
        model=Wider(Table(ROWS, 3)),
    )


def test_logits_of_a_type_that_is_too_coarse() -> None:
    class Coarse(Counted):
        def start(self, prompts: Tensor, mask: Tensor | None = None) -> Any:
            state = super().start(prompts, mask)
            return type(state)(state.logits.to(torch.float8_e4m3fn), state.tokens, state.length)

    refused("float8_e4m3fn, too coarse to sample from", TypeError, model=Coarse(Table(ROWS, 3)))


def test_logits_that_are_not_numbers() -> None:
    table = Table(ROWS, 3)
    table.table = torch.full_like(table.table, torch.nan)
    refused("logits for the first token are NaN", arsm.NotFiniteError, model=Counted(table))

    class Later(Counted):
        def step(self, state: Any, tokens: Tensor) -> Any:
            state = super().step(state, tokens)
            return type(state)(state.logits * torch.nan, state.tokens, state.length)

    refused(
        "logits after 1 tokens of completion 0 are NaN",
        arsm.NotFiniteError,
        model=Later(Table(ROWS, 3)),
        eos=None,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 6.0}, "max_tokens must be a whole number, but is 6.0"),
        ({"eos": "x"}, "eos must be a whole number, but is 'x'"),
        ({"eos": [1, "x"]}, "eos must be a whole number, but is 'x'"),
        ({"eos": []}, "eos must hold at least one token"),
        ({"eos": (1, 3)}, "eos = 3 is not in the model's vocabulary of 3"),
        ({"rows": 8.0}, "rows must be a whole number, but is 8.0"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"kl": -1.0}, "kl must be"),
        ({"kl": 0.1}, "reference is missing"),
        ({"rows": 1}, "rows must be at least 2"),
        ({"rows": 0}, "rows must be at least 2, but is 0"),
        ({"micro_batch": 0}, "micro_batch must be at least 1, but is 0"),
        ({"log_probs": torch.zeros(ROWS, 3)}, "completions is None"),
        ({"completions": torch.zeros(ROWS, 2, dtype=torch.int64)}, "have no end of sequence"),
        ({"completions": torch.zeros(ROWS, 3)}, "completions must be int64"),
    ],
    ids=str,
)
def test_options(changes: dict[str, Any], message: str) -> None:
    assert refused(message, **changes).most <= 1


def test_strategies() -> None:
    with pytest.raises(ValueError, match="at least 2 sequences per prompt, but n = 1"):
        Group(1)
    for estimator in (arsm.ARSM(), arsm.VIMCO(4), arsm.RLOO(4, ridge=1.0)):
        with pytest.raises(ValueError, match=r"weigh whole samples|multi-sample bound"):
            Group(estimator)
    with pytest.raises(ValueError, match="leave one out"):
        Branch(arsm.RLOO(), budget=9, keep=0.5)
    with pytest.raises(ValueError, match=r"keep must lie in \(0, 1\]"):
        Branch(arsm.RLOO(), keep=0.0)
    with pytest.raises(ValueError, match=r"RELAX learns a control variate.* Branch needs one"):
        Branch(arsm.RELAX())


def test_an_estimator_or_a_module_that_is_not_wrapped() -> None:
    refused(
        r"a Branch or a Group, but is RLOO; write Branch\(RLOO\(", TypeError, strategy=arsm.RLOO(3)
    )
    refused(
        r"Embedding has no start, step and select; wrap it",
        TypeError,
        model=torch.nn.Embedding(3, 3),
    )
    refused(
        "completions must be an int64 tensor .6, 3., but are a list",
        TypeError,
        completions=[[0, 1, 1]] * ROWS,
    )


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda logits: (logits, None), "tuple"),
        (lambda logits: logits[:, -1], "torch.float64 .1, 3."),
    ],
)
def test_a_module_that_does_not_return_logits(change: Any, found: str) -> None:
    module = Table(ROWS, 3)
    model = sequences.Recompute(lambda tokens: change(module(tokens)))
    refused(f"it returned {found}; wrap a function that returns the logits", TypeError, model=model)


def test_a_reference_that_moves_with_the_model() -> None:
    module = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3))
    model = sequences.Recompute(module)
    message = r"reference is the model itself.*; give a copy of it"
    refused(message, model=model, reference=model, kl=0.1)
    refused(message, model=model, reference=sequences.Recompute(module), kl=0.1)


def test_a_number_is_no_importance() -> None:
    given = {"completions": DONE, "log_probs": torch.zeros(ROWS, 3)}
    message = r"importance must be one such as Importance\(cap=2.0\), but is a float"
    assert refused(message, TypeError, importance=2.0, **given).calls == 0


@dataclass
class Fields:
    """A model that is equal to others with the same fields, so that it has no hash."""

    inner: sequences.Model

    def start(self, prompts: Tensor, mask: Tensor | None = None) -> Any:
        return self.inner.start(prompts)

    def step(self, state: Any, tokens: Tensor) -> Any:
        return self.inner.step(state, tokens)

    def select(self, state: Any, rows: Tensor) -> Any:
        return self.inner.select(state, rows)

    def logits(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.inner.logits(prompts, tokens)


def test_a_model_without_a_hash() -> None:
    model = Fields(sequences.Recompute(Table(ROWS, 3)))
    refused(r"Fields .* write @dataclass\(eq=False\)", TypeError, model=model)


def test_an_address_is_no_engine() -> None:
    message = r"engine must have a method complete, as Server\(url, module\) has, but is a str"
    assert refused(message, TypeError, engine="http://localhost:8000").calls == 0


def test_samples_of_another_model() -> None:
    setting, prompts = Setting(eos=1), Setting().prompts(ROWS)[0]
    out = sequences.estimate(Group(2), setting.model(ROWS), prompts, reward, max_tokens=3, eos=1)
    log_probs = torch.zeros(ROWS, 2, 3)  # as a greedy sampler reports them
    refused(
        "are not samples of this model: other weights",
        strategy=Group(2),
        completions=out.tokens,
        log_probs=log_probs,
    )
    for bad in (torch.nan, -torch.inf):
        changes: dict[str, Any] = {"completions": out.tokens, "log_probs": log_probs + bad}
        refused(
            f"must be finite, but hold {bad}", arsm.NotFiniteError, strategy=Group(2), **changes
        )


def test_log_probs_after_the_end_do_not_count() -> None:
    setting, prompts = Setting(eos=1), Setting().prompts(ROWS)[0]
    tokens = torch.tensor([[1, 1, 1]]).expand(ROWS, 3)
    own = setting.model(ROWS).start(prompts).logits.log_softmax(-1)[:, 1:2]
    log_probs = torch.cat([own, torch.full((ROWS, 2), torch.nan)], -1)
    given: dict[str, Any] = {"completions": tokens, "log_probs": log_probs}
    out = sequences.estimate(
        Branch(arsm.RLOO(3)), setting.model(ROWS), prompts, reward, max_tokens=3, eos=1, **given
    )
    assert out.info["mismatch"] < 1e-6


@pytest.mark.parametrize("strategy", [Branch(arsm.RLOO(3)), Group(3)], ids=["Branch", "Group"])
@pytest.mark.parametrize("prompts", [3, 50])
def test_rows_per_call_do_not_grow_with_the_prompts(
    strategy: sequences.Strategy, prompts: int
) -> None:
    model = Counted(Table(prompts, 3))
    table = model.module.table  # pyright: ignore[reportFunctionMemberAccess]
    out = sequences.estimate(
        strategy,
        model,
        Setting().prompts(prompts)[0],
        reward,
        max_tokens=3,
        rows=8,
        micro_batch=8,
        reference=(reference := Counted(Table(prompts, 3))),
        kl=0.1,
        generator=torch.Generator().manual_seed(0),
    )
    out.value.sum().backward()
    # a prompt whose draws all agree has none
    assert (table.grad != 0).any(-1).any(-1).double().mean() > 0.8
    assert model.most <= 8
    assert reference.most <= 8


def test_micro_batches_add_up() -> None:
    """Given completions leave nothing to chance: the parts' gradients sum to that of the whole."""
    prompts, table = Setting().prompts(8)[0], Table(8, 3)
    model = sequences.Recompute(table)
    tokens = sequences.estimate(Group(3), model, prompts, reward, max_tokens=3).tokens
    grads = []
    for size in (8, 2):
        table.table.grad = None
        for some, done in zip(prompts.split(size), tokens.split(size), strict=True):
            out = sequences.estimate(Group(3), model, some, reward, max_tokens=3, completions=done)
            (-out.value.sum() / 8).backward()
        grads.append(table.table.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_parallel_modules() -> None:
    inside = torch.nn.Linear(2, 2)
    parallel = torch.nn.parallel.DistributedDataParallel.__new__(
        torch.nn.parallel.DistributedDataParallel
    )
    torch.nn.Module.__init__(parallel)
    parallel.module = inside
    for wrap in (sequences.Recompute, sequences.Transformers):
        with pytest.raises(
            TypeError, match=r"pass model\.module, and average the gradients .* after backward\.$"
        ):
            wrap(parallel)


def test_padded_prompts_without_a_mask() -> None:
    class Padded(Counted):
        pad_token = 0

    prompts = torch.tensor([[1, 2, 1], [0, 2, 1]])
    message = "Prompt 1 begins with 0, the model's padding, but no mask was given"
    assert refused(message, prompts=prompts, model=Padded(Table(ROWS, 3))).calls == 0
    options: dict[str, Any] = {"max_tokens": 2, "mask": prompts != 0}
    sequences.estimate(Group(2), Padded(Table(ROWS, 3)), prompts, reward, **options)


class Started(sequences.Recompute):
    """Counts the calls of `start` with one prompt."""

    count = 0

    def start(self, prompts: Tensor, mask: Tensor | None = None) -> Any:
        self.count += len(prompts) == 1
        return super().start(prompts, mask)


def test_a_model_is_tried_once() -> None:
    model = Started(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)))
    prompts = torch.arange(6).view(3, 2)

    def run(**options: Any) -> None:
        reward = lambda prompts, tokens: tokens.double().sum(-1)  # noqa: E731
        sequences.estimate(Group(2), model, prompts, reward, max_tokens=2, **options)

    run()
    assert model.count == 1
    run()
    assert model.count == 1
    # what does not depend on the model is looked at in every call
    with pytest.raises(ValueError, match="eos = 7 is not in the model's vocabulary of 7 tokens"):
        run(eos=7)
    prompts = prompts + 3
    with pytest.raises(ValueError, match="The model cannot read a prompt whose largest token is 8"):
        run()
    prompts = prompts - 3
    # other logits: another trial
    with torch.autocast("cpu", torch.bfloat16):
        run()
    assert model.count == 3
