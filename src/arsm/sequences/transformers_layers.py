"""One compiled layer for all layers of a model in slots.

A step of many small kernels takes as long as their number says, whatever the rows. A compiler
makes a third of them out of a layer, and takes seconds for one layer but half a minute for a
whole model. All layers are the same program with other weights, so that one is enough, if
nothing in it tells which of them it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache


class SplitCache(Cache):
    """A cache whose layers can be had one by one: in each of `alone` the layer has number 0."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self.alone = [Cache(layers=[layer]) for layer in layers]


def with_compiled_layers(
    model: nn.Module, count: int, compiled: Callable[..., Any]
) -> nn.Module | None:
    """The model with the same weights, whose layers all run as one compiled function; None if
    its layers are not to be found.
    """
    # the weights themselves, not copies
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    twin = copy.deepcopy(model, shared)
    layers = _layers(twin, count)
    if layers is None:
        return None
    for module in layers.modules():
        # every layer finds its cache at number 0, or each would be compiled for its own number
        if isinstance(getattr(module, "layer_idx", None), int):
            vars(module)["layer_idx"] = 0
    for number, layer in enumerate(layers):
        layer.forward = _alone(compiled, layer, number)  # pyright: ignore[reportAttributeAccessIssue]
    return twin


def _layers(model: nn.Module, count: int) -> nn.ModuleList | None:
    """The only list of `count` modules."""
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    return lists[0] if len(lists) == 1 else None


def _alone(compiled: Callable[..., Any], layer: nn.Module, number: int) -> Callable[..., Any]:
    """The compiled forward of a layer, with its own part of the cache."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_part(each, number) for each in args)
        kwargs = {name: _part(each, number) for name, each in kwargs.items()}
        return compiled(layer, *args, **kwargs)

    return forward


def _part(argument: Any, number: int) -> Any:
    return argument.alone[number] if isinstance(argument, SplitCache) else argument


def _step(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # past the instance's own `forward`, which calls this function
    return type(layer).forward(layer, *args, **kwargs)


def _pass(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


# Two functions, as a compiled one tries all that it was compiled for at every call. Any number of
# rows and columns: the slots shrink as sequences end.
compiled_step = torch.compile(_step, dynamic=True)
compiled_pass = torch.compile(_pass, dynamic=True)
