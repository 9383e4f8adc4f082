"""Operators for one variable of many categories: opaque to torch.compile, mapped by vmap, Triton kernels on a GPU.

`order` finds the order that `arsm.univariate` sums in, `merge` the sums. Both treat all leading dimensions alike.
They are registered by `torch.library.define`, since an operator made by `custom_op` imports torch._dynamo, 70 MB of it,
at its first eager call.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from arsm.kernels import eager

torch.library.define("arsm::order", "(Tensor logits, Tensor log_pi) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
torch.library.define(
    "arsm::merge", "(Tensor log_pi, Tensor ahead, Tensor with_z, Tensor wins, Tensor rank, Tensor f) -> Tensor"
)


def order(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the race and order its noise: logits and ln pi [..., C].

    Returns:
        ahead: [..., 4] int64, the first three of the race, z first, and how many elements are ordered.
        can_win: [..., C] bool.
        with_z: [..., C] int8, who wins the pair (z, c): 0 for z, 1 for c, 2 for the first of the others.
        wins: [..., C] int32, the number r_c of references that c wins against.
        rank: [..., C] int32, the place of c in the order of a; C where it is not ordered.
    """
    return torch.ops.arsm.order(logits, log_pi)


def merge(log_pi: Tensor, ahead: Tensor, with_z: Tensor, wins: Tensor, rank: Tensor, f: Tensor) -> Tensor:
    """The ARSM gradient, in f's dtype, from what `order` found and f at every category: [..., C] each."""
    return torch.ops.arsm.merge(log_pi, ahead, with_z, wins, rank, f)


@functools.cache
def _has_triton() -> bool:
    """PyTorch for CUDA brings Triton along, except on Windows."""
    return importlib.util.find_spec("triton") is not None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


@torch.library.impl("arsm::order", ("cpu", "cuda"))
def _order(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, ...]:
    if logits.is_cuda and _has_triton():
        from arsm.kernels.gpu_order import order as implementation
    else:
        implementation = eager.order
    found = implementation(_rows(logits), _rows(log_pi))
    return tuple(x.view(*logits.shape[:-1], x.shape[-1]) for x in found)


@torch.library.impl("arsm::merge", ("cpu", "cuda"))
def _merge(log_pi: Tensor, ahead: Tensor, with_z: Tensor, wins: Tensor, rank: Tensor, f: Tensor) -> Tensor:
    if f.is_cuda and _has_triton():
        from arsm.kernels.gpu_merge import merge as implementation
    else:
        implementation = eager.merge
    return implementation(*(_rows(x) for x in (log_pi, ahead, with_z, wins, rank, f))).view(f.shape)


@torch.library.register_fake("arsm::order")
def _(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, ...]:
    shape = logits.shape
    return (
        logits.new_empty(*shape[:-1], 4, dtype=torch.int64),
        logits.new_empty(shape, dtype=torch.bool),
        logits.new_empty(shape, dtype=torch.int8),
        logits.new_empty(shape, dtype=torch.int32),
        logits.new_empty(shape, dtype=torch.int32),
    )


@torch.library.register_fake("arsm::merge")
def _(log_pi: Tensor, ahead: Tensor, with_z: Tensor, wins: Tensor, rank: Tensor, f: Tensor) -> Tensor:
    return f.new_empty(f.shape)


def _map(op: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """The operator over one more leading dimension."""

    def mapped(info: Any, in_dims: tuple[int | None, ...], *xs: Tensor) -> tuple[Any, Any]:
        out = op(
            *(
                x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
                for x, dim in zip(xs, in_dims, strict=True)
            )
        )
        return out, 0 if isinstance(out, Tensor) else tuple(0 for _ in out)

    return mapped


torch.library.register_vmap("arsm::order", _map(order))
torch.library.register_vmap("arsm::merge", _map(merge))
