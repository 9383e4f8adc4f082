"""`arsm.maximize` as a sampler of Optuna's studies.

    study = optuna.create_study(direction="maximize", sampler=arsm.optuna.Sampler())
    study.optimize(objective, n_trials=500)

The sampler's memory is the study: before each trial it reads the finished ones, also
those of other processes and of earlier days.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

try:
    from optuna.distributions import (  # pyright: ignore[reportMissingImports]
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )
    from optuna.samplers import BaseSampler, RandomSampler  # pyright: ignore[reportMissingImports]
    from optuna.search_space import (  # pyright: ignore[reportMissingImports]
        IntersectionSearchSpace,
    )
    from optuna.study import StudyDirection  # pyright: ignore[reportMissingImports]
    from optuna.trial import TrialState  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "optuna":
        raise
    raise ModuleNotFoundError(
        "arsm.optuna needs Optuna; install it with `pip install 'arsm[optuna]'`.", name="optuna"
    ) from None

from arsm.draws import sample
from arsm.options import suggests
from arsm.search import Search
from arsm.search.space import Point
from arsm.types import Estimator

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution  # pyright: ignore[reportMissingImports]
    from optuna.study import Study  # pyright: ignore[reportMissingImports]
    from optuna.trial import FrozenTrial  # pyright: ignore[reportMissingImports]

__all__ = ["Sampler"]

MOST_VALUES = 128
"""Numbers with more values than this are sampled at random, as continuous ones are."""

ALWAYS_LEFT = 1000
"""Evaluations that the search believes to have left at least: it is the study that ends."""
TRIES = 32
"""Draws of a point outside the round, until one is new."""


class Sampler(BaseSampler):
    """Samples the discrete parameters of a study as `arsm.maximize` does.

    Categorical parameters, and numbers with at most 128 values, are searched together.
    Continuous ones, and those that only some trials have, are drawn at random: let
    another sampler choose where they matter. Failed and pruned trials count as the
    worst value so far.

    Args:
        evaluations: how many trials you expect: longer searches take smaller steps.
        samples: trials per round; 16 if neither this nor an estimator is given. The
            search learns after each round, so up to as many trials can run at once.
        estimator: any that only evaluates f, as for `arsm.maximize`.
        seed: of all randomness; a random one if None.
    """

    @suggests("arsm.optuna.Sampler")
    def __init__(
        self,
        *,
        evaluations: int = 1000,
        samples: int | None = None,
        estimator: Estimator | None = None,
        seed: int | None = None,
    ) -> None:
        self._evaluations = evaluations
        self._samples = samples
        self._estimator = estimator
        self._seed = secrets.randbelow(1 << 31) if seed is None else seed
        self._random = RandomSampler(seed=self._seed)
        self._intersection = IntersectionSearchSpace()
        self._started: _Started | None = None
        self._lock = threading.Lock()  # several threads may ask the sampler of one study
        # refuses bad options here rather than in the first trial
        Search([2], evaluations=evaluations, samples=samples, estimator=estimator, seed=self._seed)

    def reseed_rng(self) -> None:
        """Take other random numbers, for a copy in another process."""
        self._random.reseed_rng()
        self._seed = secrets.randbelow(1 << 31)
        self._started = None

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """The discrete parameters that all trials have."""
        shared = self._intersection.calculate(study)
        return {
            name: distribution
            for name, distribution in shared.items()
            if _count(distribution) is not None and not distribution.single()
        }

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The next point of the search."""
        _require_one_objective(study)
        discrete = {
            name: distribution
            for name, distribution in search_space.items()
            if _count(distribution) is not None
        }
        others = {
            name: self._random.sample_independent(study, trial, name, distribution)
            for name, distribution in search_space.items()
            if name not in discrete
        }
        if not discrete:
            return others
        with self._lock:
            point = self._of(study, discrete).next_point(study)
        chosen = {}
        for (name, distribution), place in zip(discrete.items(), point, strict=True):
            chosen[name] = _value(distribution, place)
        # in the order of the search space
        both = {**others, **chosen}
        return {name: both[name] for name in search_space}

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """A random value, for parameters that the search leaves out."""
        _require_one_objective(study)
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def _of(self, study: Study, discrete: dict[str, BaseDistribution]) -> _Started:
        """The search over these parameters; another space or study begins another one."""
        key = (study.study_name, discrete)
        if self._started is None or self._started.key != key:
            search = Search(
                [_count(distribution) or 1 for distribution in discrete.values()],
                evaluations=self._evaluations,
                samples=self._samples,
                estimator=self._estimator,
                seed=self._seed,
            )
            self._started = _Started(key, search)
        return self._started


class _Started:
    """A search over the parameters of a study."""

    def __init__(self, key: tuple[str, dict[str, BaseDistribution]], search: Search) -> None:
        self.key = key
        self.search = search
        self.read: set[int] = set()
        """Numbers of the trials whose values the search has."""
        self.given: set[Point] = set()
        """Points that were given to trials which have not ended."""
        self.extra = 0
        """Points given since then that are not of the round."""

    def next_point(self, study: Study) -> Point:
        """A point of the round; if trials have them all, one of the current distribution."""
        self.tell_finished(study)
        # a study may go on for longer than was expected
        self.search.extend(len(self.search.known.values) + ALWAYS_LEFT)
        wanted = self.search.ask_points()
        self.given -= self.search.known.index.keys()
        if self.extra > len(wanted):  # a trial that was killed never ends: try its point again
            self.given.clear()
        free = [point for point in wanted if point not in self.given]
        if free:
            self.extra = 0
            self.given.add(free[0])
            return free[0]
        self.extra += 1
        return self.draw()

    def draw(self) -> Point:
        """A point of the current distribution, a new one if a few draws find one."""
        # not the search's generator: its round must not depend on how many trials run at once
        generator = torch.Generator().manual_seed(secrets.randbelow(1 << 31))
        several = self.search.logits.expand(TRIES, *self.search.logits.shape)
        drawn = [tuple(point) for point in sample(several, generator).tolist()]
        new = [p for p in drawn if p not in self.search.known.index and p not in self.given]
        point = (new or drawn)[0]
        self.given.add(point)
        return point

    def tell_finished(self, study: Study) -> None:
        """Tell the search every finished trial that it does not know yet."""
        sign = 1.0 if study.direction == StudyDirection.MAXIMIZE else -1.0
        ended = (TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED)
        for trial in study.get_trials(deepcopy=False, states=ended):
            if trial.number in self.read:
                continue
            self.read.add(trial.number)
            point = self.point(trial)
            if point is None:
                continue
            if trial.state == TrialState.COMPLETE and trial.value is not None:
                self.search.tell(torch.tensor(point), sign * trial.value)
            else:
                self.search.tell(torch.tensor(point), None)

    def point(self, trial: FrozenTrial) -> Point | None:
        """The trial's point; None if it lies outside the space."""
        places = []
        for name, distribution in self.key[1].items():
            if name not in trial.params:
                return None
            place = _place(distribution, trial.params[name])
            if place is None:
                return None
            places.append(place)
        return tuple(places)


# ---------------------------------------------------------------- values by number


def _count(distribution: BaseDistribution) -> int | None:
    """The number of values of a parameter; None if they are too many to search."""
    if isinstance(distribution, CategoricalDistribution):
        return len(distribution.choices)
    low, high, step = _range(distribution)
    if distribution.single():
        return 1
    if step is None:
        return None
    count = round((high - low) / step) + 1
    return count if count <= MOST_VALUES else None


def _value(distribution: BaseDistribution, place: int) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[place]
    low, high, step = _range(distribution)
    if place == 0 or step is None:
        return low
    return min(low + place * step, high)  # rounding may exceed the highest value


def _place(distribution: BaseDistribution, value: Any) -> int | None:
    """The number of a value; None if the parameter does not have it."""
    if isinstance(distribution, CategoricalDistribution):
        return _index(distribution.choices, value)
    low, high, step = _range(distribution)
    if not low <= value <= high:
        return None
    if distribution.single() or step is None:
        return 0
    return round((value - low) / step)


def _range(distribution: BaseDistribution) -> tuple[float, float, float | None]:
    """Lowest value, highest value and step of a parameter that is a number."""
    assert isinstance(distribution, (IntDistribution, FloatDistribution))
    return distribution.low, distribution.high, distribution.step


def _index(choices: Sequence[Any], value: Any) -> int | None:
    for place, choice in enumerate(choices):
        # 1, 1.0 and True are equal, but may be different choices
        if type(choice) is type(value) and choice == value:
            return place
    return None


def _require_one_objective(study: Study) -> None:
    if len(study.directions) > 1:
        raise ValueError(
            "arsm.optuna.Sampler searches for the best of one objective, but the study has "
            f"{len(study.directions)}; use another sampler, such as optuna.samplers.NSGAIISampler."
        )
