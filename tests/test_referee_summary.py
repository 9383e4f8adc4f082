"""The pytest plugin, the Markdown summary and the badge."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

import arsm
from arsm.referee.summary import badge, markdown

pytest_plugins = ["pytester"]

SUITE = """
def leave_one_out(rewards):
    n = rewards.shape[1]
    return rewards if n == 1 else (rewards - rewards.mean(1, keepdim=True)) * n / (n - 1)

def own_mean(rewards):
    return rewards - rewards.mean(1, keepdim=True)

def test_right(referee):
    assert referee(leave_one_out, advantages=True).passed

def test_wrong(referee):
    referee(own_mean, advantages=True)
"""


def own_mean(rewards):
    return rewards - rewards.mean(1, keepdim=True)


def rewards_themselves(rewards):
    return rewards


def test_the_plugin(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["arsm.pytest_plugin"]')
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess(
        "--referee-summary", "summary.md", "--referee-badge", "badge.svg"
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*own_mean: WRONG*", "*(n - 1)/n*"])
    summary = Path("summary.md").read_text()
    assert "| `leave_one_out` | unbiased |  |" in summary
    assert "### `own_mean`: wrong" in summary
    assert "wrong" in Path("badge.svg").read_text()


def test_the_badge_is_an_image_of_the_worst_verdict() -> None:
    wrong, right = arsm.audit_advantages(own_mean), arsm.audit_advantages(rewards_themselves)
    for audits, word in (([right, wrong], "wrong"), ([right], "unbiased"), ([], "not decided")):
        image = ElementTree.fromstring(badge(audits))
        assert image.attrib["aria-label"] == f"gradient: {word}"
    assert right.badge() == badge([right])


def test_the_summary_of_one_audit() -> None:
    wrong = arsm.audit_advantages(own_mean)
    assert wrong.markdown() == markdown([wrong])
    assert "- **scale**: Right direction, wrong length" in wrong.markdown()
