"""All parameters of a module as one vector."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# the rounding of matrix products depends on memory alignment: every replica starts at a multiple of
# 64 bytes
ALIGNMENT = 16


class Layout(NamedTuple):
    """Where each parameter of a module lies in a vector [P]."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        names, parameters = zip(*module.named_parameters(), strict=True)
        return cls(names, tuple(p.shape for p in parameters))

    def unpack(self, vectors: Tensor) -> dict[str, Tensor]:
        """Views by name of vectors [..., P]."""
        sizes = [shape.numel() for shape in self.shapes]
        # the rest is padding
        parts = vectors.split([*sizes, vectors.shape[-1] - sum(sizes)], -1)[: len(sizes)]
        shaped = (
            part.view((*part.shape[:-1], *shape))
            for part, shape in zip(parts, self.shapes, strict=True)
        )
        return dict(zip(self.names, shaped, strict=True))


def pack(module: nn.Module) -> Tensor:
    """All parameters as one vector [P], with zeros up to a multiple of ALIGNMENT."""
    return padded(torch.cat([p.detach().flatten() for p in module.parameters()]))


def padded(vector: Tensor) -> Tensor:
    """With zeros up to a multiple of ALIGNMENT."""
    return F.pad(vector, (0, -vector.shape[0] % ALIGNMENT))
