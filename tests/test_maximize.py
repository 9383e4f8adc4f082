"""`maximize`: the same points for every way to map, each evaluated once; failures, interruption,
and going on.
"""

from __future__ import annotations

import io
import math
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import arsm

SIZES = [2, 9, 4, 3, 5, 7]


def additive(z: Tensor) -> float:
    """Largest where every variable has its largest value; one interaction."""
    return float(z.double().sum() + 3.0 * (z[0] * z[1] == 8))


def slow(z: Tensor) -> float:
    time.sleep(0.01)
    return additive(z)


def failing(z: Tensor) -> float:
    if z[1] == 3:
        raise RuntimeError(f"no model with {z.tolist()}")
    return math.nan if z[2] == 1 else additive(z)


def maximize(f: Any, sizes: list[int] = SIZES, **options: Any) -> arsm.Maximum:
    return arsm.maximize(f, sizes, **{"evaluations": 300, "progress": False, **options})


def same(a: arsm.Maximum, b: arsm.Maximum) -> bool:
    equal = [torch.equal(a.state[name], b.state[name]) for name in ("points", "values", "logits")]
    return all(equal) and torch.equal(a.history, b.history)


def test_it_finds_the_best_point() -> None:
    best = maximize(additive)
    assert best.point.tolist() == [1, 8, 3, 2, 4, 6]
    assert best.value == additive(best.point) == best.history[-1]
    assert best.probabilities.shape == (6, 9)
    assert best.stopped == "evaluations"


def test_no_point_is_evaluated_twice_and_the_budget_is_kept_exactly() -> None:
    seen: list[tuple[int, ...]] = []

    def f(z: Tensor) -> float:
        assert z.dtype == torch.int64
        assert z.shape == (6,)
        assert all(0 <= v < size for v, size in zip(z.tolist(), SIZES, strict=True))
        seen.append(tuple(z.tolist()))
        return additive(z)

    best = maximize(f, evaluations=203)
    assert len(seen) == len(set(seen)) == 203 == len(best.history)
    assert torch.equal(best.state["points"], torch.tensor(seen))
    assert torch.equal(best.history, best.state["values"].cummax(0).values)


@pytest.mark.parametrize("sizes", [[3, 2], [1, 4], [1]], ids=str)
def test_it_stops_when_every_point_is_known(sizes: list[int]) -> None:
    best = maximize(additive, [*sizes, 1, 1, 1])
    assert best.stopped == "all points known"
    assert len(best.history) == math.prod(sizes)


def test_every_way_to_map_evaluates_the_same_points() -> None:
    one = maximize(additive)
    assert same(one, maximize(additive, map=map))
    with ThreadPoolExecutor(3) as threads:
        assert same(one, maximize(additive, map=threads.map))
    with ProcessPoolExecutor(2) as processes:
        assert same(one, maximize(additive, map=processes.map))
    batched = maximize(
        lambda z: torch.stack([torch.tensor(additive(row)) for row in z]), batched=True
    )
    assert same(one, batched)
    assert not same(one, maximize(additive, seed=1))


@pytest.mark.parametrize(
    "convert",
    [float, np.float32, torch.tensor, lambda x: np.array([x]), lambda x: torch.tensor([[x]]), int],
    ids=["float", "numpy", "tensor", "array", "matrix", "int"],
)
def test_any_number_is_a_value(convert: Any) -> None:
    assert same(
        maximize(additive, evaluations=50), maximize(lambda z: convert(additive(z)), evaluations=50)
    )


@pytest.mark.parametrize("exponent", [-1000, 1000])
def test_the_unit_of_f_is_immaterial(exponent: int) -> None:
    """Also where the squares of the values are 0 or infinite."""
    plain, scaled = maximize(additive), maximize(lambda z: math.ldexp(additive(z), exponent))
    assert torch.equal(plain.state["points"], scaled.state["points"])
    assert torch.equal(plain.probabilities, scaled.probabilities)


def test_the_largest_number_is_a_penalty() -> None:
    found = maximize(lambda z: additive(z) if z[0] > 0 else -sys.float_info.max)
    assert found.value == maximize(additive).value


def test_a_batched_f_may_return_numpy() -> None:
    by_row = maximize(additive, evaluations=50)
    assert same(
        by_row,
        maximize(lambda z: np.array([additive(row) for row in z]), batched=True, evaluations=50),
    )


def trained(z: Tensor) -> Tensor:
    """f may train something, whose gradient must not be switched off."""
    weight = torch.ones(6, requires_grad=True)
    (weight * z).sum().backward()
    assert weight.grad is not None
    return weight.grad.sum()


def test_f_may_use_autograd() -> None:
    best = maximize(trained, raise_errors=True, evaluations=40)
    assert same(
        best,
        maximize(lambda z: torch.stack([trained(row) for row in z]), batched=True, evaluations=40),
    )
    with ProcessPoolExecutor(1) as processes:
        assert same(best, maximize(trained, map=processes.map, evaluations=40))
    logits = arsm.ragged(SIZES)
    assert float(arsm.estimate(arsm.RLOO(2), logits, arsm.rowwise(trained), frozen=True).value) >= 0


# ---------------------------------------------------------------- failures


def test_failures_are_named_counted_and_avoided() -> None:
    best = maximize(failing)
    values = best.state["values"]
    assert len(best.failures) == int(values.isnan().sum()) > 0
    assert all(point[1] == 3 or point[2] == 1 for point, _ in best.failures)
    point, error = next(each for each in best.failures if each[0][1] == 3)
    assert error == f"RuntimeError: no model with {point}"
    assert {error for point, error in best.failures if point[1] != 3} == {"f returned nan"}
    assert best.point.tolist() == [1, 8, 3, 2, 4, 6]
    assert best.probabilities[1, 3] < 1 / 9
    assert len(values) == 300


def test_failures_raise_if_asked() -> None:
    with pytest.raises(
        RuntimeError, match=r"f failed at \[\d, .*: (RuntimeError: no model|f returned nan)"
    ):
        maximize(failing, raise_errors=True)


def test_an_f_that_always_fails_is_told_after_one_round() -> None:
    calls = []

    def f(z: Tensor) -> str:
        calls.append(z)
        return "three"

    with pytest.raises(
        RuntimeError, match=r"every one of the first 16 points.*one number per point.*str"
    ):
        maximize(f)
    assert len(calls) == 16


# ---------------------------------------------------------------- the end, and after it


def interrupted_after(count: int) -> Any:
    calls = []

    def f(z: Tensor) -> float:
        calls.append(z)
        if len(calls) > count:
            raise KeyboardInterrupt
        return additive(z)

    return f


@pytest.mark.parametrize("count", [1, 16, 100, 160, 161])
def test_an_interrupted_search_goes_on_as_if_it_had_not_been(count: int) -> None:
    whole = maximize(additive, evaluations=200)
    part = maximize(interrupted_after(count), evaluations=200)
    assert part.stopped == "interrupted"
    assert len(part.history) == count
    assert part.value == float(whole.history[count - 1])
    file = io.BytesIO()
    torch.save(part.state, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert same(whole, maximize(additive, evaluations=200, state=state))


def test_an_interruption_before_the_first_value_is_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        maximize(interrupted_after(0))


def test_the_callback_sees_every_round_and_ends_the_search() -> None:
    seen: list[arsm.Maximum] = []

    def callback(best: arsm.Maximum) -> bool:
        seen.append(best)
        return len(best.history) >= 100

    stopped = maximize(additive, callback=callback)
    assert stopped.stopped == "callback"
    assert [best.value for best in seen] == sorted(best.value for best in seen)
    assert same(maximize(additive), maximize(additive, state=seen[2].state))


def test_failures_survive_in_the_state() -> None:
    part = maximize(failing, callback=lambda best: len(best.history) > 100)
    assert (
        maximize(failing, state=part.state, raise_errors=False).failures
        == maximize(failing).failures
    )


def test_a_larger_budget_goes_on_with_what_is_known() -> None:
    calls = []
    first = maximize(additive, evaluations=100)
    second = maximize(
        lambda z: (calls.append(z), additive(z))[1], evaluations=150, state=first.state
    )
    assert len(calls) == 50
    assert torch.equal(second.state["points"][:100], first.state["points"])


def test_patience() -> None:
    best = maximize(lambda z: 0.0, patience=40)
    assert best.stopped == "patience"
    assert 40 < len(best.history) <= 40 + 16 + 1


# ---------------------------------------------------------------- estimators and refusals


@pytest.mark.parametrize("words", ["arsm", "carms:samples=8", "local-expectation", "4*reinforce"])
def test_other_estimators(words: str) -> None:
    best = maximize(additive, estimator=arsm.estimator(words))
    assert best.value > additive(torch.tensor([1, 6, 2, 1, 3, 5]))


def test_samples_resize_the_estimator() -> None:
    sizes = []
    maximize(
        lambda z: (sizes.append(len(z)), z.double().sum(-1))[1],
        batched=True,
        samples=5,
        estimator=arsm.RLOO(40),
    )
    assert sizes[0] == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sizes": []}, "sizes must be"),
        ({"sizes": [2, 0]}, "sizes must be"),
        ({"sizes": [2.5]}, "sizes must be"),
        ({"evaluations": 0}, "evaluations must be at least 1"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"seed": 2**64}, "seed must be a whole number from 0"),
        ({"seed": None}, "seed must be a whole number from 0"),
        ({"map": lambda f, points: []}, "one result per item"),
        ({"estimator": arsm.RELAX()}, "RELAX learns .* has no learned parts"),
        ({"estimator": arsm.SubsetRLOO(2), "sizes": [5]}, "SubsetRLOO chooses 2 categories"),
        ({"state": {}}, "state must be the `state` of a result"),
        ({"batched": True, "map": map}, "leave it out"),
        ({"estimator": arsm.StraightThrough()}, "only evaluates f"),
        ({"estimator": arsm.VIMCO(4)}, "VIMCO estimates a multi-sample bound"),
        ({"estimator": arsm.LocalExpectation(), "samples": 4}, "leave samples out"),
        ({"batched": True}, "leave batched out"),
        (
            {"state": arsm.maximize(lambda z: 0.0, [2, 2], progress=False).state},
            "state is of a search",
        ),
    ],
    ids=lambda x: str(x)[:30],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        maximize(lambda z: torch.zeros(3, 2) if z.ndim == 2 else 0.0, **options)


def test_places_of_known_points_go_to_neighbours_of_the_best() -> None:
    sizes, rounds = SIZES * 4, []
    best = maximize(
        additive, sizes, evaluations=600, callback=lambda so_far: rounds.append(len(so_far.history))
    )
    points, values = best.state["points"], best.state["values"]
    new = torch.tensor([0, *rounds]).diff()
    assert float((new == 16).double().mean()) > 0.8, "most rounds are full"
    starts = [start for start in rounds if start < 600]
    distance = [
        (points[start : start + 16] != points[values[:start].argmax()]).sum(-1) for start in starts
    ]
    neighbours = [int((round == 1).sum()) for round in distance]
    assert max(neighbours[:5]) == 0
    assert max(neighbours) == 16
    for k, size in enumerate(sizes):
        changed = best.point.repeat(size, 1)
        changed[:, k] = torch.arange(size)
        assert (changed.unsqueeze(1) == points).all(-1).any(-1).all(), (
            "the best is known to be better than its neighbours"
        )


@pytest.mark.slow
def test_processes_share_the_time() -> None:
    start = time.perf_counter()
    maximize(slow, SIZES * 4)
    serial = time.perf_counter() - start
    workers = 8 if (os.cpu_count() or 1) >= 8 else 2
    with ProcessPoolExecutor(workers) as processes:
        list(processes.map(additive, [torch.zeros(6, dtype=torch.int64)] * workers))
        start = time.perf_counter()
        maximize(slow, SIZES * 4, map=processes.map)
        assert serial / (time.perf_counter() - start) > (6 if workers == 8 else 1.8)


@pytest.mark.slow
def test_rays_pool_evaluates_the_same_points() -> None:
    multiprocessing = pytest.importorskip("ray.util.multiprocessing")
    with multiprocessing.Pool(2) as pool:
        assert same(maximize(additive), maximize(additive, map=pool.map))


# ---------------------------------------------------------------- rowwise and ragged


def with_context(z: Tensor, weight: Tensor) -> float:
    assert z.shape == (3,)
    assert weight.shape == (2,)
    return float(weight.sum() * z.double().mul(torch.tensor([1.0, 10.0, 100.0])).sum())


def test_rowwise_is_the_batched_function() -> None:
    logits = arsm.ragged([2, 9, 4]).expand(5, 3, 9)
    weight = torch.rand(5, 2, dtype=torch.float64)

    def batched(z: Tensor, weight: Tensor) -> Tensor:
        return weight.sum(-1) * (z.double() * torch.tensor([1.0, 10.0, 100.0])).sum(-1)

    noise = (estimator := arsm.RLOO(6)).noise(logits)
    expected = arsm.estimate(estimator, logits, batched, weight, noise=noise)
    with ProcessPoolExecutor(2) as processes:
        for how in (None, map, processes.map):
            out = arsm.estimate(
                estimator, logits, arsm.rowwise(with_context, map=how), weight, noise=noise
            )
            assert torch.allclose(out.value, expected.value)
            assert out.grad is not None
            assert expected.grad is not None
            assert torch.allclose(out.grad, expected.grad)


def test_rowwise_says_what_is_no_number() -> None:
    with pytest.raises(
        TypeError, match=r"one number per point, but returned Tensor of shape \[3\]"
    ):
        arsm.rowwise(lambda z: z.double())(torch.zeros(2, 3, dtype=torch.int64))


def test_ragged_logits_mask_what_a_variable_does_not_have() -> None:
    logits = arsm.ragged([2, 3, 1])
    inf = math.inf
    assert logits.tolist() == [[0, 0, -inf], [0, 0, 0], [0, -inf, -inf]]
