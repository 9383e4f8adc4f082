"""One compiled layer that serves all layers of a model.

A GPU needs a few microseconds per kernel, however few rows it has to work on: 1,300 kernels of a
small model take 4 ms. A compiler makes a third of them, but needs half a minute for a whole model.
All layers are the same program with other weights, so that compiling one of them is enough,
provided that nothing in the program says which layer it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers.cache_utils import Cache

RunLayer: TypeAlias = Callable[..., Any]
"""`run(layer, *args, **kwargs)`: a layer's forward."""


class SplitCache(Cache):
    """A cache whose layers can be had one by one: in each of `alone` the layer has number 0."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self.alone = [Cache(layers=[layer]) for layer in layers]


def with_layers_run_by(
    run: RunLayer, model: nn.Module, count: int, kept: Iterable[nn.Module] = ()
) -> nn.Module:
    """A model with the same weights, whose `count` layers are all run by one function; their
    cache, if they have one, must be a `SplitCache`.

    Args:
        run: the function.
        model: the model, which stays as it is.
        count: its number of layers.
        kept: modules that both models share.
    """
    # what the copy finds here it takes as it is
    shared: list[Any] = [*model.parameters(), *model.buffers(), *kept]
    twin = copy.deepcopy(model, {id(each): each for each in shared})
    layers = _layers(twin, count)
    for module in layers.modules():
        # every layer finds its cache at number 0: with its own it would be another program
        if isinstance(getattr(module, "layer_idx", None), int):
            vars(module)["layer_idx"] = 0
    for number, layer in enumerate(layers):
        vars(layer)["forward"] = _OwnForward(run, layer, number)
    return twin


def _layers(model: nn.Module, count: int) -> nn.ModuleList:
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    found = [each for each in lists if len(each) == count]
    if len(found) != 1:
        raise ValueError(
            f"compiled=True needs a model with one list of {count} layers, but "
            f"{type(model).__name__} has {len(found)}; leave compiled=True out."
        )
    return found[0]


class _OwnForward:
    """The forward of one layer, which gets its own part of the cache.

    An object and not a closure, so that a deep copy of the model runs its own layers.
    """

    def __init__(self, run: RunLayer, layer: nn.Module, number: int) -> None:
        self.run = run
        self.layer = layer
        self.number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = {name: self._own(each) for name, each in kwargs.items()}
        return self.run(self.layer, *map(self._own, args), **own)

    def _own(self, argument: Any) -> Any:
        return argument.alone[self.number] if isinstance(argument, SplitCache) else argument


def one_token(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer in a step of the slots."""
    # the class's forward, as the instance's own calls this function
    return type(layer).forward(layer, *args, **kwargs)


# The same again under two names: a function has a program per kind of arguments (with and without a
# mask, lengths that are a multiple of 8 and others), tries them one after the other at every call,
# and is not compiled any more when there are more than eight.


def pass_with_graph(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer for a gradient."""
    return type(layer).forward(layer, *args, **kwargs)


def pass_without_graph(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer for logits alone."""
    return type(layer).forward(layer, *args, **kwargs)


def compiled_step(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer in a step of the slots, compiled."""
    return compiled(one_token)(layer, *args, **kwargs)


def compiled_pass(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer over whole sequences, compiled."""
    run = pass_with_graph if torch.is_grad_enabled() else pass_without_graph
    return compiled(run)(layer, *args, **kwargs)


@cache
def compiled(run: RunLayer) -> RunLayer:
    """The function compiled, once per process: every model with layers of the same kind uses it."""
    # for any number of rows and columns, as slots shrink and micro-batches differ
    return torch.compile(run, dynamic=True)
