"""Policies that play: from observations to logits and actions, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from arsm.checks import describe
from arsm.noise import RESOLUTION
from arsm.rl.environment import Array
from arsm.rl.spaces import exists

# as arrays, which NumPy takes faster than Python's numbers
ZERO = np.array(0.0)
UNITS = np.array(1 / RESOLUTION)
FEW_ROWS = 64


class Policy(Protocol):
    """Plays: observations [N, D] with the masks [N, K C] behind them, where there are masks."""

    @property
    def choices(self) -> tuple[int, ...]:
        """The number of categories of each of the K actions; C is the largest."""
        ...

    def logits(self, observations: Array) -> Array:
        """[N, K, C] float64; -inf where an action is masked."""
        ...


def act(logits: Array, noise: Array) -> Array:
    """argmin_i (a_i - phi_i), in units of the race's resolution: logits and noise [N,
    K, C] -> [N, K].
    """
    top = logits[..., :1]
    for c in range(1, logits.shape[-1]):  # for the few actions there are, faster than a reduction
        top = np.maximum(top, logits[..., c : c + 1])
    phi = logits - top
    phi *= UNITS  # the race's clamp below 2^11 is left out: nobody wins from there
    np.rint(phi, out=phi)
    return (noise - phi).argmin(-1)


def allowed(observations: Array, inputs: int, choices: Sequence[int]) -> Array | None:
    """[K, C] or [N, K, C]: the actions that exist and that no mask behind the
    observations' inputs forbids.
    """
    if observations.shape[1] > inputs:
        # masks travel behind the observations, so that one array goes to every process
        return observations[:, inputs:].reshape(len(observations), len(choices), -1) > 0
    return None if min(choices) == max(choices) else exists(choices)


@dataclass(frozen=True, eq=False)
class Perceptron:
    """An MLP with ReLUs; several agents have one each, or share one."""

    layers: tuple[tuple[Array, Array], ...]
    """(weight [in, out], bias [out]) each, float64; of agents with networks of their
    own [agents, in, out] and [agents, 1, out]."""
    choices: tuple[int, ...]
    agents: int = 1

    def logits(self, observations: Array) -> Array:
        inputs = self.agents * self.layers[0][0].shape[-2]
        rows = len(observations)
        masks = allowed(observations, inputs, self.choices)
        x = observations[:, :inputs].reshape(rows * self.agents, -1)
        if self.layers[0][0].ndim == 3:
            # agents first: one batched product instead of one per agent
            x = self._separately(x.reshape(rows, self.agents, -1).swapaxes(0, 1)).swapaxes(0, 1)
        else:
            x = self._together(x)
        x = x.reshape(rows, len(self.choices), -1)
        return x if masks is None else np.where(masks, x, -np.inf)

    def _together(self, x: Array) -> Array:
        rows = len(x)
        few = rows <= FEW_ROWS
        layers = self._repeated if few else self.layers
        for weight, bias in layers[:-1]:
            x = x.dot(weight)
            x += bias[:rows] if few else bias
            np.maximum(x, ZERO, out=x)
        weight, bias = layers[-1]
        x = x.dot(weight)
        x += bias[:rows] if few else bias
        return x

    def _separately(self, x: Array) -> Array:
        for weight, bias in self.layers[:-1]:
            x = np.maximum(x @ weight + bias, ZERO)
        weight, bias = self.layers[-1]
        return x @ weight + bias

    @cached_property
    def _repeated(self) -> tuple[tuple[Array, Array], ...]:
        """The layers with a bias for every row of a small batch: arrays of one shape
        add up in half the time.
        """
        return tuple((weight, np.repeat(bias[None], FEW_ROWS, 0)) for weight, bias in self.layers)


@dataclass(frozen=True, eq=False)
class ModulePolicy:
    """Any PyTorch module from observations [N, *shape] to outputs of K C numbers per
    row, on the module's device.
    """

    module: nn.Module
    shape: tuple[int, ...]
    choices: tuple[int, ...]

    @torch.no_grad()
    def logits(self, observations: Array) -> Array:
        inputs = int(np.prod(self.shape))
        logits = self.outputs(torch.from_numpy(observations[:, :inputs])).cpu().numpy()
        masks = allowed(observations, inputs, self.choices)
        return logits if masks is None else np.where(masks, logits, -np.inf)

    def outputs(self, observations: Tensor) -> Tensor:
        """With the graph and without masks: [N, D] -> [N, K, C] float64."""
        # the module's own type and device
        seen = observations.reshape(-1, *self.shape).to(next(self.module.parameters()))
        outputs = self.module(seen)
        size = len(self.choices) * max(self.choices)
        # a wrong size would be reshaped into nonsense
        if not isinstance(outputs, Tensor) or outputs.numel() != len(seen) * size:
            raise ValueError(
                f"The policy must give {size} logits per observation for the actions "
                f"{list(self.choices)}, but for {len(seen)} observations it gave "
                f"{describe(outputs)}."
            )
        return outputs.double().reshape(len(seen), len(self.choices), -1)
