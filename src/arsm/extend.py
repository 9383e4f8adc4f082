"""Tools for authors of estimators: `docs/adding_an_estimator.md` shows them at work.

An estimator is a frozen dataclass that subclasses `Estimator`. Its three steps, and
what helps with each:

- `noise` draws all the randomness: `sample_noise` for independent samples, `race_noise`
  for a race among the categories, which `dirichlet` draws from scratch.
- `ask` returns `Queries`: `samples` and `argmin_sample` turn noise into samples, and
  `share` finds the queries of a row that are equal.
- `tell` returns the gradient: `score` is d ln q(z) / d logits, and `weighted_scores`
  sums many of them.
"""

from __future__ import annotations

from arsm.distinct import share
from arsm.draws import SampleNoise, sample_noise, samples
from arsm.noise import argmin_sample, dirichlet, race_noise
from arsm.scores import score, weighted_scores
from arsm.types import Estimator, Queries

__all__ = [
    "Estimator",
    "Queries",
    "SampleNoise",
    "argmin_sample",
    "dirichlet",
    "race_noise",
    "sample_noise",
    "samples",
    "score",
    "share",
    "weighted_scores",
]
