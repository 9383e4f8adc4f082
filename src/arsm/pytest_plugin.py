"""The referee in a test suite of yours. One line in conftest.py turns it on:

pytest_plugins = ["arsm.pytest_plugin"]

Then a test is one line, too:

def test_my_gradient(referee):
    referee(my_loss)

`pytest --referee-summary FILE --referee-badge FILE` writes what was found.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arsm.referee import Audit, audit, audit_advantages, audit_sequences
from arsm.referee.summary import badge, markdown

AUDITS = pytest.StashKey[list[Audit]]()
SAMPLES = 1 << 14
"""Draws per row, a quarter of `arsm.audit`'s, for tests of a few seconds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for what is written at the end."""
    group = parser.getgroup("referee", "arsm: are these gradients right?")
    group.addoption(
        "--referee-summary", type=Path, metavar="FILE", help="write all audits as Markdown"
    )
    group.addoption(
        "--referee-badge", type=Path, metavar="FILE", help="write the worst verdict as an SVG badge"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begin with no audits."""
    config.stash[AUDITS] = []


@pytest.fixture
def referee(request: pytest.FixtureRequest) -> Callable[..., Audit]:
    """Fail the test, with the audit as the message, unless the loss has the gradient
    that it should.

    `referee(loss)` is `arsm.audit`; with `target=` it is `arsm.audit_sequences`, with
    `advantages=True` `arsm.audit_advantages`. Other arguments are theirs.
    """

    def judge(loss: Callable[..., Any], *, advantages: bool = False, **options: Any) -> Audit:
        __tracebackhide__ = True
        if advantages:
            found = audit_advantages(loss, **options)
        elif "target" in options:
            found = audit_sequences(loss, **options)
        else:
            found = audit(loss, **{"samples": SAMPLES, **options})
        request.config.stash[AUDITS].append(found)
        if not found.passed:
            # the audit is the explanation; a traceback into the referee would hide it
            pytest.fail(f"\n{found}", pytrace=False)
        return found

    return judge


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the summary and the badge, if they were asked for."""
    audits = session.config.stash[AUDITS]
    for option, text in (("--referee-summary", markdown), ("--referee-badge", badge)):
        if target := session.config.getoption(option):
            Path(target).write_text(text(audits))
