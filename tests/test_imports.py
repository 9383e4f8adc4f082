"""Who may import what, and that every public name says what it is."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import arsm
import arsm_experiments

PACKAGE = Path(arsm.__file__).parent
STANDARD = set(sys.stdlib_module_names)
RL = {"torch", "numpy", "gymnasium", "ray", "mujoco"}
PAGES = {
    "matplotlib",
    "PIL",
    "rich",
    "tyro",
    "tensorboard",
    "jinja2",
    "markupsafe",
    "plotly",
    "reasoning_gym",
    "arsm",
}
ALLOWED = {
    "core": {"torch"},
    "kernels": {"torch", "triton"},
    "rl": RL,
    "video": RL | {"PIL"},
    "pyro": {"torch", "pyro"},
    "transformers": {"torch", "transformers"},
    "trl": {"torch", "trl"},
    "cluster": {"torch", "ray"},
    "plugin": {"pytest"},
    "optuna": {"torch", "optuna"},
    "figure": {"torch", "matplotlib"},
    "experiments": RL | PAGES | {"transformers", "peft", "safetensors"},
}
LIBRARY = {"rl", "pyro", "trl", "optuna"}
INNER = dict.fromkeys(ALLOWED, LIBRARY) | {
    "rl": {"pyro", "trl", "optuna"},
    "video": {"pyro", "trl", "optuna"},
    "pyro": {"rl", "trl", "optuna"},
    "trl": {"rl", "pyro", "optuna"},
    "optuna": {"rl", "pyro", "trl"},
    "experiments": {"pyro", "trl", "optuna"},
}
"""The rooms of the library that each room must not enter."""

EXPERIMENTS = Path(arsm_experiments.__file__).parent
FILES = sorted([*PACKAGE.rglob("*.py"), *EXPERIMENTS.rglob("*.py")])


SINGLE = {
    "ranking_figure.py": "figure",
    "referee/figure.py": "figure",
    "sequences/figure.py": "figure",
    "sequences/transformers.py": "transformers",
    "sequences/transformers_layers.py": "transformers",
    "sequences/transformers_slots.py": "transformers",
    "cluster.py": "cluster",
    "optuna.py": "optuna",
    "pytest_plugin.py": "plugin",
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
    if path == PACKAGE / "__init__.py":
        entered -= (
            LIBRARY  # it names them for type checkers alone: test_other_rooms_load_on_first_use
        )
    assert not entered & INNER[room(path)]


REFUSE_OTHERS = """
import importlib.machinery
import sys
import torch, torch.nn.functional, torch.func

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = {allowed!r} | set(sys.stdlib_module_names)
        if top not in known and not top.startswith("_sysconfigdata"):
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        raise ImportError(spec.name + " is refused")

sys.meta_path.insert(0, Refuse())
for module in {modules!r}:
    importlib.import_module(module)
late = ("arsm.rl", "arsm.pyro", "arsm.trl", "arsm.optuna", "arsm_experiments")
assert not [m for m in sys.modules if m.startswith(late)]
"""


def test_the_core_needs_torch_alone() -> None:
    """Whatever torch itself has loaded, the core loads nothing else."""
    core = [path for path in FILES if room(path) == "core"]
    modules = [
        ".".join(("arsm", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in core
    ]
    modules = [module.removesuffix(".__init__") for module in modules]
    program = REFUSE_OTHERS.format(allowed={"torch", "arsm"}, modules=modules)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- names of modules


PACKAGES = [
    "arsm",
    *(module.name for module in pkgutil.walk_packages([str(PACKAGE)], "arsm.") if module.ispkg),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_function_or_class_hides_a_module(package: str) -> None:
    if package == "arsm.pyro":
        pytest.importorskip("pyro", reason="pyro-ppl is not installed; pip install 'arsm[pyro]'")
    if package == "arsm.trl":
        pytest.importorskip("trl", reason="TRL is not installed; pip install 'arsm[trl]'")
    found = importlib.import_module(package)
    modules = {module.name for module in pkgutil.iter_modules(found.__path__)}
    # a module that was not imported yet is no attribute; once imported, it would replace what has
    # its name
    public = modules & {*vars(found), *getattr(found, "__all__", ())}
    hiding = [
        name for name in public if getattr(found, name) is not sys.modules.get(f"{package}.{name}")
    ]
    assert not hiding


FIRST_USE = """
import sys
import torch
before = set(sys.modules)
import arsm
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not loaded & {"gymnasium", "numpy", "pyro", "transformers"}, loaded
assert not {"arsm.rl", "arsm.pyro", "arsm.testing"} & set(sys.modules)
assert {"rl", "pyro", "testing", "referee", "audit", "ARSM"} <= set(dir(arsm))
assert arsm.rl.Settings().budget > 0
assert arsm.testing.assert_unbiased
assert arsm.rl is sys.modules["arsm.rl"]
assert "arsm.pyro" not in sys.modules
"""


def test_other_rooms_load_on_first_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


RL_EXTRA = "arsm.rl needs gymnasium; install it with `pip install 'arsm[rl]'`."
PYRO_EXTRA = "arsm.pyro needs Pyro; install it with `pip install 'arsm[pyro]'`."
OPTUNA_EXTRA = "arsm.optuna needs Optuna; install it with `pip install 'arsm[optuna]'`."
WITHOUT_EXTRAS = {
    "arsm.rl.PolicyGradient": f"ModuleNotFoundError: {RL_EXTRA}",
    "from arsm.rl import Value": f"ModuleNotFoundError: {RL_EXTRA}",
    "arsm.rl.Settings()": "",  # needs none
    "arsm.pyro": f"AttributeError: {PYRO_EXTRA}",
    "import arsm.pyro": f"ModuleNotFoundError: {PYRO_EXTRA}",
    "from arsm import pyro": f"ModuleNotFoundError: {PYRO_EXTRA}",
    "assert not hasattr(arsm, 'pyro')": "",
    "import pydoc; pydoc.render_doc(arsm)": "",
    "import arsm.optuna": f"ModuleNotFoundError: {OPTUNA_EXTRA}",
    "arsm.nothing": "AttributeError: module 'arsm' has no attribute 'nothing'",
}
"""Statements, and what they raise."""
TRY_ALL = """
import sys
sys.modules.update(dict.fromkeys(["gymnasium", "pyro", "optuna"]))  # None: not found
import arsm
for statement in {statements!r}:
    try:
        exec(statement)
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}")
    else:
        print()
"""


def test_without_an_extra_it_says_what_to_install() -> None:
    program = TRY_ALL.format(statements=list(WITHOUT_EXTRAS))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert dict(zip(WITHOUT_EXTRAS, done.stdout.split("\n"), strict=False)) == WITHOUT_EXTRAS, (
        done.stderr
    )


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
