"""Causal models of Hugging Face's transformers, with their cache."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arsm.sequences.heads import Headed
from arsm.sequences.model import SlotModel, SlotsRefused, padded_behind, refuse_parallel

ROUNDING = {2: 0.1, 4: 0.01, 8: 0.01}
"""By the bytes of a weight, the most total variation between two ways of computing one
distribution that counts as rounding (TF32 included); a wrong mask or position gives
more."""
SAME_LOGITS = {2: 1e-2, 4: 1e-4, 8: 1e-9}
"""By the bytes of a logit, the most difference, relative to the largest logit, between
the model's own logits and its head's: the same computation twice."""

COLUMNS = 16
"""Passes over whole sequences read a multiple of so many tokens."""


@dataclass(frozen=True, eq=False)
class CachedPrefixes:
    """The state of `Transformers`."""

    logits: Tensor
    """[N, V]."""
    cache: Any
    """The model's own `past_key_values`."""
    mask: Tensor | None
    """[N, L] bool, true for tokens and false for the padding before them; None where
    all are tokens.
    """


class Transformers:
    """A `Model` from a causal model such as `AutoModelForCausalLM` loads, also with
    PEFT's LoRA or `torch.compile`.

    Prompts of different lengths are padded before their first token: the model gets the
    mask and the positions that it implies. Put the model into eval mode if it has
    dropout: its step by step and one-pass logits must agree.
    """

    def __init__(self, model: nn.Module, *, compiled: bool = False) -> None:
        """Wrap a model.

        Args:
            model: the model.
            compiled: compile a layer of the model, once for all layers, for decoding in
                slots and for the pass with a graph. It takes about a minute in all, at
                the first update, and pays in long runs on a GPU.
        """
        refuse_parallel(model)
        inner: Any = getattr(model, "_orig_mod", model)  # torch.compile and PEFT hide the arguments
        adapter = getattr(inner, "active_peft_config", None)
        if getattr(adapter, "is_prompt_learning", False):
            raise TypeError(
                f"{type(adapter).__name__} puts virtual tokens before the prompt, which decoding "
                "with a cache loses; use an adapter of the layers, such as LoRA."
            )
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        accepted = inspect.signature(inner.forward).parameters
        missing = {"input_ids", "attention_mask", "past_key_values", "use_cache"} - set(accepted)
        if missing:
            raise TypeError(
                "Transformers wraps a causal model of the transformers library, but "
                f"{type(model).__name__} takes no {', '.join(sorted(missing))}; wrap another "
                "module with Recompute."
            )
        self.model = model
        self.compiled = compiled
        self._passed = _with_compiled_layers(model, inner) if compiled else model
        """Computes whole sequences."""
        self.vocabulary = int(inner.get_input_embeddings().num_embeddings)
        self.positions: int | None = getattr(inner.config, "max_position_embeddings", None)
        pad = getattr(inner.config, "pad_token_id", None)
        # a token that also begins texts says nothing about padding
        self.pad_token: int | None = (
            None if pad == getattr(inner.config, "bos_token_id", None) else pad
        )
        self._inner = inner
        self._few_logits = "logits_to_keep" in accepted
        self._takes_positions = "position_ids" in accepted
        # not known before the first pass; hooks inside a compiled model may not be called
        self._has_head: bool | None = False if hasattr(model, "_orig_mod") else None

    def start(self, prompts: Tensor, mask: Tensor | None = None) -> CachedPrefixes:
        if int(prompts.max()) >= self.vocabulary:
            raise ValueError(
                f"prompts hold the token {int(prompts.max())}, but the model's vocabulary is 0 to "
                f"{self.vocabulary - 1}; use the model's own tokenizer."
            )
        out = self._forward(prompts, mask, 1, use_cache=True)
        if out.past_key_values is None:
            raise ValueError(
                "The model returned no cache, as one with gradient checkpointing in training "
                "mode; call model.eval()."
            )
        return CachedPrefixes(out.logits[:, -1], out.past_key_values, mask)

    def step(self, state: CachedPrefixes, tokens: Tensor) -> CachedPrefixes:
        mask = None if state.mask is None else _with_tokens(state.mask, 1)
        out = self._forward(
            tokens.unsqueeze(-1), mask, 1, use_cache=True, past_key_values=state.cache
        )
        return CachedPrefixes(out.logits[:, -1], out.past_key_values, mask)

    def select(self, state: CachedPrefixes, rows: Tensor) -> CachedPrefixes:
        cache = copy.copy(state.cache)
        cache.layers = [_layer_copied(layer) for layer in state.cache.layers]
        cache.reorder_cache(rows)  # indexing copies, so the given state keeps its tensors
        return CachedPrefixes(
            state.logits[rows], cache, None if state.mask is None else state.mask[rows]
        )

    def logits(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        width = tokens.shape[1]
        whole = None if mask is None else _with_tokens(mask, width - 1)
        out = self._forward(torch.cat([prompts, tokens[:, :-1]], -1), whole, width, use_cache=False)
        return out.logits[:, -width:]

    def headed(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Headed | None:
        """The pass up to the model's head, which was compared once with the model's own
        logits; None if they differ.
        """
        head = None if self._has_head is False else self._inner.get_output_embeddings()
        if head is None:
            return None
        entered: list[Tensor] = []

        def keep_last(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor] | None:
            """Take the hidden states, and let the model go on with the last of them alone."""
            if len(arguments) != 1:
                return None
            entered.append(arguments[0])
            return (arguments[0][:, -1:],)

        # Behind the tokens, padding needs no mask: attention is plainly causal, for which there are
        # faster functions, and no position sees nothing at all, whose gradient may be NaN.
        read, state = padded_behind(prompts, tokens, mask)
        read = self._rounded(read)
        hook = head.register_forward_pre_hook(keep_last)
        try:
            own = self._forward(read, None, read.shape[1], use_cache=False).logits
        finally:
            hook.remove()
        after = _after_head(self._inner.config.get_text_config(decoder=True))
        if self._has_head is None:
            self._has_head = len(entered) == 1 and _same(after(head(entered[0][:, -1:])), own)
        if not self._has_head:
            return None
        hidden = entered[0]
        hidden = hidden.gather(1, state.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        return Headed(hidden, lambda hidden: after(head(hidden)), own.shape[-1])

    def _rounded(self, tokens: Tensor) -> Tensor:
        """The tokens [N, L] with padding behind, where a causal model does not see it, so that
        few lengths occur: memory and programs made for one serve many calls.
        """
        width = tokens.shape[1]
        rounded = -(-width // COLUMNS) * COLUMNS
        if self.positions is not None:
            rounded = max(width, min(rounded, self.positions))
        return F.pad(tokens, (0, rounded - width))

    def slots(self, dtype: torch.dtype | None = None) -> SlotModel:
        """The model for decoding in slots, compared with itself on a few tokens; raises
        `SlotsRefused`.

        Args:
            dtype: sample with copies of the weights in this type; None for the weights
                themselves.
        """
        from arsm.sequences.transformers_slots import TransformersSlots

        if not self._takes_positions:
            raise SlotsRefused("it takes no positions.")
        try:
            # the trial is of masks and positions, so it has the weights' own type: what copies in
            # another type differ by is rounding, which nobody refuses
            own = TransformersSlots(self._inner)
            apart = self._distance(own)
            slots = own
            if self.compiled or dtype not in (None, own.dtype):
                slots = TransformersSlots(self._inner, dtype, compile_layers=self.compiled)
        except (SlotsRefused, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise SlotsRefused(f"a trial failed with {type(error).__name__}: {error}") from error
        if not apart <= ROUNDING[own.dtype.itemsize]:
            raise SlotsRefused(
                f"a trial gave other probabilities than the model, {apart:.2g} apart."
            )
        return slots

    @torch.no_grad()
    def _distance(self, slots: SlotModel) -> float:
        """The largest total variation between distributions from slots and from one
        pass, in a small trial.
        """
        device = self._inner.get_input_embeddings().weight.device
        tokens = (torch.arange(10, device=device).view(2, 5) * 7919 + 1) % self.vocabulary
        mask = torch.tensor([[True] * 3, [False, True, True]], device=device)
        later = torch.cat([tokens[:, 3:], tokens[:, :1]], -1)  # the last token is not read
        first = torch.tensor([0, 1], device=device)
        # a caller's autocast would round one side
        with torch.autocast(device.type, enabled=False):
            # not worth a compilation
            plain = Transformers(self.model)
            exact = plain.logits(tokens[:, :3], later, mask)[:, 1:].double().softmax(-1)
            cache = slots.cache(2, 8)
            with slots.decoding():
                slots.fill(cache, tokens[:, :3], mask)
                decode = slots.decoder(cache)
                steps = [decode(tokens[:, t], torch.full_like(first, t), first) for t in (3, 4)]
        return float((torch.stack(steps, 1).double().softmax(-1) - exact).abs().sum(-1).max() / 2)

    def _forward(self, tokens: Tensor, mask: Tensor | None, wanted: int, **options: Any) -> Any:
        """Call the model on the tokens [N, L], whose last `wanted` logits are needed;
        the mask covers the cache too.
        """
        if self._few_logits:
            options["logits_to_keep"] = wanted
        if mask is not None:
            options["attention_mask"] = mask.long()
            if self._takes_positions:
                options["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        if options["use_cache"]:
            return self.model(input_ids=tokens, **options)
        if self._passed.training != self.model.training:
            self._passed.train(self.model.training)
        return self._passed(input_ids=tokens, **options)


def _layer_copied(layer: Any) -> Any:
    """A layer of a cache that may be given other tensors."""
    copied = copy.copy(layer)
    # layers of linear attention hold their states in dictionaries
    vars(copied).update({name: dict(x) for name, x in vars(layer).items() if isinstance(x, dict)})
    return copied


def _with_tokens(mask: Tensor, count: int) -> Tensor:
    return torch.cat([mask, mask.new_ones(mask.shape[0], count)], -1)


def _with_compiled_layers(model: nn.Module, inner: Any) -> nn.Module:
    """The model with the same weights, for passes over whole sequences."""
    from arsm.sequences.transformers_layers import compiled_pass, with_layers_run_by

    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "compiled=True compiles a model's layers, but this model is compiled already; pass it "
            "as it was before torch.compile."
        )
    count = inner.config.get_text_config(decoder=True).num_hidden_layers
    # both have one head, since `headed` takes the hidden states from the model's
    head = inner.get_output_embeddings()
    return with_layers_run_by(compiled_pass, model, count, [] if head is None else [head])


def _after_head(config: Any) -> Callable[[Tensor], Tensor]:
    """The function that some models apply to their head's output."""
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    if cap is not None:
        return lambda logits: torch.tanh(logits / cap) * cap
    factor = getattr(config, "logit_scale", None)  # Cohere
    if factor is not None:
        return lambda logits: logits * factor
    divisor = getattr(config, "logits_scaling", None)  # Granite
    if divisor is not None:
        return lambda logits: logits / divisor
    return lambda logits: logits


@torch.no_grad()
def _same(found: Tensor, own: Tensor) -> bool:
    """Whether two computations of the same logits agree."""
    if found.shape != own.shape:
        return False
    # equal also where both are -inf
    apart = torch.where(found == own, 0, found - own).abs().max()
    largest = own.abs().masked_fill(own == -torch.inf, 0).max()
    return bool(apart <= SAME_LOGITS[own.dtype.itemsize] * largest)
