"""Other optimisers of discrete black boxes, each asked for 16 points at a time: annealing, Optuna,
nevergrad, CatCMA.

A rival is a function of a `Budget`, which it asks for values until that raises `Spent`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.black_boxes import Array, BlackBox

PARALLEL = 16


class Spent(Exception):
    """The budget is used up."""


class Budget:
    """Values of a black box, up to a number of distinct points; a point asked for again costs
    nothing, unless the optimiser must do without a cache.

    An optimiser that asks for three times as many points as it may evaluate is stopped: it repeats
    itself.
    """

    def __init__(self, box: BlackBox, evaluations: int) -> None:
        self.box, self.evaluations = box, evaluations
        self.cached = True
        self.asked = 0
        self.values: dict[bytes, float] = {}
        self.best: list[float] = []
        """After each evaluation."""

    def __call__(self, z: Array) -> Array:
        """[N, K] -> [N], the points in the order in which they count."""
        z = np.ascontiguousarray(z, dtype=np.int64)
        self.asked += len(z)
        for row, value in zip(z, self.box.f(z), strict=True):
            if row.tobytes() not in self.values or not self.cached:
                self.values[row.tobytes()] = float(value)
                self.best.append(max(float(value), self.best[-1] if self.best else -math.inf))
                if len(self.best) == self.evaluations:
                    raise Spent
        if self.asked >= 3 * self.evaluations:
            raise Spent
        return np.array([self.values[row.tobytes()] for row in z])


def uniform(rng: np.random.Generator, sizes: tuple[int, ...], count: int) -> Array:
    """[count, K]."""
    return np.stack([rng.integers(0, size, count) for size in sizes], 1)


def random_search(budget: Budget, seed: int) -> None:
    """Uniform points."""
    rng = np.random.default_rng(seed)
    while True:
        budget(uniform(rng, budget.box.sizes, PARALLEL))


def neighbours(rng: np.random.Generator, sizes: Array, z: Array) -> Array:
    """Each row with one variable changed to another value."""
    moved, rows = z.copy(), np.arange(len(z))
    k = rng.integers(0, z.shape[1], len(z))
    moved[rows, k] = (z[rows, k] + 1 + rng.integers(0, sizes[k] - 1)) % sizes[k]
    return moved


def cooling(budget: Budget, scale: float) -> float:
    """A temperature that falls from the values' spread to a hundredth of it, geometrically in the
    budget.
    """
    return scale * 0.01 ** (len(budget.best) / budget.evaluations)


def annealing_chains(budget: Budget, seed: int) -> None:
    """16 independent Metropolis chains that change one variable at a time."""
    rng, sizes = np.random.default_rng(seed), np.array(budget.box.sizes)
    z = uniform(rng, budget.box.sizes, PARALLEL)
    value = budget(z)
    scale = value.std()
    while True:
        moved = neighbours(rng, sizes, z)
        proposed = budget(moved)
        accept = rng.random(PARALLEL) < np.exp(
            np.minimum(0, (proposed - value) / cooling(budget, scale))
        )
        z, value = np.where(accept[:, None], moved, z), np.where(accept, proposed, value)


def annealing_speculative(budget: Budget, seed: int) -> None:
    """One Metropolis chain: 16 neighbours of its state are evaluated together, and the first
    accepted one is taken.
    """
    rng, sizes = np.random.default_rng(seed), np.array(budget.box.sizes)
    start = uniform(rng, budget.box.sizes, PARALLEL)
    values = budget(start)
    scale = values.std()
    z, value = start[values.argmax()], values.max()
    while True:
        moved = neighbours(rng, sizes, np.repeat(z[None], PARALLEL, 0))
        proposed = budget(moved)
        accept = rng.random(PARALLEL) < np.exp(
            np.minimum(0, (proposed - value) / cooling(budget, scale))
        )
        if accept.any():
            z, value = moved[accept.argmax()], proposed[accept.argmax()]


def optuna_tpe(budget: Budget, seed: int) -> None:
    """Optuna's tree-structured Parzen estimator, with the constant liar that its manual asks for in
    parallel.

    It reads all earlier points again for each new one; here a finished one is read once, which
    gives the same points.
    """
    import optuna  # pyright: ignore[reportMissingImports]

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    read_again, known = sampler._get_internal_repr, {}

    def read(trials: list[Any], search_space: dict[str, Any], study: Any) -> dict[str, Array]:
        rows = []
        for trial in trials:
            row = known.get(trial.number)
            if row is None:
                found = read_again([trial], search_space, study)
                row = np.array([found[name] for name in search_space])
                if trial.state.is_finished() and row.size == len(space):
                    known[trial.number] = row
            rows.append(row)
        joined = np.concatenate([np.empty((len(search_space), 0)), *rows], 1)
        return dict(zip(search_space, joined, strict=True))

    sampler._get_internal_repr = read
    study = optuna.create_study(direction="maximize", sampler=sampler)
    space: dict[str, optuna.distributions.BaseDistribution] = {
        f"x{k}": optuna.distributions.CategoricalDistribution(list(range(size)))
        for k, size in enumerate(budget.box.sizes)
    }
    while True:
        trials = [study.ask(space) for _ in range(PARALLEL)]
        values = budget(np.array([list(trial.params.values()) for trial in trials]))
        for trial, value in zip(trials, values, strict=True):
            study.tell(trial, value)


def nevergrad(name: str, budget: Budget, seed: int) -> None:
    """One of nevergrad's optimisers over an array of integers, a hundred times faster than over
    `Choice`.
    """
    import nevergrad as ng  # pyright: ignore[reportMissingImports]

    warnings.filterwarnings("ignore", module="nevergrad")
    largest = np.array(budget.box.sizes) - 1
    array = (
        ng.p.Array(init=largest / 2)
        .set_bounds(np.zeros(len(largest)), largest)
        .set_integer_casting()
    )
    array.random_state = np.random.RandomState(seed)
    optimiser = ng.optimizers.registry[name](array, budget=budget.evaluations, num_workers=PARALLEL)
    while True:
        asked = [optimiser.ask() for _ in range(PARALLEL)]
        values = budget(np.array([point.value for point in asked]))
        for point, value in zip(asked, values, strict=True):
            optimiser.tell(point, -value)


def catcma(cached: bool, budget: Budget, seed: int) -> None:
    """CatCMA with margin, of the authors' `cmaes`, in generations of 16."""
    from cmaes import CatCMAwM  # pyright: ignore[reportMissingImports]

    budget.cached = cached
    optimiser = CatCMAwM(c_space=list(budget.box.sizes), population_size=PARALLEL, seed=seed)
    while True:
        asked = [optimiser.ask() for _ in range(PARALLEL)]
        values = budget(np.stack([point.c.argmax(-1) for point in asked if point.c is not None]))
        optimiser.tell([(point, -value) for point, value in zip(asked, values, strict=True)])


RIVALS: dict[str, Callable[[Budget, int], None]] = {
    "random search": random_search,
    "annealing, 16 chains": annealing_chains,
    "annealing, speculative": annealing_speculative,
    "Optuna TPE": optuna_tpe,
    "nevergrad NGOpt": partial(nevergrad, "NGOpt"),
    "nevergrad (1+1)": partial(nevergrad, "DiscreteOnePlusOne"),
    "CatCMA": partial(catcma, True),
    "CatCMA without a cache": partial(catcma, False),
}

ANYTIME = {"random search", "Optuna TPE", "nevergrad (1+1)", "CatCMA", "CatCMA without a cache"}
"""Those that do not use their budget: a long run's first evaluations are those of a short run."""
