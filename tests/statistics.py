"""Large-sample tests against a known mean, with one false-alarm rate for the whole suite.

An estimate with independent samples x_1..x_n of mean mu passes if every component has

    |mean(x) - mu| <= CRITICAL * std(x) / sqrt(n) + ROUNDING * max|x|

CRITICAL is the normal quantile at which COMPARISONS two-sided tests together raise a false alarm
with probability FALSE_ALARM (Bonferroni). The last term is for components without variance.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor

FALSE_ALARM = 1e-6
COMPARISONS = 100_000
CRITICAL = NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * COMPARISONS))
ROUNDING = 1e-12
SAMPLES = 1 << 15


def deviations(samples: Tensor, mean: Tensor) -> Tensor:
    """|mean(x) - mu| as a multiple of what passes: samples [n, ...], mean [...] -> [...]; above 1
    is a rejection.
    """
    error = (samples.mean(0) - mean).abs()
    allowed = CRITICAL * samples.std(0) / samples.shape[0] ** 0.5 + ROUNDING * samples.abs().amax(0)
    return torch.where(error == 0, 0.0, error / allowed)
