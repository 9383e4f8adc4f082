"""For your own test suite: one line that fails with a page that says what is wrong.

from arsm.testing import assert_unbiased

def test_my_gradient():
    assert_unbiased(my_loss)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from arsm.referee import Audit, Objective, Problem, audit, audit_advantages, audit_sequences
from arsm.referee.measure import Loss, Sign
from arsm.referee.worlds import TrainerLoss
from arsm.types import Estimator


def assert_unbiased(
    loss: Loss | Estimator,
    *,
    sign: Sign = 1,
    parameters: bool = False,
    problems: Sequence[Problem] | None = None,
    samples: int = 1 << 14,
    seed: int = 0,
) -> Audit:
    """Fail, with the audit as the message, unless the loss gives dE[f]/dlogits in the
    mean; arguments as `arsm.audit`.

    It draws a quarter of `arsm.audit`'s default, for a test of a few seconds.
    """
    __tracebackhide__ = True
    result = audit(
        loss, sign=sign, parameters=parameters, problems=problems, samples=samples, seed=seed
    )
    return _passed(result)


def assert_unbiased_advantages(function: Callable[..., Tensor], *, tokens: bool = False) -> Audit:
    """Fail, with the audit as the message, unless the advantages give the policy
    gradient; as `audit_advantages`.
    """
    __tracebackhide__ = True
    return _passed(audit_advantages(function, tokens=tokens))


def assert_unbiased_sequences(loss: TrainerLoss, *, target: Objective, **options: Any) -> Audit:
    """Fail, with the audit as the message, unless a trainer's loss follows its target;
    as `audit_sequences`.
    """
    __tracebackhide__ = True
    return _passed(audit_sequences(loss, target=target, **options))


def _passed(result: Audit) -> Audit:
    __tracebackhide__ = True  # pytest then shows the line of the test, not this one
    if not result.passed:
        raise AssertionError(f"\n{result}") from result.exception
    return result
