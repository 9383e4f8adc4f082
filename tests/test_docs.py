"""Every Python block of the README and the documentation runs, page by page from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import arsm
from tests.problems import PROBLEMS
from tests.test_unbiased import worst

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run_page(page: Path) -> dict:
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, str(page), "exec"), names)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page: Path) -> None:
    torch.manual_seed(0)
    run_page(page)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page} links to {target}"


def test_estimators_page_names_every_estimator() -> None:
    words = set(re.findall(r"^\| `([a-z-]+)", (ROOT / "docs" / "estimators.md").read_text(), re.MULTILINE))
    assert words == set(arsm.estimator_names())


def test_the_skeleton_is_unbiased() -> None:
    estimator = run_page(ROOT / "docs" / "adding_an_estimator.md")["ModeBaseline"]()
    for problem in PROBLEMS:
        assert max(worst(estimator, problem).values()) <= 1, problem.name
