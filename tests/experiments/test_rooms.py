"""Dependencies of the experiments point one way, and names tell their modules apart."""

import ast
from collections import Counter
from pathlib import Path

import pytest

import arsm_experiments
from arsm_experiments.cli import commands

PACKAGE = Path(arsm_experiments.__file__).parent
EXPERIMENTS = tuple(name for name, command in commands().items() if hasattr(command, "runs"))
RULES = {
    "runs": (
        EXPERIMENTS,
        ("training", "adam", "replicas", "model", "report", "plans", "reproduce", "cli"),
    ),
    "training": (EXPERIMENTS, ("report", "plans", "reproduce", "cli")),
    **dict.fromkeys(EXPERIMENTS, ((), ("report", "plans", "reproduce"))),
    **dict.fromkeys(
        ("decoder", "gpu_decoder", "gpu_perceptron"),
        (EXPERIMENTS, ("training", "replicas", "model")),
    ),
    "report": ((), ("plans", "reproduce", "cli")),
}
"""What each part must not import: storage and training know no experiment, an experiment does not
know its report.
"""


def imports(path: Path) -> set[str]:
    """The parts of this package that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {
            module.split(".")[1] for module in modules if module.startswith("arsm_experiments.")
        }
    return found


@pytest.mark.parametrize("part", RULES)
def test_dependencies_point_one_way(part: str) -> None:
    files = list((PACKAGE / part).glob("*.py")) or [PACKAGE / f"{part}.py"]
    refused = {name for names in RULES[part] for name in names}
    found = {path.name: imports(path) & refused for path in files}
    assert not any(found.values()), found
    assert any(imports(path) for path in files)


def test_no_names_differ_by_case_alone() -> None:
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    names = {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    assert [name for name, count in Counter(map(str.lower, names)).items() if count > 1] == []
