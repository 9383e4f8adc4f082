"""Agents in files: written whole or not at all, read without running code, refused in
one sentence.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arsm.estimators import NAMES
from arsm.rl.credit import ActionConditioned, Value
from arsm.rl.settings import Settings

if TYPE_CHECKING:
    from arsm.rl.agent import PolicyGradient

KNOWN: dict[str, Any] = {
    kind.__name__: kind for kind in (*NAMES.values(), Value, ActionConditioned)
}
PLAIN = (int, float, str, bool, type(None))
UNHELD = ("encoder", "snapshot", "policy")
"""Arguments that a file cannot hold."""


def save(agent: PolicyGradient, path: str | os.PathLike[str]) -> None:
    """Write an agent."""
    content = {
        "agent": agent.description(),
        "arguments": agent.arguments(),
        "state": agent.state_dict(),
    }
    with written_whole(check_place(path)) as beside:
        torch.save(content, beside)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of this one when it is complete."""
    # in the same folder, as a file can only be replaced within a disk
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def check_place(path: str | os.PathLike[str]) -> Path:
    """Refuse a path at which no file can be written."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"There is no folder {path.parent} to write {path.name} into; make it first."
        )
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it, such as agent.pt.")
    return path


def load_agent(agent: PolicyGradient, path: str | os.PathLike[str]) -> None:
    """Read a file into an agent like the one that wrote it."""
    saved = _read(path)
    mine = agent.description()
    # before anything is set: the sentence names what differs
    if saved["agent"] != mine:
        differ = ", ".join(
            f"{key} ({saved['agent'].get(key)})"
            for key in mine
            if saved["agent"].get(key) != mine[key]
        )
        raise ValueError(f"{path} holds an agent with another {differ}; make this one like it.")
    try:
        agent.load_state_dict(saved["state"])
    except Exception as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged ({why}); the agent is as it was before.") from error


def make(
    kind: type[PolicyGradient], path: str | os.PathLike[str], given: dict[str, Any]
) -> PolicyGradient:
    """The agent that a file holds."""
    saved = dict(_read(path)["arguments"])
    # functions and modules would have to be pickled, and reading them would run code
    missing = [name for name in UNHELD if saved.pop(name) and name not in given]
    if saved["environment"] is None and "environment" not in given:
        missing.insert(0, "environment")
    words = saved.pop("credit")
    if "credit" not in given:
        if words is None:
            missing.append("credit")
        else:
            saved["credit"] = _out_of_words(words)
    if missing:
        raise ValueError(
            f"{path} cannot hold the agent's {' and '.join(missing)}; give the same as when it was "
            "made."
        )
    settings = saved.pop("settings")
    saved["settings"] = Settings(**{**settings, "hidden": tuple(settings["hidden"])})
    # what the caller gives comes before what the file has
    agent = kind(**{**saved, **given})
    try:
        load_agent(agent, path)
    except Exception:
        # its workers would otherwise outlive the error
        agent.close()
        raise
    return agent


def describe_credit(credit: Any) -> dict[str, Any] | None:
    """The class and options of an estimator, or of other credit, if a file can hold them."""
    kind = type(credit)
    # a user's class of the same name is another one
    if not dataclasses.is_dataclass(credit) or KNOWN.get(kind.__name__) is not kind:
        return None
    values = {each.name: vars(credit)[each.name] for each in dataclasses.fields(kind) if each.init}
    options = {
        name: value if isinstance(value, PLAIN) else describe_credit(value)
        for name, value in values.items()
    }
    plain = all(options[name] is not None or value is None for name, value in values.items())
    return {"kind": kind.__name__, "options": options} if plain else None


def _out_of_words(words: dict[str, Any]) -> Any:
    options = {
        name: _out_of_words(x) if isinstance(x, dict) else x for name, x in words["options"].items()
    }
    return KNOWN[words["kind"]](**options)


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"There is no file {Path(path).resolve()}; PolicyGradient.save writes one."
        )
    content = Path(path).read_bytes()
    try:
        # weights only: a file from elsewhere must not run code
        saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # among others an OSError for a file that was cut off
        raise ValueError(
            f"{path} was not written by PolicyGradient.save, or is damaged."
        ) from error
    if not isinstance(saved, dict) or not {"agent", "arguments", "state"} <= saved.keys():
        raise ValueError(f"{path} was not written by PolicyGradient.save.")
    if "credit" not in saved["arguments"]:
        raise ValueError(
            f"{path} was written by an earlier version of arsm; train the agent again."
        )
    return saved
