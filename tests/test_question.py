"""One question, one credit: the head and the tail of an estimate are written once, and all callers
share them.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import arsm
from arsm import policy
from arsm.kernels import two_ways
from arsm.question import attach, pose
from tests.roster import ROSTER, Entry

LIBRARY = Path(arsm.__file__).parent
CALLERS = [
    path
    for path in LIBRARY.rglob("*.py")
    if "estimators" not in path.parts and "kernels" not in path.parts
]


def calls_of(method: str) -> list[str]:
    """The modules outside `estimators/` that call a method of this name on an estimator, once per
    call.
    """
    found = []
    for path in CALLERS:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr == method and "estimator" in ast.unparse(node.func.value):
                found.append(path.name)
    return found


def test_one_place_asks_and_one_tells() -> None:
    assert calls_of("tell") == ["question.py"]
    assert calls_of("ask") == ["question.py"]


def test_one_place_decides_which_queries_run() -> None:
    """Nobody else compares `same_as` with the queries' numbers."""
    users = [
        path.name
        for path in CALLERS
        if "speakers(" in path.read_text() and path.name != "distinct.py"
    ]
    # the first finds equal draws while a sequence is sampled, before any question is posed; the
    # second counts the distinct queries for `info`
    assert sorted(users) == [
        "ahead.py",
        "driver.py",
        "question.py",
    ]


def test_one_autograd_function_gives_logits_a_credit() -> None:
    found = [path.name for path in CALLERS if "autograd.Function)" in path.read_text()]
    # the first gives parameters theirs, without any logits
    assert sorted(found) == [
        "credit.py",
        "question.py",
    ]


# ---------------------------------------------------------------- autocast


def ridge() -> arsm.Estimator:
    return arsm.RLOO(8, ridge=1.0)


@pytest.mark.parametrize("estimator", [ridge(), arsm.ARSM(), arsm.LocalExpectation()], ids=repr)
def test_autocast_does_not_reach_the_credit_of_an_episode(estimator: arsm.Estimator) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, 1, 5, generator=generator)
    actions = arsm.sample(logits, generator)
    plan = policy.plan(estimator, logits, actions, generator=generator)
    returns = torch.randn(4, 3, generator=generator)
    rollout_returns = torch.randn(len(plan.step), generator=generator)
    expected = policy.gradient(estimator, logits, plan, returns, rollout_returns)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = policy.gradient(estimator, logits, plan, returns, rollout_returns)
    assert torch.equal(found, expected)


def test_autocast_does_not_reach_the_credit_of_a_pyro_program() -> None:
    pyro = pytest.importorskip("pyro", reason="pyro-ppl is not installed; pip install 'arsm[pyro]'")
    import arsm.pyro

    dist = pyro.distributions
    data = torch.randn(6, generator=torch.Generator().manual_seed(0))
    means = torch.tensor([-1.0, 0.5, 2.0])

    def model() -> None:
        with pyro.plate("rows", 6):
            z = pyro.sample("z", dist.Categorical(logits=torch.zeros(3)))
            pyro.sample("x", dist.Normal(means[z], 1.0), obs=data)

    def guide() -> None:
        logits = pyro.param("logits", torch.linspace(-1, 1, 18).view(6, 3))
        with pyro.plate("rows", 6):
            pyro.sample("z", dist.Categorical(logits=logits))

    def gradient() -> Tensor:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        arsm.pyro.ELBO(ridge()).differentiable_loss(model, guide).backward()
        found = pyro.get_param_store()._params["logits"].grad
        assert found is not None
        return found

    expected = gradient()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradient()
    assert torch.equal(found, expected)


# ---------------------------------------------------------------- the ways to ask agree


def f(z: Tensor, row: Tensor) -> Tensor:
    """Different in every row, and not a sum over the variables."""
    place = 5.0 ** torch.arange(z.shape[-1], dtype=torch.float64)
    return ((z * place).sum(-1) + row).sin()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("batch", [(), (7,), (2, 3)], ids=str)
@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_all_ways_to_ask_give_every_query_the_same_value(
    entry: Entry, batch: tuple[int, ...], given: bool
) -> None:
    if not entry.fits(2, 4):
        pytest.skip("not for two variables of four categories")
    estimator = entry.make(2, 4)
    if (
        estimator.needs_gradient
        or estimator.subset is not None
        or (given and not estimator.given_sample)
    ):
        pytest.skip("asks for other points")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*batch, 2, 4, generator=generator, dtype=torch.float64)
    z = arsm.sample(logits, generator) if given else None
    question = pose(estimator, logits, z=z, generator=generator)
    rows = torch.Size(batch).numel()
    asked = [question.asked("packed"), question.asked("dense")]
    found = [question.spread(x, [f(x.z, x.row)]).all for x in asked]

    others = question.others()
    true = f(question.true.reshape(rows, 2), torch.arange(rows)).view(batch)
    found.append(question.spread_others(others, f(others.point, others.row), true))

    whole = question.asked_queries()
    points = question.queries.points[whole]
    row = torch.arange(rows).view(batch).expand(points.shape[:-1])
    found.append(question.spread_queries(whole, f(points, row)).all)
    for each in found[1:]:
        assert torch.equal(each, found[0])


def test_what_is_known_is_not_asked_again() -> None:
    """Of three equal categories ARSM asks for the others than the true one, and `Exact` for all but
    it.
    """
    logits = torch.zeros(50, 1, 3, dtype=torch.float64)
    z = torch.zeros(50, 1, dtype=torch.int64)
    for question in (pose(arsm.LocalExpectation(), logits, z=z), pose(arsm.Exact(), logits)):
        others = question.others()
        assert torch.bincount(others.row).tolist() == [2] * 50
        assert not bool((others.point == question.true[others.row]).any())


def test_one_value_carries_several_credits() -> None:
    first, second = (
        torch.zeros(3, 1, 2, requires_grad=True),
        torch.zeros(3, 2, 4, requires_grad=True),
    )
    value = attach(
        attach(torch.arange(3.0), first, torch.full((3, 1, 2), 2.0)),
        second,
        torch.full((3, 2, 4), 5.0),
    )
    assert value.tolist() == [0, 1, 2]
    value.backward(torch.tensor([1.0, 0.0, -1.0]))
    assert first.grad is not None
    assert second.grad is not None
    assert first.grad[:, 0, 0].tolist() == [2, 0, -2]
    assert second.grad[:, 1, 3].tolist() == [5, 0, -5]


@pytest.mark.parametrize("sizes", [(24,), (4, 20), (12, 12), (7, 17), (8, 8, 8)])
def test_compiled_or_not_a_query_takes_the_value_that_it_shares(sizes: tuple[int, ...]) -> None:
    """Six queries of four rows, whose values come in parts: of the live queries and the others, or
    cut anywhere.
    """
    generator = torch.Generator().manual_seed(0)
    same_as = (torch.rand(6, 4, generator=generator) * torch.arange(1, 7).view(6, 1)).long()
    parts = list(torch.randn(24, generator=generator).split(sizes))
    compiled = torch.compile(two_ways.take, backend="eager", fullgraph=True)
    joined = torch.cat(parts).view(6, 4)
    expected = torch.stack([joined[same_as[:, row], row] for row in range(4)], 1)
    assert torch.equal(two_ways.take(parts, same_as), expected)
    assert torch.equal(compiled(parts, same_as), expected)


@pytest.mark.parametrize(
    "estimator",
    [arsm.ARSM(), arsm.RLOO(4, live=1), arsm.RLOO(4), arsm.GumbelSoftmax()],
    ids=lambda estimator: str(estimator),
)
def test_inside_vmap_values_of_f_are_told_without_their_graph(estimator: arsm.Estimator) -> None:
    """Through the credit it would have the factor 0, and be walked at every step."""
    weights = torch.randn(3, 4, 5, requires_grad=True)
    logits = torch.randn(3, 6, 4, 5, requires_grad=True)

    def f(z: Tensor, weight: Tensor) -> Tensor:
        return (arsm.one_hot(z, 5) * weight).sum((-2, -1)).sin()

    def one(weight: Tensor, logits: Tensor) -> tuple[Tensor, list[Any]]:
        each = weight.expand(6, 4, 5)
        out = arsm.estimate(estimator, logits, f, each, evaluation="dense", max_rows=None)
        return out.value, [out.info, *([] if out.grad is None else [out.grad])]

    value, told = torch.vmap(one, randomness="different")(weights, logits)
    assert value.requires_grad
    assert not any(each.requires_grad for each in tree_leaves(told))
