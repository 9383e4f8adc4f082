"""Options by name: a misspelt one is answered with the one that was meant."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def suggests(name: str) -> Callable[[Function], Function]:
    """Decorate a function or a constructor: an option that it does not have, or one
    without its name, is refused in one sentence.

    Args:
        name: the function's name, as its users write it.
    """

    def decorate(function: Function) -> Function:
        # once, at import: inspecting a signature is slow
        known = options_of(function)
        first = positions_of(function)

        @functools.wraps(function)
        def checked(*arguments: Any, **options: Any) -> Any:
            for option in options:
                if option not in known:
                    raise TypeError(no_such_option(name, option, known))
            if first is not None and len(arguments) > len(first):
                raise TypeError(too_many_positions(name, len(arguments), first, known))
            return function(*arguments, **options)

        return checked  # pyright: ignore[reportReturnType]

    return decorate


def options_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names that a function takes, in its order."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind in named and each.name != "self")


def positions_of(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names that may be given by position; None if a `*context` takes any number."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters):
        return None
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(each.name for each in parameters if each.kind in by_position)


def too_many_positions(name: str, given: int, first: Sequence[str], known: Sequence[str]) -> str:
    """The sentence for options that were given without their names."""
    # a constructor's first argument is the object itself, which no user gives
    own = first[:1] == ("self",)
    words = " and ".join(first[own:])
    named = next((each for each in known if each not in first), None)
    mend = f"; give the others by name, as in {named}=..." if named else "."
    return f"{name} takes {words} by position, but got {given - own} arguments{mend}"


def check_class_options(kind: type, options: Mapping[str, Any]) -> None:
    """Refuse options that a dataclass does not have; another class checks its own."""
    if not options or not dataclasses.is_dataclass(kind):
        return
    fields = kind.__dataclass_fields__
    for option in options:
        if option not in fields or not fields[option].init:
            known = [name for name, field in fields.items() if field.init]
            raise TypeError(no_such_option(kind.__name__, option, known))


def no_such_option(owner: str, option: str, known: Iterable[str]) -> str:
    """The sentence for an option that does not exist."""
    names = list(known)
    meant = closest(option, names)
    if meant is not None:
        return f'{owner} has no option "{option}"; did you mean "{meant}"?'
    # what users of other libraries try first
    if option == "seed" and "generator" in names:
        made = "generator=torch.Generator(device).manual_seed(0)"
        return f'{owner} has no option "seed"; give it {made}.'
    if not names:
        return f'{owner} has no option "{option}"; it has no options at all.'
    return f'{owner} has no option "{option}"; its options are {", ".join(names)}.'


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, if there is one."""
    return next(iter(difflib.get_close_matches(word, list(known), 1)), None)
