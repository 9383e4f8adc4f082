"""One thing, one name: no public class or function of the library shares its name with another, and
no class of the experiments; a class of one module does not either, with an underscore before it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import arsm
import arsm_experiments

SOURCE = Path(arsm.__file__).parent
EXPERIMENTS = Path(arsm_experiments.__file__).parent

TWINS = {
    # one idea in two rooms: the same call for functions of z and for language models
    "compare",
    "estimate",
    # the swap and the merge of ARSM, and the operators of `kernels` that they are made of
    "merge",
    "merge_pairs",
    # the values of a sequence, from its end to its beginning: for a batch, and for states of TRL
    "back_up",
}
"""Functions that share a name on purpose."""
EXPERIMENTS_TWINS = {
    # a task of sequences, and a row of the page about them
    "Task",
    # a job and a worker of the GPU's schedule, and of trials on CPUs
    "Job",
    "Worker",
    # a result and a level: of the report's tables and figures, and of the language model's page
    "Result",
    "Level",
}
"""Classes of the experiments that still share a name; this list may only become shorter."""


def defined(
    kind: type[ast.ClassDef] | type[ast.FunctionDef],
    source: Path = SOURCE,
    *,
    private: bool = False,
) -> dict[str, list[str]]:
    """The modules that define each public name, or all without a leading underscore; `kernels`
    repeats names, once per backend.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        if path.parent.name == "kernels" and path.name != "__init__.py":
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, kind) and (private or not node.name.startswith("_")):
                found[node.name.lstrip("_")].append(path.relative_to(source).as_posix())
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_classes_have_names_of_their_own() -> None:
    assert defined(ast.ClassDef, private=True) == {}


def test_functions_have_names_of_their_own() -> None:
    twice = {
        name: modules for name, modules in defined(ast.FunctionDef).items() if name not in TWINS
    }
    assert twice == {}


def test_classes_of_the_experiments_have_names_of_their_own() -> None:
    assert defined(ast.ClassDef, EXPERIMENTS).keys() <= EXPERIMENTS_TWINS
