"""Every commit that results/ names can be looked up: it is in the history, or a list says why
not.
"""

import csv
import lzma
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
LIST = RESULTS / "commits_elsewhere.csv"
RECORDED = re.compile(rb'"commit": ?"([^"]*)"')
WORD = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")
"""A hash on a page: letters and digits, so neither a number nor a word."""


def git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("This is no clone: there is no history.")
    return done.stdout.strip()


@pytest.fixture(scope="module")
def history() -> list[str]:
    """All commits of the clone."""
    if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT.resolve():
        pytest.skip("This is no clone: there is no history.")
    if git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("This is a shallow clone: most of the history is missing.")
    return git("rev-list", "HEAD").splitlines()


def contents(path: Path) -> Iterator[bytes]:
    """The texts of a record, of one that is compressed, or of all in an archive."""
    if path.name.endswith(".tar.xz"):
        with tarfile.open(path) as archive:
            members = (archive.extractfile(m) for m in archive if m.name.endswith((".json", "l")))
            yield from (file.read() for file in members if file is not None)
    elif path.suffix == ".xz":
        yield lzma.decompress(path.read_bytes())
    else:
        yield path.read_bytes()


def named(results: Path) -> dict[str, set[str]]:
    """Every commit that a table, a record or a page names, and the files that do."""
    found: dict[str, set[str]] = {}
    for path in results.rglob("*"):
        commits: set[str] = set()
        if path == results / LIST.name:
            continue
        if path.suffix == ".csv":
            with path.open() as file:
                commits = {row.get("commit", "") for row in csv.DictReader(file)}
        elif path.suffix in (".json", ".jsonl", ".xz"):
            commits = {
                commit.decode() for text in contents(path) for commit in RECORDED.findall(text)
            }
        elif path.suffix == ".md":
            commits = set(WORD.findall(path.read_text()))
        for words in commits:
            # a row made by several runs names all of their commits
            for commit in WORD.findall(words):
                found.setdefault(commit, set()).add(str(path.relative_to(results)))
    return found


@pytest.fixture(scope="module")
def commits() -> dict[str, set[str]]:
    return named(RESULTS)


def reasons(path: Path) -> dict[str, str]:
    """Commits outside of the history, and why."""
    with path.open() as file:
        return {row["commit"]: row["reason"] for row in csv.DictReader(file)}


def missing(commits: dict[str, set[str]], known: list[str]) -> dict[str, set[str]]:
    """Those of which no known commit is the full form."""
    return {
        commit: files
        for commit, files in commits.items()
        if not any(full.startswith(commit) for full in known)
    }


def test_every_commit_is_in_the_history_or_the_list_says_why_not(
    commits: dict[str, set[str]], history: list[str]
) -> None:
    assert len(commits) > 30
    assert not missing(commits, [*history, *reasons(LIST)])


def test_the_list_has_only_what_it_must(commits: dict[str, set[str]], history: list[str]) -> None:
    listed = reasons(LIST)
    assert all(listed.values())
    for commit in listed:
        assert not any(full.startswith(commit) for full in history), f"{commit} is in the history"
        assert any(commit.startswith(name) for name in commits), f"nothing names {commit}"


def test_an_unknown_commit_is_found(tmp_path: Path) -> None:
    """In a table, a record, an archive and on a page."""
    unknown = ["1234abc", "2234abc", "3234abc", "4234abc", "5234abc"]
    (tmp_path / "table.csv").write_text(f'row,commit\nx,"{unknown[0]}, 0123abc"\n')
    (tmp_path / "times.json").write_text(f'{{"commit": "{unknown[1]}"}}')
    line = f'{{"commit":"{unknown[2]}","value":12345678}}\n'.encode()
    (tmp_path / "runs.jsonl.xz").write_bytes(lzma.compress(line))
    (tmp_path / "config.json").write_text(f'{{"commit": "{unknown[3]}"}}')
    with tarfile.open(tmp_path / "runs.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "config.json", "run/config.json")
    (tmp_path / "config.json").unlink()
    (tmp_path / "README.md").write_text(f"At commit {unknown[4]}, 1234567 times defaced.\n")
    found = missing(named(tmp_path), ["0123abcdef"])
    assert sorted(found) == unknown
