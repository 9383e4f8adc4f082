"""Triton's interpreter needs a process of its own: Triton reads TRITON_INTERPRET when it is
imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def assert_equal(*command: str) -> None:
    """Run Python in the interpreter's mode with these arguments; the program must print "equal" and
    nothing else.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "equal", done.stderr
