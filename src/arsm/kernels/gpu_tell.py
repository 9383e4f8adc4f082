"""Gradients from f's values in eager mode on a GPU, as one Triton kernel each."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels.launch import in_one_block, launch


@triton.jit
def _leave_one_out(z, values, result, C, R, K, COUNT, BLOCK: tl.constexpr, SAMPLES: tl.constexpr):
    """sum_i f_i onehot(z_i) of one variable, SAMPLES at once; f less its mean, over n - 1."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    values += row // K
    own = tl.load(values).to(tl.float64)
    # the mean of f less its first value, as `scores.less_mean` has it
    total = tl.zeros([SAMPLES], tl.float64)
    start = 0
    while start < COUNT:
        i = start + tl.arange(0, SAMPLES)
        total += tl.load(values + i * R, mask=i < COUNT, other=0.0).to(tl.float64) - tl.where(
            i < COUNT, own, 0.0
        )
        start += SAMPLES
    mean = tl.sum(total, 0) / COUNT
    # each sample adds its f to its category; a sample beyond the last has category -1
    sums = tl.zeros([BLOCK], tl.float64)
    start = 0
    while start < COUNT:
        i = start + tl.arange(0, SAMPLES)
        f = tl.load(values + i * R, mask=i < COUNT, other=0.0).to(tl.float64) - own - mean
        chosen = tl.load(z + i * (R * K) + row, mask=i < COUNT, other=-1)
        sums += tl.sum(tl.where(chosen[:, None] == c[None, :], f[:, None], 0.0), 0)
        start += SAMPLES
    tl.store(result + row * C + c, sums / (COUNT - 1), mask=c < C)


def leave_one_out(z: Tensor, values: Tensor, categories: int, dtype: torch.dtype) -> Tensor:
    """`arsm.scores.leave_one_out`, as one kernel."""
    z, values = z.contiguous(), values.contiguous()
    count, *batch, variables = z.shape
    rows = z.numel() // count
    result = torch.empty((*batch, variables, categories), dtype=dtype, device=z.device)
    samples = min(16, 1 << (count - 1).bit_length())
    launch(
        _leave_one_out, rows, z, values, result, categories, rows // variables, variables, count,
        **in_one_block(categories), SAMPLES=samples,
    )  # fmt: skip
    return result


@triton.jit
def _compare_swaps(values, pseudo, weight, result, C, R, J, K, BLOCK: tl.constexpr):
    """mean_j [F_cj - mean_m F_mj] w_j of one variable."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < C
    own, variable = row // K, row % K
    values += own
    sums = tl.zeros([BLOCK], tl.float64)
    j = 0
    while j < J:
        at = (own * J + j) * K + variable
        query = j * C + c
        # one variable was asked by category, several by swap
        if K == 1:
            query = tl.load(pseudo + at * C + c, mask=mask, other=0).to(tl.int32)
        f = tl.load(values + (query + 1).to(tl.int64) * R, mask=mask, other=0.0).to(tl.float64)
        # equal values give exactly zero
        f = tl.where(mask, f - tl.sum(tl.where(c == 0, f, 0.0), 0), 0.0)
        sums += (f - tl.sum(f, 0) / C) * tl.load(weight + at)
        j += 1
    tl.store(result + row * C + c, sums / J, mask=mask)


def compare_swaps(values: Tensor, pseudo: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`arsm.references.compare_swaps`, as one kernel."""
    values = values.contiguous()
    pseudo = pseudo.contiguous()
    weight = weight.contiguous()
    *batch, count, variables, categories = pseudo.shape
    result = torch.empty((*batch, variables, categories), dtype=dtype, device=values.device)
    rows = values.numel() // values.shape[0]
    launch(
        _compare_swaps, rows * variables, values, pseudo, weight, result, categories, rows,
        count, variables,
        **in_one_block(categories),
    )  # fmt: skip
    return result
