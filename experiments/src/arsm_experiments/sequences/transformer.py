"""A small decoder-only transformer with a key-value cache of fixed size."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arsm.sequences.model import Decode, SlotsRefused

ONE_LENGTH = (
    "This transformer takes prompts of one length; pad them with a token of the vocabulary."
)


@dataclass(frozen=True, eq=False)
class Cached:
    """N prefixes of `length` tokens."""

    logits: Tensor
    """[N, V]."""
    cache: Tensor
    """[layers, 2, N, heads, S, D]: keys and values."""
    length: int


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [N, heads, L, D] of x [N, L, W]."""
        return (
            self.qkv(self.norm_1(x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )

    def join(self, x: Tensor, attended: Tensor) -> Tensor:
        """The block's output from its input [N, L, W] and the attention's [N, heads, L, D]."""
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class TransformerSlots:
    """A `SlotModel` of prompts of one length."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def cache(self, rows: int, width: int) -> Tensor:
        heads = self.model.heads
        size = self.model.norm.normalized_shape[0] // heads
        return self.model.head.weight.new_zeros(
            len(self.model.blocks), 2, rows, heads, width, size
        ).detach()

    def fill(self, cache: Tensor, tokens: Tensor, mask: Tensor | None) -> None:
        if mask is not None:
            raise ValueError(ONE_LENGTH)
        self.model._through(tokens, cache)

    def decoder(self, cache: Tensor) -> Decode:
        model = self.model
        layers = [(torch.from_dlpack(layer[0]), torch.from_dlpack(layer[1])) for layer in cache]
        columns = torch.arange(cache.shape[4], device=cache.device)
        row = torch.arange(cache.shape[2], device=cache.device)

        def decode(tokens: Tensor, column: Tensor, first: Tensor) -> Tensor:
            x = (model.tokens(tokens) + model.places(column)).unsqueeze(1)
            seen = (columns <= column.unsqueeze(-1))[:, None, None]
            for block, (keys, values) in zip(model.blocks, layers, strict=True):
                q, k, v = block.split(x)  # pyright: ignore[reportCallIssue]
                keys[row, :, column] = k.squeeze(2)
                values[row, :, column] = v.squeeze(2)
                x = block.join(x, F.scaled_dot_product_attention(q, keys, values, attn_mask=seen))  # pyright: ignore
            return model.head(model.norm(x)).squeeze(1)

        return decode

    def weights(self) -> list[Tensor]:
        return list(self.model.parameters())

    def decoding(self) -> AbstractContextManager[object]:
        return nullcontext()


class Transformer(nn.Module):
    """A `Model` of prompts of one length: padding is a token like any other."""

    def __init__(
        self,
        vocabulary: int,
        longest: int,
        width: int = 192,
        layers: int = 4,
        heads: int = 6,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        self.longest = longest
        self.heads = heads
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs or vocabulary)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [N, L] -> [N, L, V]."""
        return self._through(tokens, None)

    def _through(self, tokens: Tensor, cache: Tensor | None) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places.weight[:length]
        for number, block in enumerate(self.blocks):
            q, k, v = block.split(x)  # pyright: ignore[reportCallIssue]
            if cache is not None:
                cache[number, 0, :, :, :length], cache[number, 1, :, :, :length] = k, v
            x = block.join(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))  # pyright: ignore
        return self.head(self.norm(x if cache is None else x[:, -1:]))

    def start(self, prompts: Tensor, mask: Tensor | None = None) -> Cached:
        if mask is not None:
            raise ValueError(ONE_LENGTH)
        shape = (len(self.blocks), 2, prompts.shape[0], self.heads, self.longest)
        cache = self.head.weight.new_zeros(*shape, self.norm.normalized_shape[0] // self.heads)
        return Cached(self._through(prompts, cache).squeeze(1), cache, prompts.shape[1])

    def step(self, state: Cached, tokens: Tensor) -> Cached:
        place = state.length
        x = (self.tokens(tokens) + self.places.weight[place]).unsqueeze(1)
        for number, block in enumerate(self.blocks):
            q, k, v = block.split(x)  # pyright: ignore[reportCallIssue]
            keys, values = state.cache[number, 0], state.cache[number, 1]
            keys[:, :, place], values[:, :, place] = k.squeeze(2), v.squeeze(2)
            attended = F.scaled_dot_product_attention(
                q, keys[:, :, : place + 1], values[:, :, : place + 1]
            )
            x = block.join(x, attended)  # pyright: ignore[reportCallIssue]
        return Cached(self.head(self.norm(x)).squeeze(1), state.cache, place + 1)

    def select(self, state: Cached, rows: Tensor) -> Cached:
        used = state.cache[..., : state.length, :].index_select(2, rows)
        cache = used.new_empty(*used.shape[:4], self.longest, used.shape[-1])
        cache[..., : state.length, :] = used
        return Cached(state.logits.index_select(0, rows), cache, state.length)

    def slots(self, dtype: torch.dtype | None = None) -> TransformerSlots:
        """The model for decoding in slots, with its own weights."""
        if dtype not in (None, self.head.weight.dtype):
            raise SlotsRefused(f"it samples with its own weights, which are not {dtype}.")
        return TransformerSlots(self)

    def logits(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self(torch.cat([prompts, tokens[:, :-1]], -1))[:, prompts.shape[1] - 1 :]
