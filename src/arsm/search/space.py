"""The space of a search: numbered variables, or named ones with values of any kind,
some of which exist only for some values of others.

Inside the search a point is a tuple of category numbers. A variable that does not exist
at a point has the number 0 there, so that each point has one tuple.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arsm.rows import whole_sizes

Point = tuple[int, ...]
"""One category number per variable."""
Settings = Tensor | dict[str, Any]
"""A point as users see it: int64 [K], or the values by name."""


class When:
    """Values of a variable that exists for some values of other variables only.

        {"optimiser": ["sgd", "adam"], "momentum": arsm.When([0.0, 0.9], optimiser="sgd")}

    Args:
        values: the values to choose from.
        conditions: the variables on which it depends, each with the value for which it
            exists, or a list of them. All conditions must hold; the variables must come
            earlier in the space.
    """

    def __init__(self, values: Sequence[Any], /, **conditions: Any) -> None:
        if not conditions:
            raise ValueError(
                'arsm.When needs a condition, as in arsm.When([0.0, 0.9], optimiser="sgd").'
            )
        self.values = values
        self.conditions = conditions

    def __repr__(self) -> str:
        conditions = ", ".join(f"{name}={value!r}" for name, value in self.conditions.items())
        return f"When({self.values!r}, {conditions})"


@dataclass(frozen=True)
class Space:
    """K variables with `sizes[k]` categories each."""

    sizes: list[int]
    names: list[str] | None
    """None: the points are tensors of category numbers."""
    values: list[list[Any]]
    """The values of each named variable."""
    conditions: list[dict[int, frozenset[int]]]
    """For each variable: {earlier variable: its categories for which this one exists}."""

    @property
    def conditional(self) -> bool:
        """Whether any variable depends on another."""
        return any(self.conditions)

    @property
    def words(self) -> list[list[str]]:
        """Names, values and conditions of named variables, by which a saved search finds
        its own space again.
        """
        if self.names is None:
            return []
        found = []
        for name, values, needed in zip(self.names, self.values, self.conditions, strict=True):
            conditions = sorted((j, sorted(known)) for j, known in needed.items())
            found.append([name, *map(_lasting_word, values), str(conditions)])
        return found

    def active(self, point: Point) -> list[bool]:
        """Whether each variable exists at a point; one whose condition does not exist does not."""
        exists: list[bool] = []
        # conditions name earlier variables only, of which this is already known
        for needed in self.conditions:
            exists.append(all(exists[j] and point[j] in known for j, known in needed.items()))
        return exists

    def canonical(self, point: Point) -> Point:
        """The point with the number 0 for every variable that does not exist there."""
        if not self.conditional:
            return point
        active = self.active(point)
        return tuple(z if exists else 0 for z, exists in zip(point, active, strict=True))

    def settings(self, point: Point) -> Settings:
        """The point as users see it."""
        if self.names is None:
            return torch.tensor(point, dtype=torch.int64)
        rows = zip(self.names, self.values, point, self.active(point), strict=True)
        return {name: values[category] for name, values, category, exists in rows if exists}

    def point(self, settings: Any) -> Point:
        """The point that a user's settings stand for."""
        if self.names is None:
            return self._numbered_point(settings)
        return self._named_point(self.names, settings)

    def _numbered_point(self, settings: Any) -> Point:
        found = torch.as_tensor(settings)
        if found.shape != (len(self.sizes),) or found.is_floating_point():
            raise ValueError(
                f"a point must be {len(self.sizes)} whole numbers, but is {settings!r}."
            )
        point = tuple(found.tolist())
        if not all(0 <= z < size for z, size in zip(point, self.sizes, strict=True)):
            raise ValueError(f"{list(point)} is no point of a space of sizes {self.sizes}.")
        return point

    def _named_point(self, names: list[str], settings: Any) -> Point:
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"a point of a named space must be a dict of values, but is {settings!r}."
            )
        unknown = set(settings) - set(names)
        if unknown:
            raise ValueError(f"the space has no variable {', '.join(map(repr, sorted(unknown)))}.")
        numbers = []
        for name, values in zip(names, self.values, strict=True):
            numbers.append(place(values, settings[name], name) if name in settings else 0)
        point = self.canonical(tuple(numbers))
        # only now is it known which variables exist, and must have a value
        for name, exists in zip(names, self.active(point), strict=True):
            if exists and name not in settings:
                raise ValueError(f'the point {dict(settings)!r} has no value of "{name}".')
        return point

    def describe(self, point: Point) -> str:
        """The point in one line."""
        settings = self.settings(point)
        if isinstance(settings, Tensor):
            return str(settings.tolist())
        return ", ".join(f"{name}={_word(value)}" for name, value in settings.items())


def read_space(space: Sequence[int] | Mapping[str, Any]) -> Space:
    """The space that a user described: sizes, or values by name."""
    if not isinstance(space, Mapping):
        sizes = whole_sizes(space)
        return Space(sizes, None, [], [{} for _ in sizes])
    if not space:
        raise ValueError("the space has no variables.")
    names: list[str] = []
    values: list[list[Any]] = []
    conditions = []
    for name, given in space.items():
        if not isinstance(name, str):
            raise ValueError(f"names of variables must be words, but one is {name!r}.")
        choices = given
        needed = {}
        if isinstance(given, When):
            choices = given.values
            needed = given.conditions
        values.append(_listed(name, choices))
        # before its own name is added: a variable cannot depend on itself
        conditions.append(_conditions(name, needed, names, values))
        names.append(name)
    return Space([len(each) for each in values], names, values, conditions)


def _conditions(
    name: str, needed: dict[str, Any], earlier: list[str], values: list[list[Any]]
) -> dict[int, frozenset[int]]:
    """Conditions by the numbers of the variables and of their values."""
    found = {}
    for other, wanted in needed.items():
        if other not in earlier:
            raise ValueError(
                f'"{name}" depends on "{other}", which must be a variable that comes before it.'
            )
        j = earlier.index(other)
        some = wanted if isinstance(wanted, list | tuple | set | frozenset) else [wanted]
        found[j] = frozenset(place(values[j], value, other) for value in some)
    return found


def _listed(name: str, values: Any) -> list[Any]:
    # a word is a sequence of letters, and a dict one of its keys: neither was meant
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise ValueError(
            f'the values of "{name}" must be a list, as in [2, 4, 8], but are {values!r}.'
        )
    listed = list(values)
    if not listed:
        raise ValueError(f'"{name}" needs at least one value.')
    # a point that is told by its values is the first with them: the second would stay unknown
    if _has_twice(listed):
        raise ValueError(f'"{name}" has a value twice; list every value once.')
    return listed


def _has_twice(values: list[Any]) -> bool:
    try:
        # with their types: 1, 1.0 and True are three values
        return len({(type(value), value) for value in values}) < len(values)
    except TypeError:  # lists and arrays have no hash
        return any(place(values, value, "") != i for i, value in enumerate(values))


def place(values: list[Any], value: Any, name: str) -> int:
    """The number of a value; 1, 1.0 and True are told apart where the list has several of them."""
    # of the same type first
    for i, known in enumerate(values):
        if known is value or (type(known) is type(value) and _equal(known, value)):
            return i
    # a NumPy number, or 1 where the list has 1.0
    for i, known in enumerate(values):
        if _equal(known, value):
            return i
    raise ValueError(f'{value!r} is no value of "{name}", which has {values!r}.')


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are equal; arrays, whose == is no single answer, are not."""
    try:
        return bool(a == b)
    except (ValueError, RuntimeError, TypeError):
        return False


def _lasting_word(value: Any) -> str:
    """A value in a word that is the same in every process."""
    # the words of most other objects are their addresses
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    return str(getattr(value, "__name__", type(value).__name__))


def _word(value: Any) -> str:
    """A value in one word: classes and functions by their names."""
    return str(value.__name__) if hasattr(value, "__name__") else str(value)
