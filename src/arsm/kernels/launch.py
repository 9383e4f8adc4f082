"""Launching small Triton kernels, where the host's time counts."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

_COMPILED: dict[tuple[object, ...], Any] = {}
"""Kernels by what Triton compiles them for."""


def launch(
    kernel: Any, programs: int, *args: Tensor | int, num_warps: int = 4, **constants: int
) -> None:
    """`kernel[(programs,)](*args, num_warps=num_warps, **constants)`; constants in the
    order that the kernel has them.

    Triton binds and describes all arguments anew at each launch, which takes twice as
    long as the launch itself. A compiled kernel can be launched again for arguments of
    the same dtypes, if the same pointers and integers are multiples of 16, and the same
    integers are 1 or need 64 bits.
    """
    # in one expression, without a function: this is what a launch takes longest for
    key = (
        kernel.fn,
        args[0].device,  # pyright: ignore[reportAttributeAccessIssue]
        num_warps,
        *constants.values(),
        *[
            (x % 16 == 0, x == 1, x >> 31) if type(x) is int else (x.data_ptr() % 16 == 0, x.dtype)  # pyright: ignore
            for x in args
        ],
    )
    compiled = _COMPILED.get(key)
    if compiled is None:
        _COMPILED[key] = kernel[(programs,)](*args, num_warps=num_warps, **constants)
    else:
        compiled[(programs, 1, 1)](*args, *constants.values())


@functools.cache
def in_one_block(categories: int) -> dict[str, int]:
    """All categories of a row in one program."""
    block = max(16, 1 << (categories - 1).bit_length())  # the next power of 2
    return {"BLOCK": block, "num_warps": 1 if block <= 128 else 4}


@functools.cache
def in_one_warp(categories: int) -> dict[str, int]:
    """All categories of as many rows as a warp has threads for."""
    block = in_one_block(categories)["BLOCK"]
    return {"BLOCK": block, "ROWS": max(1, 32 // block), "num_warps": 1}


@functools.cache
def in_warps(categories: int) -> dict[str, int]:
    """As `in_one_warp`, with more warps for a row that would fill one warp's registers."""
    sizes = in_one_block(categories)
    rows = max(1, 32 // sizes["BLOCK"])
    return {"BLOCK": sizes["BLOCK"], "ROWS": rows, "num_warps": sizes["num_warps"]}
