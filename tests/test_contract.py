"""The contract of an estimator: nothing is asked for that is not declared, and a given sample is
the true one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
import arsm_experiments
from arsm import policy
from arsm.bound import estimate_bound
from arsm.estimators import NAMES
from arsm.layers import estimate_layers
from arsm.types import Queries
from tests.statistics import deviations

MEMBERS = (
    "unbiased",
    "needs_gradient",
    "target",
    "couples_rows",
    "learned",
    "given_sample",
    "vmappable",
    "deterministic",
    "pathwise",
    "paths",
    "centred",
    "weighs_energy",
    "subset",
    "adapts",
)


class Wrapper(arsm.Estimator):
    """Forwards the declared members, and has no others."""

    def __init__(self, inner: arsm.Estimator) -> None:
        self.inner = inner
        for name in MEMBERS:
            setattr(self, name, getattr(inner, name))

    def __repr__(self) -> str:
        return repr(self.inner)

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Any:
        return self.inner.noise(logits, generator, z)

    def ask(self, logits: Tensor, noise: Any) -> Queries:
        return self.inner.ask(logits, noise)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor | None:
        return self.inner.tell(logits, queries, values)

    def weights(self, values: Tensor, energy: Tensor | None = None) -> Tensor:
        return self.inner.weights(values, energy)

    def value(self, queries: Queries, live: Tensor) -> Tensor:
        return self.inner.value(queries, live)

    def adapt(self, out: arsm.Estimate) -> None:
        self.inner.adapt(out)

    def most_queries(self, logits: Tensor) -> int:
        return self.inner.most_queries(logits)

    def within(self, budget: int) -> arsm.Estimator | None:
        resized = self.inner.within(budget)
        return None if resized is None else Wrapper(resized)


def test_the_wrapper_forwards_all_that_is_declared() -> None:
    declared = {
        name
        for name in (*vars(arsm.Estimator), *arsm.Estimator.__annotations__)
        if not name.startswith("_")
    }
    assert declared == {
        *MEMBERS,
        "noise",
        "ask",
        "tell",
        "weights",
        "value",
        "adapt",
        "most_queries",
        "within",
    }


def f(z: Tensor) -> Tensor:
    """Of one-hot, relaxed or integer z of 3 categories; not a sum of one term per variable."""
    x = (arsm.one_hot(z, 3, torch.float64).flatten(1) * torch.arange(1.0, 1 + 3 * z.shape[1])).sum(
        -1
    )
    return x.sin() + 0.1 * x.square()


def made(name: str) -> arsm.Estimator:
    torch.manual_seed(0)
    estimator = arsm.estimator(name)
    estimator.learned.double()
    return estimator


def one_variable(name: str) -> bool:
    return name in ("unordered-set", "exact-plus-sampled")


def outcome(
    run: Callable[[arsm.Estimator], list[Tensor]], estimator: arsm.Estimator
) -> list[Tensor] | str:
    """What comes back, or the sentence that refuses."""
    torch.manual_seed(0)
    try:
        return run(estimator)
    except (ValueError, TypeError) as error:
        return str(error).replace("Wrapper", type(bare(estimator)).__name__)


def bare(estimator: arsm.Estimator) -> arsm.Estimator:
    return estimator.inner if isinstance(estimator, Wrapper) else estimator


def by_estimate(estimator: arsm.Estimator) -> list[Tensor]:
    logits = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 1, 3).requires_grad_()
    if not isinstance(bare(estimator), arsm.UnorderedSet | arsm.ExactPlusSampled):
        logits = logits.detach().view(2, 2, 3).requires_grad_()
    out = arsm.estimate(estimator, logits, f, generator=torch.Generator().manual_seed(1))
    return [out.value.detach(), *torch.autograd.grad(out.value.sum(), logits)]


def layers_of(weight: Tensor) -> list[Callable[..., Tensor]]:
    return [
        lambda zs, x: x * weight[0],
        lambda zs, x: weight[1] * arsm.one_hot(zs[0], 3, torch.float64) + x,
    ]


def by_layers(estimator: arsm.Estimator) -> list[Tensor]:
    weight = torch.tensor([0.7, -1.2], dtype=torch.float64, requires_grad=True)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 1, 3)
    out = estimate_layers(
        estimator,
        layers_of(weight),
        lambda zs, logits, x: f(torch.cat([arsm.one_hot(z, 3, torch.float64) for z in zs], 1)),
        x,
        generator=torch.Generator().manual_seed(1),
    )
    return [out.value.detach(), *torch.autograd.grad(out.value.sum(), weight)]


def by_bound(estimator: arsm.Estimator) -> list[Tensor]:
    weight = torch.tensor([0.7, -1.2], dtype=torch.float64, requires_grad=True)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 1, 3)
    generator = torch.Generator().manual_seed(1)
    out = estimate_bound(
        estimator,
        layers_of(weight),
        lambda zs, logits, x: f(torch.cat(zs, 1)),
        x,
        generator=generator,
    )
    return [out.value.detach(), *torch.autograd.grad(out.value.sum(), weight)]


def by_policy(estimator: arsm.Estimator) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 2, 1, 3)
    actions = arsm.sample(logits, generator)
    plan = policy.plan(estimator, logits, actions, budget=20, generator=generator)
    return [
        policy.gradient(
            estimator, logits, plan, f_of(actions.squeeze(-1)), f_of(plan.action.squeeze(-1))
        )
    ]


def f_of(action: Tensor) -> Tensor:
    return f(action.reshape(-1, 1)).view(action.shape)


def by_compare(estimator: arsm.Estimator) -> list[Tensor]:
    logits = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 1, 3)
    (row,) = arsm.compare(
        logits,
        f,
        budget=6,
        estimators=[estimator],
        samples=5,
        training=1,
        generator=torch.Generator().manual_seed(1),
    )
    return [torch.tensor([row.evaluations, row.variance, row.bias])]


@pytest.mark.parametrize("run", [by_estimate, by_layers, by_bound, by_policy, by_compare])
@pytest.mark.parametrize("name", NAMES)
def test_a_wrapper_that_forwards_the_declared_members_gives_the_same_numbers(
    name: str, run: Callable[[arsm.Estimator], list[Tensor]]
) -> None:
    found, wrapped = outcome(run, made(name)), outcome(run, Wrapper(made(name)))
    if isinstance(found, str) or isinstance(wrapped, str):
        assert found == wrapped
    else:
        assert all(torch.equal(a, b) for a, b in zip(found, wrapped, strict=True))


def test_a_bound_behind_a_wrapper_is_a_bound() -> None:
    found, wrapped = (by_estimate(x) for x in (arsm.VIMCO(4), Wrapper(arsm.VIMCO(4))))
    assert torch.equal(found[0], wrapped[0])
    assert isinstance(outcome(by_bound, Wrapper(arsm.VIMCO(4))), list)


# ---------------------------------------------------------------- the noise given the true sample

EPISODES = 20_000
REFUSED = {
    "exact": "cannot start from a given sample",
    "vimco": "estimates a multi-sample bound",
} | dict.fromkeys(
    [name for name, kind in NAMES.items() if kind().needs_gradient], "needs f's derivative"
)


@pytest.mark.parametrize("categories", range(2, 9))
@pytest.mark.parametrize("name", NAMES)
def test_in_an_episode_every_estimator_is_what_it_claims_or_refused_by_name(
    name: str, categories: int
) -> None:
    """Actions are drawn outside; one step with a known reward for every action, by enumeration."""
    estimator = made(name)
    generator = torch.Generator().manual_seed(categories)
    row = torch.randn(1, categories, generator=generator, dtype=torch.float64)
    reward = torch.randn(categories, generator=generator, dtype=torch.float64) + 1
    logits = row.expand(EPISODES, 1, 1, categories)
    actions = torch.multinomial(
        row.softmax(-1)[0], EPISODES, replacement=True, generator=generator
    ).view(-1, 1, 1)
    if name == "ugc" and categories > 2:
        with pytest.raises(ValueError, match=f"2 categories, but these have {categories}"):
            policy.plan(estimator, logits, actions, generator=generator)
        return
    if name in REFUSED:
        with pytest.raises(ValueError, match=rf"^{type(estimator).__name__} {REFUSED[name]}"):
            policy.plan(estimator, logits, actions, generator=generator)
        return
    if name == "exact-plus-sampled" and categories == 2:
        estimator = arsm.ExactPlusSampled(1, 1)
    plan = policy.plan(estimator, logits, actions, generator=generator)
    found = policy.gradient(
        estimator, logits, plan, reward[actions].squeeze(-1), reward[plan.action].squeeze(-1)
    )
    exact = arsm.estimate(arsm.Exact(), row, lambda z: reward[z[:, 0]]).grad
    assert exact is not None
    assert bool(deviations(found.squeeze(1).double(), exact).max() < 1) == estimator.unbiased


@pytest.mark.parametrize("name", [name for name, kind in NAMES.items() if kind().given_sample])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_given_sample_is_the_first_query(name: str, dtype: torch.dtype) -> None:
    """Of nearly impossible samples, equal logits and masks too."""
    variables = 1 if one_variable(name) else 3
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.0, 1.0, 5.0, 100.0]).repeat(100)[:, None, None]
    categories = 2 if name == "ugc" else 5
    logits = (scale * torch.randn(400, variables, categories, generator=generator)).to(dtype)
    logits[::3, :, 1] = -torch.inf
    z = torch.randint(categories - 1, (400, variables), generator=generator)
    z = z + (z >= 1)  # never the masked one
    estimator = arsm.estimator(name)
    queries = estimator.ask(logits, estimator.noise(logits, generator, z))
    first = (
        queries.points[0]
        if not queries.points.is_floating_point()
        else queries.z.reshape(400, -1, variables)[:, 0]
    )
    assert torch.equal(first, z)


def test_a_sample_that_cannot_be_drawn_is_refused() -> None:
    logits = torch.tensor([[[0.0, -torch.inf, 1.0]]])
    for name, kind in NAMES.items():
        if kind().given_sample:
            with pytest.raises(ValueError, match=r"z\[0, 0\] is 1, which has probability 0"):
                arsm.estimator(name).noise(logits, z=torch.tensor([[1]]))
            with pytest.raises(ValueError, match=r"z\[0, 0\] is 3, but the categories are 0 to 2"):
                arsm.estimator(name).noise(logits, z=torch.tensor([[3]]))
            for wrong in (torch.tensor([0]), torch.tensor([[0.0]])):
                with pytest.raises(ValueError, match=r"must be int64 \[1, 1\]"):
                    arsm.estimator(name).noise(logits, z=wrong)


class Deaf(arsm.RLOO):
    """Ignores the sample that it is given."""

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> arsm.extend.SampleNoise:
        return super().noise(logits, generator)


def test_an_estimator_that_ignores_the_given_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="did not ask for the given action first"):
        policy.plan(Deaf(), torch.zeros(1, 50, 1, 4), torch.zeros(1, 50, 1, dtype=torch.int64))


# ---------------------------------------------------------------- equality


def test_estimators_are_equal_by_their_options() -> None:
    h = torch.ones(2, 3)
    assert arsm.RLOO(4) == arsm.RLOO(4)
    assert hash(arsm.RLOO(4)) == hash(arsm.RLOO(4))
    assert arsm.RLOO(4) != arsm.RLOO(5)
    assert arsm.RLOO(4) != arsm.CARMS(4)
    assert arsm.RLOO(surrogate=h) == arsm.RLOO(surrogate=h)
    assert arsm.RLOO(surrogate=h) != arsm.RLOO(surrogate=h.clone())
    assert arsm.Reinforce(h) != arsm.Reinforce(h + 1)
    assert arsm.Average(arsm.ARSM(), 2) == arsm.Average(arsm.ARSM(), 2)
    assert arsm.RELAX() != arsm.RELAX()


@dataclass(frozen=True)
class Stranger:
    """Has the methods, but is no subclass."""

    unbiased = True
    ask = tell = noise = None


def test_an_estimator_of_ones_own_is_a_subclass() -> None:
    with pytest.raises(TypeError, match=r"must be a subclass of arsm\.Estimator"):
        arsm.estimate(Stranger(), torch.zeros(3), f)  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------- nobody looks for what is not
# declared

CLASSES = {kind.__name__ for kind in NAMES.values()} | {"Average", "Estimator"}
SOURCES = [
    path
    for package in (Path(arsm.__file__).parent, Path(arsm_experiments.__file__).parent)
    for path in package.rglob("*.py")
    if "estimators" not in path.parts
    and path.name not in ("types.py", "capabilities.py", "checks.py")
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-2:]))
def test_no_caller_guesses(path: Path) -> None:
    """No hasattr or getattr on estimators, and no isinstance on their classes, outside
    `estimators/`.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("hasattr", "getattr"):
                assert "estimator" not in ast.unparse(node.args[0]), f"line {node.lineno}"
            if node.func.id == "isinstance":
                named = set(re.findall(r"\w+", ast.unparse(node.args[1])))
                assert not named & CLASSES, f"line {node.lineno}"


@pytest.mark.parametrize(
    "words",
    ["arsm", "arsm:pooled=True", "ars", "ars-plus", "arsm-plus", "arsm:references=2", "rloo"],
)
@pytest.mark.parametrize("variables", [1, 2])
def test_a_gradient_has_the_dtype_of_f_and_the_logits(words: str, variables: int) -> None:
    for dtype in (torch.float32, torch.float64):
        out = arsm.estimate(
            arsm.estimator(words),
            torch.randn(5, variables, 4, dtype=dtype),
            lambda z: z[:, 0].float(),
        )
        assert out.grad is not None
        assert out.grad.dtype == dtype
