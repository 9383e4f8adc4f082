"""The estimators that every estimator-wide test runs: one line each.

What an estimator claims (`unbiased`, `needs_gradient`) is read from itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import arsm
from arsm.estimators.nvil import MLPBaseline
from arsm.estimators.relax import MLPControl


def expectation(q: Tensor, f: Tensor) -> Tensor:
    """E[f]: probabilities and values of all z, [Z] each -> []."""
    return (q * f).sum()


def any_size(variables: int, categories: int) -> bool:
    return True


def one_variable(variables: int, categories: int) -> bool:
    return variables == 1


def two_categories(variables: int, categories: int) -> bool:
    return categories == 2


def relax_with_a_random_control(variables: int, categories: int) -> arsm.Estimator:
    control = MLPControl(hidden=8).double()
    torch.nn.init.normal_(control.out.weight)
    control(*torch.zeros(2, 1, variables, categories))
    return arsm.RELAX(control)


def nvil_with_a_random_baseline(
    variables: int, categories: int, *, normalise: bool = False
) -> arsm.Estimator:
    """With a baseline that differs between rows, and running statistics of some past."""
    baseline = MLPBaseline(hidden=8).double()
    torch.nn.init.normal_(baseline.out.weight)
    baseline(torch.zeros(1, variables, categories))
    nvil = arsm.NVIL(baseline, normalise)
    nvil.running.update(torch.tensor([1.0, 5.0, 9.0]), decay=0.5)
    return nvil


def rodeo_with_a_random_network(variables: int, categories: int) -> arsm.Estimator:
    rodeo = arsm.RODEO(samples=3, alpha=0.7, beta=0.8, hidden=3)
    torch.nn.init.normal_(rodeo.control.double().out.weight)
    return rodeo


def several_categories(variables: int, categories: int) -> bool:
    return variables == 1 and categories > 1


def multi_sample_bound(q: Tensor, f: Tensor) -> Tensor:
    """E[ln 1/2 (exp f_1 + exp f_2)] of two independent z."""
    return (q.unsqueeze(-1) * q * (torch.logaddexp(f.unsqueeze(-1), f) - math.log(2))).sum()


@dataclass(frozen=True)
class Entry:
    """An estimator under test."""

    label: str
    how: str | Callable[[int, int], arsm.Estimator]
    """Words for `arsm.estimator`, or a function of (K, C); learned parts in float64."""
    fits: Callable[[int, int], bool] = any_size
    """The (K, C) that it is made for."""
    target: Callable[[Tensor, Tensor], Tensor] = expectation
    """What it estimates, from the probabilities [Z] and values [Z] of all z; differentiable in
    both.
    """

    def make(self, variables: int, categories: int) -> arsm.Estimator:
        """The estimator, with the same initial parameters every time."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return (
                arsm.estimator(self.how)
                if isinstance(self.how, str)
                else self.how(variables, categories)
            )


ROSTER: list[Entry] = [
    Entry("exact", "exact"),
    Entry("reinforce", "reinforce"),
    Entry("reinforce, baseline", "reinforce:baseline=0.7"),
    Entry("nvil", "nvil"),
    Entry("nvil, a random baseline", nvil_with_a_random_baseline),
    Entry("nvil, normalised", lambda K, C: nvil_with_a_random_baseline(K, C, normalise=True)),
    Entry(
        "2 draws of nvil, a random baseline",
        lambda K, C: arsm.Average(nvil_with_a_random_baseline(K, C), 2),
    ),
    Entry("ar", "ar"),
    Entry("ars", "ars"),
    Entry("ars+", "ars-plus"),
    Entry("arsm", "arsm"),
    Entry("arsm+", "arsm-plus"),
    Entry("arsm, one reference", "arsm:references=1"),
    Entry("arsm, all references", lambda K, C: arsm.ARSM(references=C)),
    Entry("arsm, pooled", "arsm:pooled=True"),
    Entry("arsm, one reference, pooled", "arsm:references=1,pooled=True"),
    Entry("arsm, all references, pooled", lambda K, C: arsm.ARSM(references=C, pooled=True)),
    Entry("3 draws of arsm", "3*arsm"),
    Entry("2 draws of rloo", "2*rloo:samples=2"),
    Entry("rloo", "rloo"),
    Entry("rloo, one live", "rloo:samples=2,live=1"),
    Entry("rloo, ridge", "rloo:samples=5,ridge=1.0"),
    Entry("3 draws of rloo, surrogate", "3*rloo:samples=2,surrogate=logits"),
    Entry("2 draws of rloo, ridge and surrogate", "2*rloo:ridge=1.0,surrogate=logits"),
    Entry("local expectation", "local-expectation"),
    Entry("disarm, tree", "disarm"),
    Entry("disarm, stick-breaking", "disarm:coupling=stick-breaking"),
    Entry("2 draws of disarm", "2*disarm"),
    Entry("ugc", "ugc", fits=two_categories),
    Entry("2 draws of ugc", "2*ugc", fits=two_categories),
    Entry("carms, 2 samples", "carms:samples=2"),
    Entry("carms", "carms"),
    Entry("2 draws of carms", "2*carms:samples=3,live=1"),
    Entry("unordered set", "unordered-set:samples=2", fits=several_categories),
    Entry(
        "unordered set, all categories", lambda K, C: arsm.UnorderedSet(C), fits=several_categories
    ),
    Entry("2 draws of unordered set", "2*unordered-set:samples=2", fits=several_categories),
    Entry("exact plus sampled", "exact-plus-sampled", fits=several_categories),
    Entry("exact plus one sampled", "exact-plus-sampled:samples=1", fits=several_categories),
    Entry("2 draws of exact plus sampled", "2*exact-plus-sampled", fits=several_categories),
    Entry("vimco", "vimco:samples=2", target=multi_sample_bound),
    Entry("2 draws of vimco", "2*vimco:samples=2", target=multi_sample_bound),
    Entry("grpo", "grpo"),
    Entry("dr. grpo", "dr-grpo"),
    Entry("otb", "otb"),
    Entry("2 draws of otb", "2*otb:samples=3,live=1"),
    Entry("rodeo", rodeo_with_a_random_network),
    Entry("2 draws of rodeo", "2*rodeo:samples=2"),
    Entry("double control", "double-control"),
    Entry("2 draws of double control", "2*double-control:samples=2,alpha=1"),
    Entry("gumbel-softmax", "gumbel-softmax"),
    Entry("gumbel-softmax, hard", "gumbel-softmax:temperature=0.5,hard=True"),
    Entry("straight-through", "straight-through"),
    Entry("decoupled straight-through", "decoupled-straight-through:forward=1.2,backward=0.7"),
    Entry("gumbel-rao", "gumbel-rao:samples=3"),
    Entry("gapped straight-through", "gapped-straight-through"),
    Entry("reinmax", "reinmax"),
    Entry("reinmax-rao", "reinmax-rao:samples=3"),
    Entry("imle", "imle"),
    Entry("2 draws of imle", "2*imle:step=0.5"),
    Entry("aimle", "aimle"),
    Entry("2 draws of aimle, forward", "2*aimle:alpha=0.3,central=False"),
    Entry("muprop", "muprop"),
    Entry("2 draws of muprop", "2*muprop"),
    Entry("rebar", "rebar"),
    Entry("rebar, elsewhere", "rebar:temperature=1.5,scale=0.6"),
    Entry("2 draws of rebar", "2*rebar"),
    Entry("relax", "relax"),
    Entry("relax, a random control", relax_with_a_random_control),
    Entry(
        "2 draws of relax, a random control",
        lambda K, C: arsm.Average(relax_with_a_random_control(K, C), 2),
    ),
]
