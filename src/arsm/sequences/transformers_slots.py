"""Causal models of Hugging Face's transformers in slots: each row of the cache at its
own position.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from arsm.sequences.model import Decode, SlotsRefused, active_dropout
from arsm.sequences.transformers_layers import SplitCache, compiled_step, with_layers_run_by

FOLDED = "arsm_folded"
"""The name under which transformers knows `folded_attention`."""
WINDOWS = {"full_attention": False, "sliding_attention": True}
"""The kinds of layers that can be decoded in slots, and whether they see a window only."""


class At:
    """The column at which all layers store the present tokens."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.row = torch.arange(rows, device=device)
        self.column = torch.zeros_like(self.row)  # [S]


class SlotLayer(CacheLayerMixin):
    """One layer of the cache: every row stores at a column of its own, and all columns
    are returned.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, at: At) -> None:
        super().__init__()
        self.keys = keys
        self.values = values
        self.at = at
        self.dtype = keys.dtype
        self.device = keys.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        # index_put_ and not scatter_: compiled, only the former writes in place
        self.keys[self.at.row, :, self.at.column] = key_states.squeeze(2)
        self.values[self.at.row, :, self.at.column] = value_states.squeeze(2)
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the tensors exist."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        # positions and masks are given by the caller, so that nobody needs the number of stored
        # tokens
        return 0

    def get_max_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[2]

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` in earlier versions."""
        return self.get_max_length()


def folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one token per row, in which heads that share keys are queries of one head.

    transformers would repeat keys and values in memory for every head that shares them.

    Args:
        module: the attention layer.
        query: [S, H, 1, D].
        key: [S, G, W, D], each shared by H/G heads.
        value: [S, G, W, D].
        attention_mask: [S, 1, 1, W], added to the scores.
        scaling: of the scores; 1/sqrt(D) by default.
        softcap: c of c tanh(score / c).
        kwargs: other options of transformers' attention functions.

    Returns:
        [S, 1, H, D], and no weights.
    """
    if any(kwargs.get(name) is not None for name in ("s_aux", "position_bias")):
        raise SlotsRefused("its attention has sinks or biases.")
    rows, heads, tokens, size = query.shape
    query = query.reshape(rows, key.shape[1], -1, size)
    if softcap is None:
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling
        )
    else:
        scores = query @ key.mT * (size**-0.5 if scaling is None else scaling)
        scores = torch.tanh(scores / softcap) * softcap
        if attention_mask is not None:
            scores = scores + attention_mask
        wide = torch.promote_types(scores.dtype, torch.float32)
        attended = scores.softmax(-1, dtype=wide).to(value.dtype) @ value
    return attended.reshape(rows, heads, tokens, size).transpose(1, 2), None


AttentionInterface.register(FOLDED, folded_attention)


class TransformersSlots:
    """A `SlotModel` from a causal model of transformers."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype | None = None, *, compile_layers: bool = False
    ) -> None:
        """Wrap a model, or refuse it with `SlotsRefused`.

        Args:
            model: a causal model that takes positions.
            dtype: sample with copies of the weights in this type; None for the weights
                themselves.
            compile_layers: compile one layer for the steps of all.
        """
        # a step is one graph, and a graph is of one device
        if len({parameter.device for parameter in model.parameters()}) != 1:
            raise SlotsRefused("its weights lie on several devices.")
        original: Any = model
        self._config: Any = original.config.get_text_config(decoder=True)
        _refuse_positions(self._config)
        if active_dropout(model) is not None:
            raise SlotsRefused("its dropout is active; call model.eval().")
        self._windows = _windows(self._config)
        self._few_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._switches = _can_switch(original)
        self._own: list[tuple[Any, str]] = []
        self._original = model
        self._model: Any = model
        if dtype is not None and any(
            dtype != p.dtype for p in model.parameters() if p.is_floating_point()
        ):
            self._model = _copied(model, dtype)
        self.dtype: torch.dtype = self._model.get_input_embeddings().weight.dtype
        # by trial: configurations name these sizes in many ways
        self._shape = self._shape_of_cache()
        self._stepped: Any = self._model
        """Steps; another module than the one that fills caches, if its layers are compiled."""
        if compile_layers:
            self._stepped = with_layers_run_by(compiled_step, self._model, self._shape[0])

    def cache(self, rows: int, width: int) -> Tensor:
        layers, heads, size = self._shape
        weight = self._model.get_input_embeddings().weight
        # zeros, not whatever memory holds: NaN in a column leaks through a mask
        return torch.zeros(
            layers, 2, rows, heads, width, size, dtype=self.dtype, device=weight.device
        )

    def fill(self, cache: Tensor, tokens: Tensor, mask: Tensor | None) -> None:
        length = tokens.shape[1]
        # the folded attention is for one token per row
        self._attend(None)
        try:
            stored = self._prefilled(tokens, mask)
        finally:
            self._attend(FOLDED)
        padding = None if mask is None else ~mask[:, None, :, None]
        for number, pair in enumerate(stored):
            for kind, tensor in enumerate(pair):
                if padding is not None:  # some attention functions make padding NaN
                    tensor = tensor.masked_fill(padding, 0)
                cache[number, kind, :, :, :length] = tensor

    def decoder(self, cache: Tensor) -> Decode:
        # shared by all layers, and set before every step: their `update` gets no positions
        at = At(cache.shape[2], cache.device)
        # tensors of their own on the same memory: a compiler would take views of one tensor to
        # overlap
        layers = [
            SlotLayer(torch.from_dlpack(layer[0]), torch.from_dlpack(layer[1]), at)
            for layer in cache
        ]
        stored = SplitCache(layers)
        columns = torch.arange(cache.shape[4], device=cache.device)
        masked = torch.finfo(cache.dtype).min

        def decode(tokens: Tensor, column: Tensor, first: Tensor) -> Tensor:
            at.column = column
            here = column.unsqueeze(-1)
            begin = first.unsqueeze(-1)
            seen = (columns >= begin) & (columns <= here)
            masks = {}
            for kind, window in self._windows.items():
                within = seen if window is None else seen & (columns > here - window)
                # additive and of the model's type: some attention functions would add a boolean one
                additive = torch.zeros(within.shape, dtype=cache.dtype, device=cache.device)
                masks[kind] = additive.masked_fill(~within, masked)[:, None, None]
            mask: Any = masks if len(masks) > 1 else next(iter(masks.values()))
            out = self._stepped(
                input_ids=tokens.unsqueeze(-1),
                attention_mask=mask,
                position_ids=here - begin,
                past_key_values=stored,
                use_cache=True,
            )
            return out.logits[:, -1]

        return decode

    def weights(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Bring copied weights up to date and attend with folded heads; the model's own
        way is restored afterwards.
        """
        if self._model is not self._original:
            with torch.no_grad():
                originals = [*self._original.parameters(), *self._original.buffers()]
                # in place: captured steps read this memory
                torch._foreach_copy_(self.weights(), originals)  # pyright: ignore[reportPrivateImportUsage]
        configs: dict[int, Any] = {id(module.config): module.config for module in self._models()}
        self._own = [(config, config._attn_implementation) for config in configs.values()]
        self._attend(FOLDED)
        try:
            yield
        finally:
            self._attend(None)

    def _models(self) -> list[Any]:
        """The model and the models inside it, which may have configurations of their own."""
        modules = [*self._model.modules(), *self._stepped.modules()]
        return [module for module in modules if isinstance(module, PreTrainedModel)]

    def _attend(self, name: str | None) -> None:
        """Switch transformers' attention function; None for the model's own."""
        if self._switches:
            for config, own in self._own:
                config._attn_implementation = own if name is None else name

    def _prefilled(self, tokens: Tensor, mask: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [N, heads, L, size] per layer."""
        options: dict[str, Any] = {}
        if mask is not None:
            options["attention_mask"] = mask.long()
            options["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
        if self._few_logits:
            options["logits_to_keep"] = 1
        # without the model's config: with it, layers with a window would drop what lies before the
        # window
        stored: Any = DynamicCache()
        self._model(input_ids=tokens, past_key_values=stored, use_cache=True, **options)
        return [(layer.keys, layer.values) for layer in stored.layers]

    @torch.no_grad()
    def _shape_of_cache(self) -> tuple[int, int, int]:
        """Number of layers, heads of the keys and their size, from a pass over one token."""
        token = torch.zeros(
            1, 1, dtype=torch.int64, device=self._model.get_input_embeddings().weight.device
        )
        stored = self._prefilled(token, None)
        shapes = {tensor.shape for pair in stored for tensor in pair}
        if len(shapes) != 1:
            raise SlotsRefused("its layers store keys and values of several shapes, or none.")
        _, heads, _, size = shapes.pop()
        return len(stored), heads, size


def _refuse_positions(config: Any) -> None:
    """Some rotary embeddings depend on the largest position of the batch, so that rows
    would influence each other.
    """
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    several = [given, *(value for value in given.values() if isinstance(value, dict))]
    kinds = {str(one.get("rope_type", one.get("type", "default"))) for one in several}
    for kind in kinds:
        if "dynamic" in kind or kind == "longrope":
            raise SlotsRefused(f"its {kind} positions depend on the other rows of a batch.")


def _windows(config: Any) -> dict[str, int | None]:
    """Number of tokens that the layers of every kind see; None for all."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        used = window is not None and getattr(config, "use_sliding_window", True)
        return {"sliding_attention": window} if used else {"full_attention": None}
    if unknown := set(kinds) - set(WINDOWS):
        raise SlotsRefused(f"its layers include {', '.join(sorted(unknown))}.")
    return {kind: window if WINDOWS[kind] else None for kind in sorted(set(kinds))}


def _can_switch(model: Any) -> bool:
    """Whether the model looks its attention function up by name; else its own must take
    an additive mask.
    """
    if model._can_set_attn_implementation():
        return True
    own = model.config._attn_implementation
    if own not in ("eager", "sdpa"):
        raise SlotsRefused(
            f'its attention {own!r} takes no such mask; load it with attn_implementation="sdpa".'
        )
    return False


def _copied(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with parameters in another type. Buffers keep theirs: rotary frequencies
    do not survive bfloat16.
    """
    # a whole copy, gradients apart: it is refreshed before every call
    copied = copy.deepcopy(model).requires_grad_(False)
    for parameter in copied.parameters():
        parameter.grad = None
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return copied
