r"""Confidence bounds for means of independent draws: finite-sample over rows, Student's
t over calls.

Empirical Bernstein bound (Maurer and Pontil, 2009): for n independent draws within a
range R and with the sample variance V, each of the two inequalities

    |mean(x) - mu| <= sqrt(2 V ln(2/delta) / n) + 7 R ln(2/delta) / (3 (n - 1))

fails with probability at most delta, whatever n and the distribution are. No normal
approximation is made: at 100 draws of a rare outcome, a z-test at 1e-9 raises false
alarms a thousand times too often.

Rows of one call may share noise. Means of whole calls are independent whatever a loss
does inside a call, so an interval is never shorter than Student's t over them.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from torch import Tensor


def bernstein(variance: Tensor, spread: Tensor, draws: int, failure: float) -> Tensor:
    """The two-sided half-width that fails with probability at most `failure`: variance
    and range [...] -> [...].
    """
    log = math.log(4 / failure)
    return (2 * variance * log / draws).sqrt() + 7 * spread * log / (3 * (draws - 1))


def student(failure: float, freedom: int) -> float:
    """The two-sided quantile of Student's t, by Fisher's expansion in 1/freedom; for at
    least 30 degrees of freedom.
    """
    z = NormalDist().inv_cdf(1 - failure / 2)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * freedom**4)
    )
