"""The sampler for Optuna: Optuna's own tests for samplers, and the same points as `maximize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import arsm

optuna = pytest.importorskip("optuna", reason="in the extra `optuna`")
pytest_samplers = pytest.importorskip("optuna.testing.pytest_samplers")

optuna.logging.set_verbosity(optuna.logging.ERROR)
BASES = (
    pytest_samplers.BasicSamplerTestCase,
    pytest_samplers.RelativeSamplerTestCase,
    pytest_samplers.SingleOnlySamplerTestCase,
)


class TestOptunasOwn(*BASES):  # pyright: ignore[reportGeneralTypeIssues]
    """The cases that Optuna has for samplers of one objective."""

    @pytest.fixture
    def sampler(self) -> Callable[[], Any]:
        return arsm.optuna.Sampler


SPACE = {"a": [0, 1], "b": list(range(9)), "c": ["x", "y", "z", "w"], "d": [0.5, 1.0, 1.5]}


def f(settings: dict[str, Any]) -> float:
    bonus = 3.0 * (settings["a"] * settings["b"] == 8)
    return settings["b"] + "xyzw".index(settings["c"]) + settings["d"] + bonus


def suggested(trial: Any) -> dict[str, Any]:
    return {
        "a": trial.suggest_categorical("a", [0, 1]),
        "b": trial.suggest_int("b", 0, 8),
        "c": trial.suggest_categorical("c", SPACE["c"]),
        "d": trial.suggest_float("d", 0.5, 1.5, step=0.5),
    }


def study(direction: str = "maximize", **options: Any) -> Any:
    sampler = arsm.optuna.Sampler(**{"seed": 0, "evaluations": 100, **options})
    return optuna.create_study(direction=direction, sampler=sampler)


def test_a_study_evaluates_the_points_of_a_search() -> None:
    ran = study()
    ran.optimize(lambda trial: f(suggested(trial)), n_trials=60)
    first, *rest = [trial.params for trial in ran.trials]
    search = arsm.Search(SPACE, evaluations=100, seed=0)
    search.tell(first, f(first))  # the first trial is random: Optuna does not know the space
    expected = []
    while len(expected) < len(rest):
        for point in search.ask():
            expected.append(point)
            search.tell(point, f(point))
    assert rest == expected[: len(rest)]
    assert len({tuple(point.values()) for point in rest}) == len(rest)


def test_minimising_is_maximising_the_negative() -> None:
    up, down = study(), study("minimize")
    up.optimize(lambda trial: f(suggested(trial)), n_trials=40)
    down.optimize(lambda trial: -f(suggested(trial)), n_trials=40)
    assert [t.params for t in up.trials] == [t.params for t in down.trials]
    assert up.best_value == -down.best_value


def test_threads_share_a_round() -> None:
    ran = study(samples=8)
    ran.optimize(lambda trial: f(suggested(trial)), n_trials=60, n_jobs=3)
    points = {tuple(trial.params.values()) for trial in ran.trials}
    assert len(points) >= 50, "few points are tried twice"


def test_it_finds_the_best_also_with_failures() -> None:
    def objective(trial: Any) -> float:
        settings = suggested(trial)
        if settings["c"] == "y":
            raise RuntimeError("no model")
        if settings["c"] == "z":
            raise optuna.TrialPruned
        return f(settings)

    ran = study(samples=8)
    ran.optimize(objective, n_trials=160, catch=(RuntimeError,))
    assert ran.best_params == {"a": 1, "b": 8, "c": "w", "d": 1.5}


def test_a_new_sampler_learns_from_the_studys_trials() -> None:
    ran = study()
    ran.optimize(lambda trial: f(suggested(trial)), n_trials=100)
    ran.sampler = arsm.optuna.Sampler(seed=1, evaluations=200)
    ran.optimize(lambda trial: f(suggested(trial)), n_trials=30)
    points = [tuple(trial.params.values()) for trial in ran.trials]
    assert len(set(points)) == len(points), "no point is tried twice"


def test_a_trial_that_never_ends_does_not_stop_the_search() -> None:
    ran = study(samples=4)
    ran.optimize(lambda trial: f(suggested(trial)), n_trials=1)
    stuck = ran.ask()
    wanted = suggested(stuck)
    ran.optimize(lambda trial: f(suggested(trial)), n_trials=30)
    assert wanted in [trial.params for trial in ran.trials[2:]]


def test_bad_options_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="only evaluates f"):
        arsm.optuna.Sampler(estimator=arsm.StraightThrough())
