"""Who may import what, and that every public name says what it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import arsm
import arsm_experiments

PACKAGE = Path(arsm.__file__).parent
STANDARD = set(sys.stdlib_module_names)
RL = {"torch", "numpy", "gymnasium", "ray", "mujoco"}
PAGES = {"matplotlib", "PIL", "rich", "tyro", "tensorboard", "jinja2", "markupsafe", "plotly", "reasoning_gym", "arsm"}
ALLOWED = {
    "core": {"torch"},
    "kernels": {"torch", "triton"},
    "rl": RL,
    "video": RL | {"PIL"},
    "pyro": {"torch", "pyro"},
    "transformers": {"torch", "transformers"},
    "cluster": {"torch", "ray"},
    "figure": {"torch", "matplotlib"},
    "experiments": RL | PAGES | {"transformers"},
}
LIBRARY = {"rl", "pyro"}
INNER = dict.fromkeys(ALLOWED, LIBRARY) | {"rl": {"pyro"}, "video": {"pyro"}, "pyro": {"rl"}, "experiments": {"pyro"}}
"""The rooms of the library that each room must not enter."""

EXPERIMENTS = Path(arsm_experiments.__file__).parent
FILES = sorted([*PACKAGE.rglob("*.py"), *EXPERIMENTS.rglob("*.py")])


SINGLE = {
    "audit/figure.py": "figure",
    "sequences/transformers.py": "transformers",
    "sequences/transformers_slots.py": "transformers",
    "cluster.py": "cluster",
    "rl/video.py": "video",
}
"""Modules that import one library more than the room that they are in."""


def room(path: Path) -> str:
    if path.name.startswith("gpu_"):
        return "kernels"
    if EXPERIMENTS in path.parents:
        return "experiments"
    within = path.relative_to(PACKAGE)
    return SINGLE.get(within.as_posix(), within.parts[0] if within.parts[0] in LIBRARY else "core")


def name(path: Path) -> str:
    return str(path.relative_to((EXPERIMENTS if EXPERIMENTS in path.parents else PACKAGE).parent))


def imported(path: Path) -> set[tuple[str, ...]]:
    """Every module that the file imports, anywhere in it, split at its dots."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: imports are absolute"
            module = tuple((node.module or "").split("."))
            found |= {(*module, alias.name) for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=name)
def test_each_room_imports_what_it_may(path: Path) -> None:
    modules = imported(path)
    own = "arsm_experiments" if EXPERIMENTS in path.parents else "arsm"
    others = {module[0] for module in modules} - STANDARD - {own}
    assert others <= ALLOWED[room(path)]
    entered = {module[1] for module in modules if module[0] == "arsm" and len(module) > 1}
    assert not entered & INNER[room(path)]


REFUSE_OTHERS = """
import importlib.machinery
import sys
import torch, torch.nn.functional, torch.func

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in {allowed!r} | set(sys.stdlib_module_names) and not top.startswith("_sysconfigdata"):
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        raise ImportError(spec.name + " is refused")

sys.meta_path.insert(0, Refuse())
for module in {modules!r}:
    importlib.import_module(module)
assert not [m for m in sys.modules if m.startswith(("arsm.rl", "arsm.pyro", "arsm_experiments"))]
"""


def test_the_core_needs_torch_alone() -> None:
    """Whatever torch itself has loaded, the core loads nothing else."""
    core = [path for path in FILES if room(path) == "core" and path != PACKAGE / "experiments.py"]  # it raises
    modules = [".".join(("arsm", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in core]
    modules = [module.removesuffix(".__init__") for module in modules]
    program = REFUSE_OTHERS.format(allowed={"torch", "arsm"}, modules=modules)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", FILES, ids=name)
def test_every_module_and_public_definition_is_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    bare = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
    ]
    assert not bare
    assert ast.get_docstring(tree) or not tree.body
