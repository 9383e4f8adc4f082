"""Mistakes at the command line, in one table: each is answered by one sentence that says what to
do, and by exit status 2.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from arsm_experiments.cli import main

SHORT = "--categories 4 --updates 3 --trace-every 3 --variance-samples 2 --seeds 2 --estimators ar"
ROOT = Path(__file__).parent.parent.parent

MISTAKES = {
    # words and values
    "arsm": "Name a command: demo,",
    "arsm vea": 'There is no command "vea": did you mean "vae"?',
    "arsm toy --sedes 3": '"arsm toy" has no option "--sedes": did you mean "--seeds"?',
    "arsm toy here": '"arsm toy" has no option "here"; there are --categories,',
    "arsm toy --steps abc": "Each value of --steps must be printed, scaled or a number, but got",
    "arsm toy --categories 4 x --seeds 2": "--categories must be a whole number, but got 4 x;",
    "arsm toy --seeds=x": "--seeds must be a whole number, but is x; `arsm toy --help` explains it",
    "arsm toy --seeds --updates 3": "--seeds needs a value, a whole number; `arsm toy --help`",
    "arsm toy --seeds 0": "--seeds must be at least 1, but is 0.",
    "arsm toy --estimators": "--estimators needs at least one value; leave the option out for",
    "arsm vae --layers 3": "--layers must be 1 or 2, but is 3;",
    "arsm sequences --max-tokens many": "--max-tokens must be a whole number, but is many;",
    "arsm reproduce --scale half": "--scale must be smoke or full, but is half;",
    "arsm demo --scale 0": "--scale must be positive and at most 10, but is 0.",
    # estimators, environments and tasks
    "arsm toy --estimators arsmm": 'There is no estimator "arsmm": did you mean "arsm"?',
    "arsm toy --estimators rloo:sample=4": '"sample=4" is no option of "rloo"',
    "arsm toy --estimators nowhere.py:Mine": "There is no file nowhere.py in ",
    "arsm toy --estimators broken.py:Mine": "broken.py cannot be imported: NameError: name",
    "arsm toy --estimators number.py:Mine": '"number.py:Mine" is no class of estimators.',
    "arsm toy --estimators number.py:Yours": "number.py has no Yours.",
    "arsm control --environment Cartpole-v1": 'did you mean "CartPole-v1"?',
    "arsm control --workers 4": '4 workers need the engine "pool" or "ray": "in-process" has none',
    "arsm compare --problems nothing": 'There is no problem "nothing"; known are toy-30,',
    "arsm sequences --strategies group:1": "answers per prompt, at least 2, as group:8 does.",
    "arsm sequences --task chain": "--task chain is written in words and needs --model,",
    # files and folders
    "arsm sequences --model nowhere": "but there is no nowhere/config.json.",
    "arsm sequences --model damaged --task chain": "damaged holds no causal model of transform",
    "arsm vae --data nowhere": "--data must be a folder with MNIST's original files, but there is",
    "arsm report --root nowhere": "There is no folder nowhere; run an experiment first, or point",
    "arsm report --root empty": "There are no runs under empty; run an experiment first, or",
    "arsm report --root truncated": "truncated/toy.tar.xz is no archive of runs (Compressed data",
    "arsm report --root earlier": "is not one that this version of arsm writes; choose another --r",
    f"arsm toy {SHORT} --root earlier --resume": "is not one that this version of arsm writes;",
    f"arsm toy {SHORT} --root finished": "C4-step1-ar exists; pass --resume to continue it, or ch",
    f"arsm toy {SHORT} --root damaged --resume": "checkpoint.pt is damaged or not one that this",
    f"arsm toy {SHORT} --root a-file": "Files cannot be written to a-file/toy: Not a directory;",
    "arsm demo --out a-file/demo.html": "Files cannot be written to a-file: File exists; choose",
    "arsm demo --out empty": "--out must be a file, but empty is a folder; name one such as",
    "arsm reproduce --root a-file": "Files cannot be written to a-file: File exists; choose anot",
    "arsm archive --root finished --into a-file": "Files cannot be written to a-file: File",
    "arsm report --root finished --out a-file/x.html": "Files cannot be written to a-file: File",
}
if not torch.cuda.is_available():
    MISTAKES["arsm vae --device cuda"] = "--device cuda needs a GPU, but torch finds none; leave th"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files that something is wrong with."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "empty").mkdir()
    (folder / "a-file").touch()
    (folder / "broken.py").write_text("class Mine(Estimator): ...")
    (folder / "number.py").write_text("Mine = 3")
    for place in ("finished", "damaged", "earlier"):
        assert main(["toy", *SHORT.split(), "--root", str(folder / place)]) == 0
    (folder / "damaged" / "config.json").write_text("no JSON")
    (folder / "damaged" / "toy" / "C4-step1-ar" / "checkpoint.pt").write_text("no checkpoint")
    header = folder / "earlier" / "toy" / "C4-step1-ar" / "config.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"format": 1}))
    (folder / "truncated").mkdir()
    archive = (ROOT / "results" / "runs" / "toy.tar.xz").read_bytes()
    (folder / "truncated" / "toy.tar.xz").write_bytes(archive[: len(archive) // 2])
    return folder


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_gets_one_sentence(
    words: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--model damaged" in words:
        pytest.importorskip("transformers", reason="in the extra `transformers`")
    monkeypatch.chdir(desk)
    assert main(shlex.split(words)[1:]) == 2
    said = capsys.readouterr().err
    assert MISTAKES[words] in said
    assert said.count("\n") == 1, "one sentence, no traceback"
    assert said.endswith((".\n", "?\n"))
