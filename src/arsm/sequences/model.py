"""The contract of a sequence model, and an adapter for any module from tokens to logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from arsm.checks import describe


class State(Protocol):
    """N prefixes of equal length, ready for their next token; a model adds whatever it caches."""

    @property
    def logits(self) -> Tensor:
        """[N, V]: the logits of the next token, before temperature; -inf masks a token."""
        ...


class Model(Protocol):
    """An autoregressive model: any object with these four methods, an `nn.Module` or not.

    `mask` [N, P] is given only where prompts differ in length; it is true for tokens of
    the prompt. Padding then comes first: the last column is always a token of the
    prompt. A limit on the tokens of prompt and completion together may be stated in an
    attribute `positions`, and the token that pads prompts in `pad_token`: prompts that
    begin with it are then refused without a mask.

    Two more methods save time and memory: `slots(dtype) -> SlotModel`, with copies of
    its weights in that type, or its own for None, or raising `SlotsRefused`; and
    `headed(prompts, tokens, mask) -> Headed | None`, the pass of `logits` up to the
    head, or None if the model cannot be cut there.
    """

    def start(self, prompts: Tensor, mask: Tensor | None = None) -> Any:
        """The state after the prompts [N, P] int64."""
        ...

    def step(self, state: Any, tokens: Tensor) -> Any:
        """The state after one more token per row, [N] int64. It may overwrite the state
        that it was given.
        """
        ...

    def select(self, state: Any, rows: Tensor) -> Any:
        """A copy of some rows [R] int64, repeated, reordered or left out; the given
        state stays as it is.
        """
        ...

    def logits(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """[N, T, V] in one pass, with the graph: `[:, t]` are the logits that tokens[:,
        t] is drawn from.
        """
        ...


class SlotsRefused(Exception):
    """A model cannot be decoded in slots; the message is the reason."""


Decode = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`decode(tokens [S], column [S], first [S]) -> logits [S, V]`: feed one token per row,
stored at its own column.

Row s sees its columns first[s] to column[s]; the position of its token is column -
first.
"""


class SlotModel(Protocol):
    """A model whose rows stand at different positions. All caches are one tensor, so
    that rows can be copied.

    Nothing may depend on the other rows of a batch, and `decode` may not wait for the
    device.
    """

    def cache(self, rows: int, width: int) -> Tensor:
        """Zeros [layers, 2, rows, heads, width, size]: keys and values of `width` columns."""
        ...

    def fill(self, cache: Tensor, tokens: Tensor, mask: Tensor | None) -> None:
        """Store the keys and values of the tokens [N, L] in the first L columns of N
        rows; the mask is [N, L] bool.
        """
        ...

    def decoder(self, cache: Tensor) -> Decode:
        """The step that reads and writes this cache, with the weights where they are now."""
        ...

    def weights(self) -> list[Tensor]:
        """The tensors that `decode` reads: a captured step is valid as long as they
        stay where they are.
        """
        ...

    def decoding(self) -> AbstractContextManager[object]:
        """Entered around all calls of `fill` and `decode`: brings copies of weights up to date."""
        ...


@dataclass(frozen=True, eq=False)
class TokenState:
    """The state of `Recompute`: no cache, only the tokens."""

    logits: Tensor
    """[N, V]."""
    tokens: Tensor
    """[N, L], each row from its first column on."""
    length: Tensor
    """[N]: how many of them count."""


class Recompute:
    """A `Model` from a causal module `module(tokens [N, L]) -> logits [N, L, V]`.

    It computes every prefix anew, which suits tests and small models. Padding is moved
    behind the tokens, where a causal module cannot see it.
    """

    def __init__(self, module: Callable[[Tensor], Tensor]) -> None:
        refuse_parallel(module)
        self.module = module

    def start(self, prompts: Tensor, mask: Tensor | None = None) -> TokenState:
        return self._state(*_pad_behind(prompts, mask))

    def step(self, state: TokenState, tokens: Tensor) -> TokenState:
        # rows have different lengths: the token goes behind each row's own last one
        longer = torch.cat([state.tokens, tokens.unsqueeze(-1)], -1)
        return self._state(
            longer.scatter(-1, state.length.unsqueeze(-1), tokens.unsqueeze(-1)), state.length + 1
        )

    def select(self, state: TokenState, rows: Tensor) -> TokenState:
        return TokenState(state.logits[rows], state.tokens[rows], state.length[rows])

    def logits(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        read, state = padded_behind(prompts, tokens, mask)
        logits = self._call(read)
        return logits.gather(1, state.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))

    def _state(self, tokens: Tensor, length: Tensor) -> TokenState:
        logits = self._call(tokens)
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        return TokenState(logits[rows, length - 1], tokens, length)

    def _call(self, tokens: Tensor) -> Tensor:
        logits = self.module(tokens)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != tokens.shape:
            raise TypeError(
                "Recompute takes a module from tokens [N, L] to logits [N, L, V], but for "
                f"{list(tokens.shape)} it returned {describe(logits)}; wrap a function that "
                "returns the logits alone."
            )
        return logits


def refuse_parallel(module: object) -> None:
    """Refuse a module that synchronises processes: they do not decode in step."""
    module = getattr(module, "_orig_mod", module)  # torch.compile
    if isinstance(module, DistributedDataParallel):
        raise TypeError(
            "The model is wrapped in DistributedDataParallel, which cannot be decoded with; pass "
            "model.module, and average the gradients over the processes after backward."
        )


def module_of(model: object) -> nn.Module | None:
    """The module that a model is, or wraps; None if it cannot be known."""
    wrapped = getattr(model, "module", getattr(model, "model", None))
    for each in (model, wrapped):
        if isinstance(each, nn.Module):
            return each
    return None


def active_dropout(module: nn.Module) -> str | None:
    """The name of a dropout that changes what the module computes; None without any."""
    for name, each in module.named_modules():
        if not each.training:
            continue
        if isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0:
            return name
        # attention often takes its dropout as a number
        for attribute, value in vars(each).items():
            if "dropout" in attribute and isinstance(value, float) and value > 0:
                return f"{name}.{attribute}"
    return None


def _pad_behind(prompts: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The prompts from their first column on, and their lengths [N]."""
    if mask is None:
        return prompts, torch.full_like(prompts[:, 0], prompts.shape[1])
    # a stable sort keeps the tokens' order
    return prompts.gather(-1, (~mask).byte().argsort(dim=-1, stable=True)), mask.sum(-1)


def padded_behind(prompts: Tensor, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """All that a causal model must read for the states of tokens [N, T], with the padding behind,
    where no token sees it: [N, P + T - 1]; and the column [N, T] of every state.
    """
    prompts, length = _pad_behind(prompts, mask)
    # token t of a row stands behind its prompt, wherever that ends
    place = length.unsqueeze(-1) + torch.arange(tokens.shape[-1], device=tokens.device)
    whole = torch.cat([prompts, tokens], -1).scatter(-1, place, tokens)
    # the last token is drawn and never read; a token's state is the column before it
    return whole[:, :-1], place - 1


def pad_before(prompts: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts and mask with the padding moved to the front, as a `Model` gets them."""
    # in front, where the last token of all rows stands in one column
    order = mask.byte().argsort(dim=-1, stable=True)
    return prompts.gather(-1, order), mask.gather(-1, order)


def one_pass(model: Model, prompts: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """`model.logits`, given a mask only where there is one."""
    # a model that never sees padding need not know the argument
    return model.logits(prompts, tokens) if mask is None else model.logits(prompts, tokens, mask)


def begin(model: Model, prompts: Tensor, mask: Tensor | None) -> Any:
    """`model.start`, given a mask only where there is one."""
    return model.start(prompts) if mask is None else model.start(prompts, mask)
