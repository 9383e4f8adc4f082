"""The backend seam: only `kernels/` asks on which device a tensor lies or whether it is compiled in
order to save time. What asks elsewhere has another reason, and stands in this list.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import arsm

SOURCE = Path(arsm.__file__).parent
PREDICATES = {
    "is_cuda",
    "is_compiling",
    "is_exporting",
    "_are_functorch_transforms_active",
    "is_available",
}

ALLOWED = {
    # a warning or a check would be traced, or would read a value inside a graph
    ("checks.py", "check_function", "is_compiling"),
    ("checks.py", "warn_of_single_category", "is_compiling"),
    ("driver.py", "estimate", "is_compiling"),
    ("given_noise.py", "check_noise", "is_compiling"),
    ("given_noise.py", "check_noise", "_are_functorch_transforms_active"),
    # an exported module chooses the most likely category; a compiled one breaks its graph here
    ("choice.py", "forward", "is_exporting"),
    ("choice.py", "forward", "is_compiling"),
    # torch.compile traces no autograd function inside vmap
    ("question.py", "attach", "_are_functorch_transforms_active"),
    # a GPU is waited for before the clock is read, and its memory is measured
    ("comparison.py", "time_one", "is_cuda"),
    ("sequences/comparison.py", "_estimated", "device.type"),
    ("sequences/slots.py", "_filled", "is_cuda"),
    # only a GPU can capture a graph
    ("sequences/slots.py", "_captures", "is_cuda"),
    # autocast and generators are named by the type of their device
    ("checks.py", "check_generator", "device.type"),
    ("choice_checks.py", "check_again", "device.type"),
    ("question.py", "credit", "device.type"),
    ("question.py", "attach_paths", "device.type"),
    ("sequences/cluster.py", "__init__", "device.type"),
    ("sequences/credit.py", "__init__", "device.type"),
    ("sequences/credit.py", "add", "device.type"),
    ("sequences/driver.py", "_remembered_logits", "device.type"),
    ("sequences/transformers.py", "_distance", "device.type"),
    ("sequences/slots.py", "_play", "device.type"),
    ("trl/head.py", "logit", "device.type"),
}


def asked(path: Path) -> Iterator[tuple[str, str, str]]:
    """The file, the function and the predicate of every question about a device or a compiler."""
    name = path.relative_to(SOURCE).as_posix()
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute):
                continue
            if node.attr in PREDICATES:
                yield name, function.name, node.attr
            elif node.attr == "type" and ast.unparse(node.value).endswith("device"):
                yield name, function.name, "device.type"


def test_only_kernels_choose_by_device_or_compiler() -> None:
    found = {
        question
        for path in SOURCE.rglob("*.py")
        if "kernels" not in path.parts
        for question in asked(path)
    }
    assert found == ALLOWED
