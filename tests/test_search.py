"""Spaces with names, conditions and constraints, and the search of a loop of one's own."""

from __future__ import annotations

import itertools
import math
import zlib
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
from arsm.search import rounds
from arsm.search.space import read_space

NAMED = {
    "layers": [2, 4, 8],
    "act": ["relu", "gelu", "tanh"],
    "width": (16, 32, 64, 128, 256),
    "norm": [None, "batch", "layer"],
    "skip": [False, True],
}
CONDITIONAL = {
    "optimiser": ["sgd", "adam", "lion"],
    "momentum": arsm.When([0.0, 0.5, 0.9], optimiser="sgd"),
    "nesterov": arsm.When([False, True], momentum=[0.5, 0.9]),
    "beta": arsm.When([0.9, 0.99, 0.999], optimiser=["adam", "lion"]),
    "rate": [0.1, 0.01, 0.001],
}


def quality(settings: dict[str, Any]) -> float:
    """Largest at the last value of every variable."""
    names = NAMED.items()
    return float(sum(list(values).index(settings[name]) for name, values in names))


def by_number(z: Tensor) -> float:
    return float(z.double().sum())


def search(f: Any, space: Any, **options: Any) -> arsm.Maximum:
    return arsm.maximize(f, space, **{"evaluations": 120, "progress": False, **options})


# ---------------------------------------------------------------- names


def test_names_are_numbers_with_other_words() -> None:
    named, plain = search(quality, NAMED), search(by_number, [3, 3, 5, 3, 2])
    assert torch.equal(named.state["points"], plain.state["points"])
    assert torch.equal(named.state["logits"], plain.state["logits"])
    assert named.settings == {
        "layers": 8,
        "act": "tanh",
        "width": 256,
        "norm": "layer",
        "skip": True,
    }
    assert plain.settings is None


def test_named_points_reach_other_processes_and_batches() -> None:
    one = search(quality, NAMED)
    with ProcessPoolExecutor(2) as processes:
        other = search(quality, NAMED, map=processes.map)
    batched = search(lambda points: [quality(point) for point in points], NAMED, batched=True)
    assert torch.equal(one.state["points"], other.state["points"])
    assert torch.equal(one.state["points"], batched.state["points"])


def test_values_may_be_anything() -> None:
    table = torch.eye(2)
    best = search(
        lambda s: float(s["kind"] is torch.nn.Tanh) + float(s["x"].sum()),
        {"kind": [torch.nn.ReLU, torch.nn.Tanh], "x": [table, 2 * table], "y": [1, True, 1.0]},
    )
    assert best.settings is not None
    assert best.settings["kind"] is torch.nn.Tanh
    assert best.settings["x"] is not table
    assert "kind=Tanh" in str(best)


def test_failures_are_told_by_name() -> None:
    def f(settings: dict[str, Any]) -> float:
        if settings["act"] == "relu":
            raise RuntimeError("no")
        return quality(settings)

    best = search(f, NAMED)
    assert best.failures
    assert all(point["act"] == "relu" for point, _ in best.failures)
    with pytest.raises(
        RuntimeError, match=r"f failed at layers=\d, act=relu, .*: RuntimeError: no"
    ):
        search(f, NAMED, raise_errors=True)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({}, "no variables"),
        ({"a": []}, '"a" needs at least one value'),
        ({"a": "relu"}, 'values of "a" must be a list'),
        ({"a": 3}, 'values of "a" must be a list'),
        ({1: [2, 3]}, "names of variables must be words"),
        ({"a": ["x", 2, "x"]}, '"a" has a value twice; list every value once'),
        ({"a": [[1, 2], [1, 2]]}, '"a" has a value twice'),
        ({"b": arsm.When([1, 2], a=1), "a": [1, 2]}, '"b" depends on "a", which must be'),
        ({"a": [1, 2], "b": arsm.When([1, 2], a=3)}, '3 is no value of "a"'),
    ],
    ids=str,
)
def test_wrong_spaces_are_refused(space: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        search(quality, space)


def test_a_search_goes_on_in_its_own_space_only() -> None:
    """Other values of the same number would be credited with what they never gave."""
    named = {"layers": [2, 4, 8], "act": [torch.nn.ReLU, torch.nn.Tanh]}
    state = search(lambda s: s["layers"], named, evaluations=3).state
    assert search(lambda s: s["layers"], named, evaluations=6, state=state).value == 8
    for other in (
        {**named, "layers": [2, 4, 16]},
        {**named, "layers": [8, 4, 2]},
        {"depth": named["layers"], "act": named["act"]},
        {"layers": named["layers"], "act": arsm.When(named["act"], layers=8)},
        {**named, "act": [torch.nn.Tanh, torch.nn.ReLU]},
    ):
        with pytest.raises(ValueError, match="state is of a search over other variables or values"):
            search(lambda s: 0.0, other, evaluations=6, state=state)


def test_a_misspelt_option_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match=r'arsm\.Search has no option "evaluatons"; did you mean'):
        arsm.Search([2], evaluatons=3)  # pyright: ignore[reportCallIssue]


def test_a_condition_is_needed() -> None:
    with pytest.raises(ValueError, match=r"arsm\.When needs a condition"):
        arsm.When([1, 2])


# ---------------------------------------------------------------- conditions


def conditional_points() -> set[tuple[tuple[str, Any], ...]]:
    """All points of the conditional space, written out by hand."""
    points = []
    for rate in (0.1, 0.01, 0.001):
        points += [{"optimiser": "sgd", "momentum": 0.0, "rate": rate}]
        for momentum, nesterov in itertools.product((0.5, 0.9), (False, True)):
            point = {"optimiser": "sgd", "momentum": momentum, "nesterov": nesterov, "rate": rate}
            points += [point]
        for optimiser, beta in itertools.product(("adam", "lion"), (0.9, 0.99, 0.999)):
            points += [{"optimiser": optimiser, "beta": beta, "rate": rate}]
    return {tuple(point.items()) for point in points}


def test_variables_exist_where_their_conditions_hold() -> None:
    """Each point is evaluated once, and all of them are found."""
    seen: list[tuple[tuple[str, Any], ...]] = []

    def f(settings: dict[str, Any]) -> float:
        seen.append(tuple(settings.items()))
        return float(len(settings)) + settings["rate"]

    best = search(f, CONDITIONAL)
    assert len(seen) == len(set(seen)) == len(conditional_points())
    assert set(seen) == conditional_points()
    assert best.stopped == "all points known"
    assert best.settings is not None
    assert best.settings == {**best.settings, "optimiser": "sgd", "rate": 0.1}
    assert "beta" not in best.settings


def test_a_large_conditional_space_is_searched() -> None:
    space: dict[str, Any] = {"kind": ["a", "b"]}
    for kind, k in itertools.product("ab", range(20)):
        space[f"{kind}{k}"] = arsm.When(list(range(6)), kind=kind)

    def f(settings: dict[str, Any]) -> float:
        assert len(settings) == 21
        return sum(v for name, v in settings.items() if name != "kind") + (settings["kind"] == "b")

    best = search(f, space, evaluations=1500)
    assert best.settings is not None
    assert best.settings["kind"] == "b"
    assert best.value == 101


def test_a_variable_that_no_point_has_is_not_moved() -> None:
    """Its estimate is noise with mean 0."""
    found = arsm.Search({"kind": ["a", "b"], "x": arsm.When([0, 1, 2], kind="b")}, seed=0)
    found.logits = torch.tensor([[40.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]], dtype=torch.float64)
    found.tell({"kind": "b", "x": 1}, 5.0)
    (point,) = found.ask()
    assert point == {"kind": "a"}
    before = found.logits.clone()
    found.tell(point, 1.0)
    assert torch.equal(found.logits[1] / found.logits[1].abs().max().clamp_min(1), before[1])


# ---------------------------------------------------------------- constraints


def test_infeasible_points_cost_nothing() -> None:
    asked: list[tuple[int, ...]] = []

    def feasible(z: Tensor) -> bool:
        asked.append(tuple(z.tolist()))
        return int(z.sum()) <= 12

    def f(z: Tensor) -> float:
        assert int(z.sum()) <= 12
        return float((z.double() * torch.arange(1, 7)).sum())

    best = search(f, [5] * 6, feasible=feasible, evaluations=800)
    assert len(best.history) == 800
    assert not best.failures
    assert best.point.tolist() == [0, 0, 0, 4, 4, 4]
    assert len(asked) == len(set(asked)), "each point is asked about once"


def test_every_feasible_point_of_a_small_space_is_found() -> None:
    best = search(by_number, [4, 4, 4], feasible=lambda z: z.sum() % 3 == 0)
    assert best.stopped == "all points known"
    assert len(best.history) == sum(sum(z) % 3 == 0 for z in itertools.product(range(4), repeat=3))


def test_neighbours_of_a_known_point_find_rare_feasible_ones() -> None:
    """61 points of 3^30 are feasible: draws do not find them."""
    own = arsm.Search([3] * 30, feasible=lambda z: int((z != 0).sum()) <= 1)
    own.tell([0] * 30, 0.0)
    while points := own.ask():
        for point in points:
            own.tell(point, by_number(point))
    assert own.stopped == "no new points"
    assert len(own.best.history) == 61


def test_no_feasible_point_is_an_error() -> None:
    with pytest.raises(ValueError, match="no point drawn in 1,000 rounds was feasible"):
        search(by_number, [3] * 30, feasible=lambda z: False)
    with pytest.raises(ValueError, match="no point drawn in 1,000 rounds was feasible"):
        search(by_number, [2, 2], feasible=lambda z: False)


def test_feasible_sees_names() -> None:
    best = search(quality, NAMED, feasible=lambda s: not (s["skip"] and s["norm"] is None))
    points = [read_space(NAMED).settings(tuple(p)) for p in best.state["points"].tolist()]
    assert all(isinstance(s, dict) and (not s["skip"] or s["norm"]) for s in points)
    with pytest.raises(TypeError, match="feasible must be a function"):
        search(quality, NAMED, feasible=True)  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------- ask and tell


@pytest.mark.parametrize(
    "space", [NAMED, [3, 3, 5, 3, 2], CONDITIONAL], ids=["named", "sizes", "c"]
)
def test_a_loop_of_ones_own_is_the_same_search(space: Any) -> None:
    def f(point: Any) -> float:
        return float(zlib.crc32(str(point).encode()))

    whole = search(f, space)
    own = arsm.Search(space, evaluations=120)
    while points := own.ask():
        assert len(points) <= 16
        for point in reversed(points):  # in any order
            own.tell(point, f(point))
    assert own.stopped == whole.stopped
    assert own.best.value == whole.value
    assert sorted(own.best.state["points"].tolist()) == sorted(whole.state["points"].tolist())
    assert torch.equal(own.best.state["logits"], whole.state["logits"])


def test_asking_twice_gives_what_is_not_told() -> None:
    own = arsm.Search(NAMED)
    points = own.ask()
    own.tell(points[0], 1.0)
    assert own.ask() == points[1:]
    own.tell(points[0], 7.0)  # a known point keeps its value
    assert own.best.value == 1.0


def test_points_known_from_elsewhere_and_failures_can_be_told() -> None:
    own = arsm.Search(NAMED, evaluations=40)
    good = {"layers": 8, "act": "tanh", "width": 256, "norm": "layer", "skip": False}
    own.tell(good, quality(good))
    while points := own.ask():
        assert good not in points
        for point in points:
            own.tell(point, None if point["act"] == "relu" else quality(point))
    assert own.best.failures
    assert own.best.value >= quality(good)
    assert len(own.best.history) == 40
    own.extend(60)
    assert own.ask()


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ({"layers": 2}, 'has no value of "act"'),
        ({**dict.fromkeys(NAMED, 2)}, '2 is no value of "act"'),
        ({"deep": 1}, "no variable 'deep'"),
        ([0, 1], "must be a dict of values"),
    ],
    ids=str,
)
def test_wrong_points_are_refused(point: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arsm.Search(NAMED).tell(point, 1.0)


def test_wrong_numbered_points_are_refused() -> None:
    own = arsm.Search([2, 3])
    for point in ([0], [0.0, 1.0], [0, 3], [-1, 0]):
        with pytest.raises(ValueError, match="point"):
            own.tell(point, 1.0)


def test_no_best_before_a_value() -> None:
    own = arsm.Search([2, 3])
    with pytest.raises(ValueError, match="no value yet"):
        _ = own.best
    own.tell([0, 0], math.nan)
    with pytest.raises(ValueError, match="no value yet"):
        _ = own.best


# ---------------------------------------------------------------- failures and printing


@pytest.mark.parametrize("evaluations", [1, 5, 16, 17])
def test_a_first_round_that_fails_altogether_raises(evaluations: int) -> None:
    """Also where the evaluations do not suffice for a round."""
    first = min(16, evaluations)
    with pytest.raises(RuntimeError, match=f"every one of the first {first} points.*nan"):
        search(lambda z: math.nan, [3] * 8, evaluations=evaluations)


def test_results_print_in_a_few_lines() -> None:
    best = search(quality, NAMED, evaluations=50)
    lines = str(best).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"{best.value:.6g} at layers=")
    assert lines[1].endswith("of 50; stopped: evaluations")
    assert repr(best).startswith("Maximum(value=")
    long = search(by_number, [3] * 300, evaluations=40)
    assert len(str(long).splitlines()) <= 5
    assert max(map(len, str(long).splitlines())) <= 80


def test_idle_rounds_are_counted_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "IDLE_ROUNDS", 3)
    own = arsm.Search([9] * 9, feasible=lambda z: bool((z == 0).all()))
    own.tell([0] * 9, 1.0)
    assert own.ask() == []
    assert own.stopped == "no new points"
