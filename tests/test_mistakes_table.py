"""Mistakes that beginners make, in one table: each raises one sentence of the library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import arsm
from arsm import sequences
from tests.test_mistakes import LOGITS, estimate, first


def row_wise(z: Tensor, x: Tensor) -> Tensor:
    return first(z)


def generate(strategy: Any = None, *, model: Any = None, **options: Any) -> Any:
    """An estimate for a model of seven tokens, with one thing wrong."""
    given: dict[str, Any] = {
        "prompts": torch.ones(2, 3, dtype=torch.int64),
        "reward": lambda prompts, tokens: (tokens == 1).float().mean(-1),
        "max_tokens": 3,
    }
    return sequences.estimate(
        strategy or sequences.Branch(arsm.RLOO(4)),
        model or sequences.Recompute(nn.Embedding(7, 7)),
        **(given | options),
    )


ROWS = torch.zeros(8, 1, 5, requires_grad=True)
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a class": (
        lambda: arsm.estimate(arsm.RLOO, LOGITS, first),  # pyright: ignore[reportArgumentType]
        "but is the class RLOO; RLOO(...), with its options, makes one.",
    ),
    "a name in other letters": (lambda: arsm.Rloo, 'did you mean "RLOO"?'),  # pyright: ignore[reportAttributeAccessIssue]
    "a name": (lambda: arsm.estimate("rloo", LOGITS, first), "arsm.estimator('rloo') makes"),  # pyright: ignore[reportArgumentType]
    "another order": (
        lambda: arsm.estimate(ROWS, arsm.RLOO(4), first),  # pyright: ignore[reportArgumentType]
        "but is float32 [8, 1, 5]; the estimator comes first, then the logits.",
    ),
    "an unknown name": (lambda: arsm.estimator("rlo"), 'did you mean "rloo"?'),
    "an unknown option": (lambda: arsm.estimator("rloo:n=4"), '"n=4" is no option of "rloo";'),
    "a misspelt option": (lambda: arsm.RLOO(sample=4), 'did you mean "samples"?'),  # pyright: ignore[reportCallIssue]
    "a misspelt argument": (lambda: estimate(maxrows=4), 'did you mean "max_rows"?'),
    "a seed": (lambda: estimate(seed=0), "give it generator=torch.Generator(device)"),
    "a seed as generator": (lambda: estimate(generator=0), ".manual_seed(0) makes one."),
    "one sample": (lambda: arsm.RLOO(1), "needs at least 2, but samples = 1."),
    "half a sample": (lambda: arsm.RLOO(2.5), "must be a whole number, but is 2.5."),  # pyright: ignore[reportArgumentType]
    "logits in a list": (lambda: estimate(logits=[0.0, 1.0]), "convert them with torch.tensor."),
    "whole logits": (lambda: estimate(logits=LOGITS.long()), "convert them with .float()."),
    "logits that are NaN": (lambda: estimate(logits=LOGITS * torch.nan), "logits[0] is nan;"),
    "all masked": (lambda: estimate(logits=LOGITS - torch.inf), "leave at least one finite."),
    "no logits": (lambda: estimate(logits=LOGITS[:0]), "no dimension empty, but are [0]."),
    "f's mean": (lambda: estimate(lambda z: first(z).mean()), "one value per row of z: shape ["),
    "a number": (lambda: estimate(lambda z: 1.0), "must return a tensor [N]"),
    "no return": (lambda: estimate(lambda z: None), "but returned NoneType."),
    "whole values": (lambda: estimate(lambda z: z[:, 0]), "convert it with .float()."),
    "a dimension too many": (lambda: estimate(lambda z: z.float()), "but returned shape ["),
    "values that are NaN": (lambda: estimate(lambda z: first(z) * torch.nan), "f returned nan"),
    "f's result": (lambda: estimate(first(torch.zeros(5, 1))), "f must be a function of z"),
    "context that f does not take": (lambda: estimate(first, LOGITS), "and 1 context tensor;"),
    "context of another batch": (
        lambda: estimate(row_wise, torch.zeros(7), logits=ROWS),
        "leads with the batch's shape [8], but is torch.float32 [7].",
    ),
    "context in a list": (lambda: estimate(row_wise, [1] * 8, logits=ROWS), "but is list."),
    "an unknown evaluation": (lambda: estimate(evaluation="fast"), '"packed" or "dense", but is'),
    "no rows": (lambda: estimate(max_rows=0), "at least 1, or None for no limit, but is 0."),
    "out.backward()": (lambda: estimate().backward(), "use its value: out.value.backward"),  # pyright: ignore[reportAttributeAccessIssue]
    "-out": (lambda: -estimate(), "use its value, as in -out.value.mean()"),  # pyright: ignore[reportOperatorIssue]
    "no derivative": (
        lambda: arsm.estimate(arsm.ReinMax(), LOGITS, lambda z: first(z.argmax(-1))),
        "make f differentiable in one-hot z, or choose an estimator that only evaluates f",
    ),
    "a word for a list": (
        lambda: arsm.compare(LOGITS, first, estimators="rloo"),
        'but is a word; say ["rloo"].',
    ),
    "f before the logits": (
        lambda: arsm.compare(first, LOGITS),  # pyright: ignore[reportArgumentType]
        "but are a function; the logits come before f.",
    ),
    "no budget": (lambda: arsm.compare(LOGITS, first, budget=0), "at least 1, but is 0."),
    "relaxed categories": (
        lambda: arsm.one_hot(torch.tensor([[1.0, 2.0]]), 5),
        "categories are int64, as in z.long().",
    ),
    "an option without its name": (
        lambda: arsm.maximize(first, [4, 2], 50),  # pyright: ignore[reportCallIssue]
        "takes f and space by position, but got 3 arguments; give the others by name, as in",
    ),
    "the space before f": (
        lambda: arsm.maximize([4, 2], first),  # pyright: ignore[reportArgumentType]
        "but is list; f comes first, then the space.",
    ),
    "a loss with a column": (
        lambda: estimate(lambda z: z[:, :1].float()),
        "but returned shape [",
    ),
    "values on another device": (
        lambda: estimate(lambda z: torch.zeros(len(z), device="meta")),
        "must return its values on cpu, where z lies",
    ),
    "values of NumPy": (lambda: estimate(lambda z: z.numpy()[:, 0] * 1.0), "returned ndarray."),
    "an estimator for a Choice": (
        lambda: arsm.Choice(arsm.RLOO(4)),  # pyright: ignore[reportArgumentType]
        "k must be a whole number, but is RLOO(4).",
    ),
    "a misspelt reach": (
        lambda: arsm.Choice(reach="late"),  # pyright: ignore[reportArgumentType]
        '"row", "later" or "own", but is',
    ),
    "a model without a wrapper": (
        lambda: generate(model=nn.Embedding(7, 7)),
        "wrap it: Transformers(model) for a causal model of transformers, Recompute(module)",
    ),
    "an estimator for a strategy": (
        lambda: generate(arsm.RLOO(4)),
        "but is RLOO; write Branch(RLOO(...)).",
    ),
    "prompts of text": (lambda: generate(prompts=["2 + 2"]), "int64 tensor [N, P], but are list."),
    "a token that does not exist": (lambda: generate(eos=99), "vocabulary of 7 tokens."),
    "a reward per token": (
        lambda: generate(reward=lambda prompts, tokens: tokens.float()),
        "one value per completion, [",
    ),
    "a group of one": (lambda: sequences.Group(1), "at least 2 sequences per prompt, but n = 1."),
    "few draws to audit": (
        lambda: arsm.audit(lambda logits, f: logits.sum(), samples=256),
        "fewer decide nothing.",
    ),
    "one layer without its list": (
        lambda: arsm.estimate_layers(arsm.RLOO(2), first, first),  # pyright: ignore[reportArgumentType]
        "layers must be a list of functions that return logits",
    ),
    "no choice in the model": (
        lambda: arsm.choices(nn.Linear(5, 5), arsm.RLOO(4)).__enter__(),
        "contains no arsm.Choice; put one where its forward chooses.",
    ),
    "no bound": (
        lambda: arsm.estimate_bound(arsm.RLOO(4), LOGITS, first),  # pyright: ignore
        "use one such as arsm.VIMCO(10).",
    ),
    "a number of values": (lambda: arsm.maximize(first, {"a": 3}), "must be a list, as in [2, 4"),
    "a result to audit": (lambda: arsm.audit(estimate()), "must be a function loss(logits, f)"),  # pyright: ignore[reportArgumentType]
    "f of layers without their logits": (
        lambda: arsm.estimate_layers(arsm.RLOO(2), [lambda zs: torch.zeros(3, 1, 2)], first),
        "cannot be called with zs, logits and 0 context tensors; it must take zs, logits, and",
    ),
    "f of a bound without its logits": (
        lambda: arsm.estimate_bound(arsm.VIMCO(2), [lambda zs: torch.zeros(3, 1, 2)], first),
        "that follows f in arsm.estimate_bound(estimator, layers, f, *context).",
    ),
    "nothing to compare": (
        lambda: arsm.compare(LOGITS, first, estimators=[]),
        'must be a list such as ["rloo", "arsm"], but is empty.',
    ),
    "a class to audit": (
        lambda: arsm.audit(arsm.RLOO),  # pyright: ignore[reportArgumentType]
        "must be a function loss(logits, f), or an estimator, but is <class",
    ),
    "categories without their variables": (
        lambda: arsm.log_prob(torch.zeros(5), torch.tensor([[1]])),
        "z must be int64 [..., K] for log_q [..., K, C], but they are [1, 1] and [5].",
    ),
    "too much to enumerate": (
        lambda: arsm.estimate(arsm.Exact(), torch.zeros(40, 5), first),
        "use an estimator that samples, such as ARSM or RLOO.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence_of_the_library(mistake: str) -> None:
    make, words = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
        make()
    assert words in str(caught.value)
    assert len(str(caught.value)) < 250, "one sentence"
    # said on purpose: the last line of the traceback is a `raise` of the library
    last = caught.traceback[-1]
    assert "arsm" in Path(str(last.path)).parts
    assert str(last.statement).lstrip().startswith("raise ")


def test_there_are_many_mistakes_in_the_table() -> None:
    assert len(MISTAKES) >= 50
