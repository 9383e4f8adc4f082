"""`benchmarks.gpu_against`: a row that fails costs no other row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import gpu_against

ROOT = Path(__file__).resolve().parent.parent
ROWS = ("fine", "raises", "dies", "fine again", "spoils the next", "spoilt")
# what a tree's process runs here: rows that need no GPU
PROGRAM = """
import os, time
from itertools import count
from benchmarks import gpu_against
from benchmarks.gpu_against import Row

spoilt = False

def spoil():
    global spoilt
    spoilt = True
    return Row(lambda: 4.0, None)

def raises():
    raise RuntimeError("CUDA error" if spoilt else "no")

gpu_against.ROWS = {
    "fine": lambda: Row(map(float, count()).__next__, None),
    "raises": raises,
    "dies": lambda: os._exit(3),
    "hangs": lambda: time.sleep(100),
    "fine again": lambda: Row(lambda: 2.0, None),
    "spoils the next": spoil,
    "spoilt": lambda: raises() if spoilt else Row(lambda: 5.0, None),
}
gpu_against.listen()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_a_row_that_fails_costs_no_other_row(
    tmp_path: Path, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "times.json"
    gpu_against.compare({"old": ROOT, "new": ROOT}, list(ROWS), 2, out, program)
    found = json.loads(out.read_text())
    assert "commit" in found["provenance"]
    expected = {
        "fine": [1.0, 2.0],  # 0 prepared it
        "raises": ["RuntimeError: no"],
        "dies": ["the process ended with status 3"],
        "fine again": [2.0, 2.0],
        "spoils the next": [4.0, 4.0],
        "spoilt": [5.0, 5.0],
    }
    assert found["times"] == {row: {"old": x, "new": x} for row, x in expected.items()}
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split()[-4:] == ["old", "5.000", "new", "5.000"]
    assert lines[-4].split()[-4:] == ["old", "-", "new", "-"]


def test_a_process_that_does_not_answer_is_ended(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_against, "PATIENCE", 0.5)
    out = tmp_path / "times.json"
    gpu_against.compare({"new": ROOT}, ["hangs"], 2, out, program)
    assert json.loads(out.read_text())["times"]["hangs"] == {
        "new": ["the process ended with status -9"]
    }
