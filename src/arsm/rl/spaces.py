"""Inputs and outputs of a policy: observations as vectors, actions as categories, masks
as arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from arsm.rl.environment import Array

Encoder = Callable[[Any], Any]
"""Makes an array, or numbers for one, of an observation."""


# ---------------------------------------------------------------- observations


def encoded_shape(space: spaces.Space[Any]) -> tuple[int, ...] | None:
    """The shape of an encoded observation: a Box keeps its own, all others are vectors;
    None without an encoding.
    """
    if isinstance(space, spaces.Box):
        return space.shape or (1,)
    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    if isinstance(space, spaces.MultiBinary):
        return (math.prod(space.shape),)
    if isinstance(space, spaces.MultiDiscrete):
        return (int(space.nvec.sum()),)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        # text has no encoding of its own, and seldom says what the rest does not
        shapes = [encoded_shape(part) for part in _parts(space) if not _is_text(part)]
        if shapes and all(shape is not None for shape in shapes):
            return (sum(math.prod(shape) for shape in shapes if shape is not None),)
    return None


def is_bytes(space: spaces.Space[Any]) -> bool:
    """Whether observations are images or memory."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8


def encode(space: spaces.Space[Any], seen: Any) -> Array:
    """An observation of this space as a vector [D].

    Numbers stay as they are, but for bytes (images, RAM), which are divided by 255.
    Discrete and MultiDiscrete become one-hot vectors. Dict and Tuple are joined; the
    text in them, such as MiniGrid's mission, is left out.
    """
    if isinstance(space, spaces.Box):
        vector = np.asarray(seen, dtype=np.float64).reshape(-1)
        # a network's weights are made for numbers about 1
        return vector / 255 if is_bytes(space) else vector
    if isinstance(space, spaces.Discrete):
        vector = np.zeros(int(space.n))
        category = int(seen) - int(space.start)
        # NumPy would take -1 for the last category
        if not 0 <= category < len(vector):
            raise ValueError(
                f"the observation {seen} lies outside its space of {len(vector)} values"
            )
        vector[category] = 1.0
        return vector
    if isinstance(space, spaces.MultiDiscrete):
        return _one_hot((np.asarray(seen) - space.start).reshape(-1), space.nvec.reshape(-1))
    if isinstance(space, spaces.MultiBinary):
        return np.asarray(seen, dtype=np.float64).reshape(-1)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        values = (
            [seen[key] for key in space.spaces] if isinstance(space, spaces.Dict) else list(seen)
        )
        pairs = zip(_parts(space), values, strict=True)
        return np.concatenate([encode(part, value) for part, value in pairs if not _is_text(part)])
    raise TypeError(f"An observation of {space} has no encoding.")


def _parts(space: spaces.Dict | spaces.Tuple) -> list[spaces.Space[Any]]:
    return list(space.spaces.values()) if isinstance(space, spaces.Dict) else list(space.spaces)


def _is_text(space: spaces.Space[Any]) -> bool:
    return space.dtype is not None and space.dtype.kind == "U"


def _one_hot(categories: Array, sizes: Array) -> Array:
    # one too large would be the next variable's category
    if np.any((categories < 0) | (categories >= sizes)):
        raise ValueError(
            f"the observation {categories.tolist()} lies outside its space of {sizes.tolist()} "
            "values"
        )
    vector = np.zeros(int(sizes.sum()))
    vector[np.cumsum(sizes) - sizes + categories] = 1.0
    return vector


# ---------------------------------------------------------------- actions


def categories_of_actions(space: spaces.Space[Any], name: str) -> tuple[Array, tuple[int, ...]]:
    """The numbers of the first actions, [] or [K], and how many categories each of the
    K actions has.
    """
    if isinstance(space, spaces.Discrete):
        return np.array(space.start), (int(space.n),)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return np.asarray(space.start), tuple(int(n) for n in space.nvec)
    if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
        return np.zeros(space.shape[0], dtype=np.int64), (2,) * space.shape[0]
    if isinstance(space, spaces.Box):
        raise ValueError(
            f"{name} has continuous actions {space}, but a policy chooses among categories; give "
            "every number a few levels with gymnasium.wrappers.TransformAction and a "
            "MultiDiscrete action space."
        )
    raise ValueError(
        f"{name} has actions {space}, but a policy chooses Discrete ones, or MultiDiscrete or "
        "MultiBinary ones of one dimension; flatten others with "
        "gymnasium.wrappers.TransformAction."
    )


def full_mask(mask: Any, choices: Sequence[int]) -> Array:
    """An action mask as an array [K C] of 0 and 1: from [C] or, with several actions,
    [n_1 + ... + n_K] or K arrays.

    Categories that an action does not have are 0.
    """
    flat = (
        np.concatenate([np.asarray(part).reshape(-1) for part in mask])
        if isinstance(mask, tuple)
        else mask
    )
    flat = np.asarray(flat).reshape(-1)
    if flat.shape != (sum(choices),) or not np.isin(flat, (0, 1)).all():
        raise ValueError(f"an action mask must be {sum(choices)} values of 0 or 1, but is {mask!r}")
    full = np.zeros((len(choices), max(choices)))
    # row by row, which is the order of the flat mask
    full[exists(choices)] = flat
    # a softmax over nothing is NaN
    if not full.any(1).all():
        raise ValueError("an action mask allows no action")
    return full.reshape(-1)


def exists(choices: Sequence[int]) -> Array:
    """[K, C]: whether an action has this category."""
    return np.arange(max(choices)) < np.array(choices)[:, None]
