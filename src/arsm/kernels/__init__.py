"""Operators for one variable of many categories: opaque to torch.compile, mapped by vmap, Triton kernels on a GPU.

`order` finds the order that `arsm.univariate` sums in, `merge` the sums. Both treat all leading dimensions alike.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from arsm.kernels import eager

HAS_TRITON = importlib.util.find_spec("triton") is not None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


@torch.library.custom_op("arsm::order", mutates_args=())
def order(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the race and order its noise: logits and ln pi [..., C].

    Returns:
        ahead [..., 3] int64, the first three of the race, z first; can_win [..., C] bool; with_z [..., C] int8, who
        wins the pair (z, c): 0 for z, 1 for c, 2 for the first of the others; wins [..., C] int32, the number r_c of
        references c wins against; rank [..., C] int32, c's place in the order of a, at least max r where nobody wins
        against c.
    """
    shape = logits.shape
    found = _implementation(logits).order(_rows(logits), _rows(log_pi))
    return tuple(x.view(*shape[:-1], x.shape[-1]) for x in found)  # pyright: ignore[reportReturnType]


@order.register_fake
def _(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = logits.shape
    return (
        logits.new_empty(*shape[:-1], 3, dtype=torch.int64),
        logits.new_empty(shape, dtype=torch.bool),
        logits.new_empty(shape, dtype=torch.int8),
        logits.new_empty(shape, dtype=torch.int32),
        logits.new_empty(shape, dtype=torch.int32),
    )


@torch.library.custom_op("arsm::merge", mutates_args=())
def merge(log_pi: Tensor, ahead: Tensor, with_z: Tensor, wins: Tensor, rank: Tensor, f: Tensor) -> Tensor:
    """The ARSM gradient, float64, from what `order` found and f at every category: [..., C] each."""
    found = _implementation(f).merge(*(_rows(x) for x in (log_pi, ahead, with_z, wins, rank, f)))
    return found.view(f.shape)


@merge.register_fake
def _(log_pi: Tensor, ahead: Tensor, with_z: Tensor, wins: Tensor, rank: Tensor, f: Tensor) -> Tensor:
    return f.new_empty(f.shape, dtype=torch.float64)


def _implementation(x: Tensor):
    if x.is_cuda and HAS_TRITON:
        from arsm.kernels import gpu

        return gpu
    return eager


def _map(op):
    def mapped(info, in_dims, *xs):
        xs = [
            x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(xs, in_dims, strict=True)
        ]
        out = op(*xs)
        return out, 0 if isinstance(out, Tensor) else tuple(0 for _ in out)

    return mapped


order.register_vmap(_map(order))
merge.register_vmap(_map(merge))
