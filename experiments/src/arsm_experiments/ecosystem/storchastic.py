"""Storchastic's methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from arsm.referee import Problem
from arsm.referee.measure import Loss
from arsm.referee.problems import Function
from arsm_experiments.ecosystem.entry import (
    BINARY,
    ONE_VARIABLE,
    RELAXED,
    SOME,
    UNBIASED,
    Entry,
    audited,
    from_gradient,
    from_package,
)


def storchastic(
    make: Callable[[Any], Any], kind: str = "one-hot", relaxed: bool = False
) -> Callable[[], Loss]:
    """A method of storchastic on rows [B] of K variables; f is each row's cost."""

    def build() -> Loss:
        storch = from_package("storch")
        methods = from_package("storch.method")
        distributions = torch.distributions

        def gradient(logits: Tensor, f: Function) -> Tensor:
            storch.reset()
            method = make(methods)
            phi = storch.denote_independent(logits, 0, "rows")
            if kind == "bernoulli":
                q = distributions.Bernoulli(logits=phi[..., 1] - phi[..., 0])
            elif kind == "probs":
                q = distributions.OneHotCategorical(probs=phi.softmax(-1))
            else:
                q = distributions.OneHotCategorical(logits=phi)

            @storch.deterministic
            def cost(sample: Tensor) -> Tensor:
                if kind == "bernoulli":
                    return f(sample.long())
                return f(sample if relaxed else sample.argmax(-1))

            storch.add_cost(cost(method(q)), "f")
            storch.backward()
            assert logits.grad is not None
            return logits.grad * len(logits)  # storchastic averages over independent rows

        return from_gradient(gradient)

    return build


def _entry(
    name: str,
    make: Callable[[Any], Any],
    kind: str = "one-hot",
    claim: str = UNBIASED,
    relaxed: bool = False,
    problems: Sequence[Problem] = SOME,
) -> Entry:
    loss = storchastic(make, kind, relaxed)
    return Entry(f"storchastic: {name}", "storchastic", "storch", claim, audited(loss, problems))


ENTRIES = (
    _entry("ScoreFunction", lambda m: m.ScoreFunction("z")),
    _entry(
        "ScoreFunction, batch_average, 4 samples",
        lambda m: m.ScoreFunction("z", n_samples=4, baseline_factory="batch_average"),
    ),
    _entry("REBAR", lambda m: m.REBAR("z"), "probs", relaxed=True),
    _entry("ARM, 2 categories", lambda m: m.ARM("z"), "bernoulli", problems=BINARY),
    _entry("DisARM, 2 categories", lambda m: m.DisARM("z"), "bernoulli", problems=BINARY),
    _entry("Expect, one variable", lambda m: m.Expect("z"), claim="exact", problems=ONE_VARIABLE),
    _entry(
        "UnorderedSetEstimator, 2 samples, one variable",
        lambda m: m.UnorderedSetEstimator("z", k=2),
        problems=ONE_VARIABLE,
    ),
    _entry(
        "GumbelSoftmax",
        lambda m: m.GumbelSoftmax("z", initial_temperature=1.0),
        claim=RELAXED,
        relaxed=True,
    ),
)
