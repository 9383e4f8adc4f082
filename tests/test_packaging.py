"""What a user installs: the source archive, the wheel made from it, and both of its ways to run."""

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
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command outside the source tree, with nothing of this process's Python settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(command[0]).parent, env=kept | environment
    )


def succeed(*command: str | Path) -> str:
    done = run(*command)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel that was built from that archive, not from the tree."""
    pytest.importorskip("build", reason="build is not installed; pip install 'arsm[dev]'")
    pytest.importorskip("hatchling", reason="hatchling is not installed; pip install 'arsm[dev]'")
    out = tmp_path_factory.mktemp("dist")
    succeed(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment that holds the wheel and nothing else."""
    home = tmp_path_factory.mktemp("environment")
    succeed(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    succeed(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
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
            waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def top_level(files: Distribution) -> dict[str, Path]:
    """What a distribution puts directly into site-packages, by name."""
    names = {path.parts[0] for path in files.files or ()} - {"..", "__pycache__"}
    return {name: Path(str(files.locate_file(name))) for name in names}


def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if not re.match(r"arsm-[^/]*\.dist-info/", name)}
    sources = (path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert package == {path.relative_to(ROOT / "src").as_posix() for path in sources}
    assert "arsm/py.typed" in package
    assert f"arsm-{arsm.__version__}.dist-info/licenses/LICENSE" in names


def test_the_source_archive_holds_the_project_and_no_more(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "constraints.txt"} <= names
    assert {"tests/test_packaging.py", "examples/quickstart.py", "src/arsm/py.typed"} <= names
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert folders <= {"src", "tests", "examples", "benchmarks", "docs"}
    assert not [name for name in names if "__pycache__" in name or name.startswith("runs/")]


def test_the_metadata_says_what_is_needed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        metadata = files.read(f"arsm-{arsm.__version__}.dist-info/METADATA").decode()
    assert f"\nVersion: {arsm.__version__}\n" in metadata
    needs = [Requirement(line) for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)]
    assert [need.name for need in needs if need.marker is None] == ["torch"]
    assert set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)) == set(PROJECT["optional-dependencies"])


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


def test_the_changelog_has_this_version() -> None:
    headings = re.findall(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert arsm.__version__ in headings
    assert headings[0] in ("Unreleased", arsm.__version__)
