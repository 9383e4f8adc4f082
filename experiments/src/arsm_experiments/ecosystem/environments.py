"""A virtual environment for each package, so that this project depends on none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import arsm
import arsm_experiments

FINISHED = "installed.txt"
"""The file that says what is installed in a finished environment."""


def default_folder() -> Path:
    """Where environments are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "arsm" / "ecosystem"


def environment_of(requirements: Sequence[str], folder: Path) -> Path:
    """The interpreter of the environment with these requirements; made if there is none yet.

    torch comes first, in the version that runs here: left to themselves, some packages fetch one
    with CUDA. A requirement with options of pip, such as "--no-deps openrlhf", is installed by
    itself, after all others.
    """
    alone = [r.split() for r in requirements if r.startswith("-")]
    plain = [r for r in requirements if not r.startswith("-")]
    place = folder / folder_of(requirements)
    python = place / "bin" / "python"
    if (place / FINISHED).exists():
        return python
    version = torch.__version__.split("+")[0]
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
    for words in ([f"torch=={version}"], ["numpy"], plain, *alone):
        if not words:
            continue
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *words], check=True)
    (place / FINISHED).write_text("\n".join(requirements) + "\n")
    return python


def folder_of(requirements: Sequence[str]) -> str:
    """The name of an environment's folder: what is installed, without pip's options."""
    return "+".join(r.split()[-1].replace("==", "-") for r in requirements)


def variables() -> dict[str, str]:
    """The environment variables under which another interpreter imports this project's source."""
    source = [str(Path(package.__path__[0]).parent) for package in (arsm, arsm_experiments)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(source),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "passive",
        "JAX_PLATFORMS": "cpu",
    }
