"""What a user installs: the library with torch alone, and the experiments with their command, data
and templates.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import arsm

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ROOT / "experiments"
WHEEL, CORE, SOURCES = 520_000, 200_000, 1_300_000
"""The most bytes of the library's wheel, of its core's compressed modules with `rl` therein, and of
its source archive."""
DOORS = (
    "choice",
    "choice_checks",
    "choice_run",
    "kernels",
    "known",
    "pyro",
    "referee",
    "rows",
    "search",
    "sequences",
    "subsets",
    "testing",
    "trl",
)
"""Modules of `arsm` that do not count as core."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command outside the source tree, with nothing of this process's Python settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(command[0]).parent,
        env=kept | environment,
    )


def succeed(*command: str | Path) -> str:
    done = run(*command)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def build(project: Path, out: Path) -> Path:
    """A folder with the source archive and the wheel that was built from that archive, not from the
    tree.
    """
    pytest.importorskip("build", reason="build is not installed; pip install 'arsm[dev]'")
    pytest.importorskip("hatchling", reason="hatchling is not installed; pip install 'arsm[dev]'")
    succeed(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, project)
    return out


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def experiments_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (found,) = build(EXPERIMENTS, tmp_path_factory.mktemp("experiments")).glob("*.whl")
    return found


def install(python: Path, wheel: Path) -> None:
    """The wheel and nothing else."""
    succeed(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
    )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment that holds the wheel and nothing else."""
    home = tmp_path_factory.mktemp("environment")
    succeed(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    install(python, wheel)
    return python.parent


def reach(bin_folder: Path, *folders: Path) -> None:
    """Let the environment import from these folders, after its own."""
    (site,) = (bin_folder.parent / "lib").glob("python*/site-packages")
    (site / "reach.pth").write_text("\n".join(map(str, folders)))


def closure(name: str) -> dict[str, Distribution]:
    """A distribution and all that it requires."""
    found: dict[str, Distribution] = {}
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = distribution(name)
            needs = map(Requirement, found[name].requires or ())
            waiting += [
                need.name
                for need in needs
                if need.marker is None or need.marker.evaluate({"extra": ""})
            ]
    return found


def top_level(files: Distribution) -> dict[str, Path]:
    """What a distribution puts directly into site-packages, by name."""
    names = {path.parts[0] for path in files.files or ()} - {"..", "__pycache__"}
    return {name: Path(str(files.locate_file(name))) for name in names}


def contents(wheel: Path) -> set[str]:
    """The files of the package, without its metadata."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def sources(folder: Path) -> set[str]:
    files = (
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return {path.relative_to(folder).as_posix() for path in files if ".egg-info" not in str(path)}


def test_the_wheel_holds_the_library_its_licence_and_nothing_else(wheel: Path) -> None:
    package = contents(wheel)
    assert package == sources(ROOT / "src")
    assert {Path(name).suffix for name in package - {"arsm/py.typed"}} == {".py"}
    assert {name.partition("/")[0] for name in package} == {"arsm"}
    licences = [name for name in zipfile.ZipFile(wheel).namelist() if "/licenses/" in name]
    assert licences == [f"arsm-{arsm.__version__}.dist-info/licenses/LICENSE"]
    assert wheel.stat().st_size < WHEEL
    with zipfile.ZipFile(wheel) as files:
        sizes = {
            Path(file.filename).with_suffix("").parts: file.compress_size
            for file in files.infolist()
        }
    assert (
        sum(size for parts, size in sizes.items() if parts[0] == "arsm" and parts[1] not in DOORS)
        < CORE
    )


def test_the_experiments_bring_their_data_and_templates(experiments_wheel: Path) -> None:
    package = contents(experiments_wheel)
    assert package == sources(EXPERIMENTS / "src")
    assert {"arsm_experiments/mnist/mnist.xz", "arsm_experiments/templates/report.html"} <= package
    with zipfile.ZipFile(experiments_wheel) as files:
        (metadata,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        text = files.read(metadata).decode()
    assert "\nLicense-Expression: MIT AND CC-BY-SA-3.0\n" in text
    assert "\nRequires-Dist: arsm[rl]\n" in text


def test_the_source_archive_holds_the_project_and_no_more(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "constraints.txt",
    } <= names
    assert {"tests/test_packaging.py", "examples/quickstart.py", "src/arsm/py.typed"} <= names
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert folders <= {"src", "tests", "examples", "benchmarks", "docs"}
    assert not [name for name in names if "__pycache__" in name or name.startswith("runs/")]
    assert archive.stat().st_size < SOURCES


def test_the_metadata_says_what_is_needed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        metadata = files.read(f"arsm-{arsm.__version__}.dist-info/METADATA").decode()
    assert f"\nVersion: {arsm.__version__}\n" in metadata
    needs = [
        Requirement(line) for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    ]
    assert [need.name for need in needs if need.marker is None] == ["torch"]
    assert set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)) == set(
        PROJECT["optional-dependencies"]
    )


ESTIMATE = """
import importlib.util, sys
import torch, arsm
for absent in ("numpy", "rich", "tyro", "gymnasium", "matplotlib", "pytest"):
    assert importlib.util.find_spec(absent) is None, absent
logits = torch.zeros(30, requires_grad=True)
out = arsm.estimate(arsm.ARSM(), logits, lambda z: 0.5 + (z[..., 0] + 1) / 900)
out.value.backward()
assert logits.grad.abs().sum() > 0
print(arsm.__file__)
"""


def test_the_core_runs_with_torch_alone(installed: Path, tmp_path: Path) -> None:
    """Torch and what torch itself requires are all that can be imported."""
    within_reach: dict[str, Path] = {}
    for files in closure("torch").values():
        within_reach |= top_level(files)
    for name, path in within_reach.items():
        (tmp_path / name).symlink_to(path)
    reach(installed, tmp_path)
    where = Path(succeed(installed / "python", "-W", "ignore", "-c", ESTIMATE).strip())
    assert installed.parent in where.parents


MAKE_A_PAGE = """
import sys
from pathlib import Path
import arsm_experiments
from arsm_experiments.cli import main
from arsm_experiments.data import load_mnist
words = "--categories 4 --updates 2 --seeds 1 --variance-samples 2 --estimators arsm".split()
assert main(["toy", *words, "--root", sys.argv[1]]) == 0
assert main(["report", "--root", sys.argv[1]]) == 0
size = Path(sys.argv[1], "report.html").stat().st_size
print(arsm_experiments.__file__, len(load_mnist().test), size)
"""


def test_the_command_finds_its_data_and_templates(
    installed: Path, experiments_wheel: Path, tmp_path: Path
) -> None:
    """Beside the library, with this environment's other packages within reach."""
    install(installed / "python", experiments_wheel)
    reach(
        installed, *{Path(str(distribution(name).locate_file(""))) for name in ("torch", "numpy")}
    )
    assert "toy" in succeed(installed / "arsm", "--help")
    *_, where, images, page = succeed(installed / "python", "-c", MAKE_A_PAGE, tmp_path).split()
    assert installed.parent in Path(where).parents
    assert (int(images), int(page) > 1_000_000) == (10_000, True)


def test_the_changelog_has_this_version() -> None:
    headings = re.findall(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert arsm.__version__ in headings
    assert headings[0] in ("Unreleased", arsm.__version__)


def test_one_version_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {arsm.__version__}\n" in citation
    assert f"version = {{{arsm.__version__}}}" in (ROOT / "docs/cite_compare_extend.md").read_text()
