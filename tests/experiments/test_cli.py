"""The command line: what it refuses, in one sentence, and what it leaves when interrupted."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import arsm
from arsm_experiments.cli import commands, main, options
from arsm_experiments.runs.reader import read_run

SHORT = [
    "--categories",
    "4",
    "--updates",
    "3",
    "--trace-every",
    "3",
    "--variance-samples",
    "2",
    "--seeds",
    "2",
]
TRAINING = ["--images", "200", "--batch", "200", "--epochs", "1", "--measure-every", "1"]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a refused command says: one line on stderr and nothing else."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_toy_runs_and_prints_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["toy", *SHORT, "--estimators", "exact", "arsm", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "true gradient" in out
    assert "ARSM" in out
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == [
        "C4-step1-arsm",
        "C4-step1-exact",
    ]


def test_steps_are_words_or_numbers(tmp_path: Path) -> None:
    assert (
        main(
            [
                "toy",
                *SHORT,
                "--steps",
                "scaled",
                "0.5",
                "--estimators",
                "ar",
                "--root",
                str(tmp_path),
            ]
        )
        == 0
    )
    assert {path.name for path in (tmp_path / "toy").iterdir()} == {
        "C4-step0.133333-ar",
        "C4-step0.5-ar",
    }


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--estimators", "arsm", "arsmm"], 'There is no estimator "arsmm": did you mean "arsm"?'),
        (["--estimators", "rloo:sample=4"], '"sample=4" is no option of "rloo"'),
        (["--categories", "30", "1"], "--categories must be at least 2, but is 1."),
        (["--variance-samples", "1"], "--variance-samples must be at least 2, but is 1."),
        (["--r", "0"], "--r must be positive and finite, but is 0.0."),
        (["--r", "inf"], "--r must be positive and finite, but is inf."),
        (["--steps", "nan"], "--steps must be positive and finite, but is nan."),
        (["--steps"], "--steps needs at least one value; leave the option out for its default."),
        (["--estimators"], "--estimators needs at least one value"),
        (["--categories"], "--categories needs at least one value"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_does(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refusal(capsys, "toy", *words, "--root", str(tmp_path / "runs"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--images", "100"], "--images must be at least 200, but is 100."),
        (["--device", "tpu"], "--device must be cpu, cuda or auto, but is tpu."),
        (
            ["--rates", "0.1", "0.1"],
            "--rates must be one or more different numbers, but is (0.1, 0.1).",
        ),
        (["--rates", "nan"], "--rates must be positive and finite, but is nan."),
        (
            ["--images", "60000"],
            "--images must be at most 55,000, the number of training images, but is 60000.",
        ),
        (
            ["--name", "x/y"],
            "--name is the beginning of a folder's name and has no slash, but is x/y",
        ),
        (["--estimator", "unordered-set"], "UnorderedSet is for one variable"),
        (
            ["--data", "no-such-folder"],
            "--data must be a folder with MNIST's original files, but there is none at",
        ),
    ],
)
@pytest.mark.parametrize("command", ["vae", "conditional"])
def test_training_that_cannot_run_is_refused(
    command: str,
    words: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sentence in refusal(capsys, command, *TRAINING, "--root", str(tmp_path), *words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--bound-samples", "-1"], "--bound-samples must be at least 0, but is -1."),
        (["--hidden", "0"], "--hidden must be positive and finite, but is 0."),
        (
            ["--estimator", "vimco"],
            '"vimco" needs a bound of several samples; use `arsm conditional`.',
        ),
        (["--estimator", "2*vimco"], '"2*vimco" needs a bound of several samples'),
    ],
)
def test_a_vae_that_cannot_run_is_refused(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refusal(
        capsys, "vae", *TRAINING, "--bound-samples", "0", "--root", str(tmp_path), *words
    )


@pytest.mark.parametrize(
    "words",
    ["control --methods", "control --optimizers", "control --learning-rates", "compare --problems"],
)
def test_an_option_without_a_value_is_refused(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, *words.split(), "--root", str(tmp_path))
    assert said.startswith(f"{words.split()[1]} needs at least one value")


def test_processes_share_whole_batches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "--batch must be a multiple of the 3 processes, but is 100." in refusal(
        capsys, "conditional"
    )


def test_existing_and_changed_runs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["toy", *SHORT, "--estimators", "ar", "--root", str(tmp_path)]
    assert main(words) == 0
    capsys.readouterr()
    assert main(words) == 2
    assert "exists; pass --resume" in capsys.readouterr().err
    assert main([*words, "--seeds", "3", "--resume"]) == 2
    assert "another seeds (2 there, 3 here)" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("xyz", 'There is no command "xyz"; there are demo,'),
        ("toy --sedes=3", '"arsm toy" has no option "--sedes": did you mean "--seeds"?'),
        ("vae --rate 1e-3", '"arsm vae" has no option "--rate": did you mean "--rates"?'),
        (
            "control --weighted",
            '"arsm control" has no option "--weighted": did you mean "--no-weighted"?',
        ),
        ("control --gama 1", '"arsm control" has no option "--gama": did you mean "--gamma"?'),
        ("report here", '"arsm report" has no option "here"; there are --root, --out,'),
    ],
)
def test_mistyped_words_get_the_right_ones(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refusal(capsys, *words.split())


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    listed = re.findall(r"^  ([a-z]+) +[A-Z].*[^ ]$", out, re.MULTILINE)
    assert listed == list(commands())
    for entry in re.split(r"\n(?=  [a-z])", out.partition("report.\n\n")[2].partition("\n\n")[0]):
        assert entry.endswith("."), "a whole sentence"
    assert max(map(len, out.splitlines())) < 80
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"arsm {arsm.__version__}\n"


@pytest.mark.parametrize("name", commands())
def test_help_explains_every_option(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for option in options(commands()[name]()):  # pyright: ignore[reportCallIssue]
        assert re.search(rf"^\W*--(no-)?{option.replace('_', '-')} ", out, re.MULTILINE), option
    assert not re.findall(r"^\W*(?:--.*\s{2,})?\(default.*", out, re.MULTILINE)


@pytest.mark.parametrize("words", [["--help"], ["toy", "--help"]])
def test_help_ends_quietly_when_nobody_reads_on(words: list[str]) -> None:
    command = [
        sys.executable,
        "-c",
        "import sys; from arsm_experiments.cli import main; sys.exit(main())",
        *words,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate()
    assert (process.returncode, errors) == (141, b"")


def test_missing_extras_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert "needs tyro; install it with `pip install arsm-experiments`" in refusal(capsys, "toy")
    assert main(["--version"]) == 0


def test_an_engine_that_is_missing_is_named_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    words = refusal(capsys, "control", "--engine", "ray", "--root", str(tmp_path))
    assert "needs ray; install it with `pip install 'arsm[cluster]'`" in words
    assert not any(tmp_path.iterdir())


def test_a_system_without_locks_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("arsm_experiments.")]:
        if name != "arsm_experiments.cli":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert "The command line needs Linux or macOS" in refusal(capsys, "toy")


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    words = [
        "toy",
        "--categories",
        "4",
        "--updates",
        "2000",
        "--trace-every",
        "500",
        "--checkpoint-every",
        "100",
    ]
    words += [
        "--variance-samples",
        "2",
        "--seeds",
        "2",
        "--estimators",
        "ar",
        "--root",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "arsm_experiments.cli", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    folder = tmp_path / "toy" / "C4-step1-ar"
    while process.poll() is None and not (folder / "checkpoint.pt").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in said
    resume = shlex.split(said.partition("to continue: ")[2])
    assert resume == ["arsm", *words, "--resume"]
    assert read_run(folder).metrics[-1]["step"] < 2000
    assert main(resume[1:]) == 0
    assert read_run(folder).metrics[-1]["step"] == 2000


@pytest.mark.parametrize("name", commands())
def test_help_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    (usage,) = [line for line in lines if line.startswith(f"usage: arsm {name}")]
    lines.remove(usage)  # tyro does not break this line
    assert lines[0]
    assert len(lines) > 5
    assert max(map(len, lines)) <= 80
    assert main(["--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
