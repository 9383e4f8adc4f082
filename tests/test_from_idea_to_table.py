"""The page "From an idea to a table in your paper": its file and its commands, as a reader runs
them; and estimators named as module:Class.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import arsm
from arsm.referee.__main__ import main as referee
from arsm_experiments.cli import main

PAGE = (Path(__file__).parent.parent / "docs" / "from_idea_to_table.md").read_text()
MINE = "mine.py:MedianBaseline"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's file in it."""
    block = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    (tmp_path / "mine.py").write_text(block[1])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands() -> list[list[str]]:
    block = re.search(r"```console\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    return [shlex.split(line) for line in block[1].splitlines()]


def test_five_commands() -> None:
    install, audit, *compares = commands()
    assert install[:2] == ["pip", "install"]
    assert audit == ["python", "-m", "arsm.referee", MINE]
    assert [words[:2] for words in compares] == 3 * [["arsm", "compare"]]


def test_the_commands_with_fewer_samples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, audit, *compares = commands()
    assert referee([*audit[3:], "--samples", "4096"]) != 1
    assert "MedianBaseline" in capsys.readouterr().out
    for words in compares:
        assert main([*words[1:], "--samples", "4"]) == 0
    assert MINE in capsys.readouterr().out
    assert rf"\textbf{{\texttt{{{MINE}}}}}" in (folder / "table.tex").read_text()
    assert (folder / "figure.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.slow
def test_the_commands_as_they_are(folder: Path) -> None:
    _, audit, *compares = commands()
    cli = [sys.executable, "-m", "arsm_experiments.cli"]
    for words in ([sys.executable, *audit[1:]], *([*cli, *words[1:]] for words in compares)):
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (folder / "table.tex").exists()
    assert (folder / "figure.pdf").exists()


def test_own_estimators_have_words(folder: Path) -> None:
    assert arsm.estimator(MINE).paths == 4
    assert arsm.estimator("mine:MedianBaseline").paths == 4
    assert arsm.estimator(f"{MINE}:paths=9").paths == 9
    assert type(arsm.estimator(MINE)) is type(arsm.estimator(MINE)), "the file is read once"
    assert isinstance(arsm.estimator(f"3*{MINE}"), arsm.Average)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nothing.py:Mine", "There is no file nothing.py"),
        ("nowhere:Mine", "There is no module nowhere here"),
        ("mine.py:Yours", r"mine.py has no Yours"),
        ("mine.py:dataclass", '"mine.py:dataclass" is no class of estimators'),
        ("mine.py:MedianBaseline:draws=3", "its options are paths"),
        ("rlo:samples=4", 'did you mean "rloo"'),
        ("zzzz", "your own as module:Class or path.py:Class"),
    ],
)
def test_wrong_words_are_explained(folder: Path, words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arsm.estimator(words)
    if ":" in words and not words.startswith("rlo"):
        assert main(["compare", "--problems", "toy-30", "--estimators", words]) == 2
