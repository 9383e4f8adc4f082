r"""Samples of a categorical by inverse cumulative sums: one uniform per choice.

z = min{c : S_c > u S_C} with S_c = sum_{i <= c} p_i. Probabilities are rounded to
multiples of 2^-52, which float64 adds without error: the sums are the same in every
order of summation and never decrease. Since S_z > S_{z-1}, a category of probability
zero is never chosen.

Many categories are cut into blocks. The uniform chooses a block; what remains of it is
again uniform and chooses a category of that block. Only the blocks' sums and one block
per choice are held in float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm import kernels
from arsm.kernels.two_ways import search
from arsm.noise import working_dtype

UNIT = 2.0**52
"""Units of probability in 1."""
IN_ONE_PIECE = 512
"""More categories are cut into blocks."""
BLOCK = 64
"""Least categories per block."""
BLOCKS = 4096
"""Most blocks of the usual size; more categories make larger blocks."""


def uniforms(logits: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw one uniform in [0, 1) per choice, float64: logits [*B, K, C] -> [*B, n, K]."""
    # laid out as [n, *B, K], like the queries that it becomes; new_empty keeps vmap's batch
    # dimension
    u = logits.new_empty((n, *logits.shape[:-1]), dtype=torch.float64)
    return u.uniform_(generator=generator).movedim(0, -2)


@kernels.one_kernel("gpu_queries", lambda logits, u: logits.shape[-1])
def inverse_sample(logits: Tensor, u: Tensor) -> Tensor:
    """n samples per variable from n uniforms: logits [*B, K, C], u [*B, n, K] in [0, 1)
    -> z [*B, n, K] int64.
    """
    logits = logits.detach()
    dtype = working_dtype(logits.dtype)
    categories = logits.shape[-1]
    p = logits.softmax(-1, dtype=dtype)
    if categories <= IN_ONE_PIECE:
        return search(*cumulative(p, u.mT)).mT

    # choose a block
    size = max(BLOCK, 1 << (categories // BLOCKS).bit_length())
    whole = categories // size * size
    of_blocks = p[..., :whole].unflatten(-1, (-1, size)).sum(-1)
    if whole < categories:  # the last block is shorter
        of_blocks = torch.cat([of_blocks, p[..., whole:].sum(-1, keepdim=True)], -1)
    del p  # as large as the logits
    sums, x = cumulative(of_blocks, u.mT)
    block = search(sums, x)
    below = F.pad(sums, (1, 0)).gather(-1, block)
    rest = (x - below) / (sums.gather(-1, block) - below)

    # choose a category of the block, by what remains of the uniform
    first = block.mT.unsqueeze(-1) * size  # [*B, n, K, 1]
    members = first + torch.arange(size, device=u.device)
    each = logits.unsqueeze(-3).expand(*members.shape[:-1], -1)
    chosen = each.gather(-1, members.clamp_max(categories - 1))
    chosen = torch.where(members < categories, chosen, -torch.inf)
    place = search(*cumulative(chosen.softmax(-1, dtype=dtype), rest.mT.unsqueeze(-1)))
    return (first + place).squeeze(-1).clamp_max(categories - 1)


def cumulative(p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The sums S [..., C] of probabilities p [..., C], in units of 2^-52, and x = u S_C
    [..., n] of uniforms u.
    """
    sums = (p.double() * UNIT).round().cumsum(-1)
    return sums, u * sums[..., -1:]
