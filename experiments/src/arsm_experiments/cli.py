"""The `arsm` command."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import re
import shlex
import sys
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import arsm
from arsm.options import closest

if TYPE_CHECKING:
    from rich.console import Console


class Command(Protocol):
    """A documented dataclass whose fields are the command's options."""

    def check(self) -> None:
        """Raise ValueError or TypeError, in one sentence, for options that cannot run."""

    def run(self, console: Console) -> None:
        """Run it; raise RunError, in one sentence, for a problem that the user can fix."""


@runtime_checkable
class Experiment(Command, Protocol):
    """A command that writes run folders."""

    experiment: ClassVar[str]
    """Its folder under the root."""

    def runs(self) -> dict[Path, dict[str, Any]]:
        """Its run folders, each with the settings that determine its results."""
        ...


class Refusal(Exception):
    """A command line that cannot be understood, with one sentence that says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 if done, 2 for invalid options, 130 if interrupted, 141 if its
    output is closed.
    """
    try:
        try:
            return run(sys.argv[1:] if arguments is None else list(arguments))
        finally:  # --help exits
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as head has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def run(arguments: list[str]) -> int:
    """As `main`, for these words."""
    command = None
    try:
        command = parse(arguments)
        if command is not None:
            execute(command)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"Interrupted.{how_to_go_on(command, arguments)}", file=sys.stderr)
        return 130
    return 0


def commands() -> dict[str, type[Command]]:
    """All commands by their names."""
    from arsm_experiments.archive import Archive
    from arsm_experiments.compare import Compare
    from arsm_experiments.conditional import Conditional
    from arsm_experiments.control import Control
    from arsm_experiments.demo.command import Demo
    from arsm_experiments.report.command import Report
    from arsm_experiments.reproduce import Reproduce
    from arsm_experiments.sequences.command import Sequences
    from arsm_experiments.toy import Toy
    from arsm_experiments.vae import Vae

    return {
        "demo": Demo,
        "toy": Toy,
        "vae": Vae,
        "conditional": Conditional,
        "control": Control,
        "sequences": Sequences,
        "compare": Compare,
        "reproduce": Reproduce,
        "report": Report,
        "archive": Archive,
    }


def parse(arguments: Sequence[str]) -> Command | None:
    """The command that these words describe; None if they ask for the version or for help, which is
    printed.
    """
    if arguments[:1] == ["--version"]:
        print(f"arsm {arsm.__version__}")
        return None
    try:
        import tyro

        known = commands()
    except ModuleNotFoundError as missing:
        sentence = (
            f"The command line needs {missing.name}; install it with `pip install "
            "arsm-experiments`."
        )
        if missing.name == "fcntl":
            sentence = (
                "The command line needs Linux or macOS; the library itself, `import arsm`, does "
                "not."
            )
        raise Refusal(sentence) from None
    if not arguments:
        raise Refusal(f"Name a command: {', '.join(known)}; `arsm --help` explains them.")
    name, *words = arguments
    if name in ("-h", "--help", "help"):
        print(overview(known))
        return None
    if name not in known:
        raise Refusal(f'There is no command "{name}"{hint(name, known)}')
    if {"-h", "--help"} & set(words):
        print(wrapped(inspect.getdoc(known[name]) or "") + "\n")  # tyro would not wrap its lines
    as_typed = (tyro.conf.FlagCreatePairsOff,)
    said = io.StringIO()
    try:
        # tyro answers a value that it cannot read with a box of several lines
        with contextlib.redirect_stderr(said):
            command, unknown = tyro.cli(
                known[name],
                prog=f"arsm {name}",
                description="",
                args=words,
                config=as_typed,
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise Refusal(unreadable(known[name], words, said.getvalue())) from None
    if unknown:
        flags = [flag(key, value is not True) for key, value in options(known[name]()).items()]
        word = unknown[0].partition("=")[0]
        raise Refusal(f'"arsm {name}" has no option "{word}"{hint(word, flags)}')
    return command


def unreadable(command: type[Command], words: Sequence[str], said: str) -> str:
    """One sentence for a value that has another type than its option.

    Args:
        said: tyro's message, which names the option.
    """
    named = re.search(r"--[a-z][a-z-]*", said)
    if named is None:
        return " ".join(re.sub(r"[─│╭╮╰╯]", " ", said).split())
    option = named[0]
    kind = types_of(command)[option.removeprefix("--").replace("-", "_")]
    *others, last = alternatives(kind)
    wanted = f"{', '.join(others)} or {last}" if others else last
    given = re.search(rf"{option}[ =]+(?!--)(.+?)(?= --|$)", " ".join(words))
    explained = f"; `arsm {command.__name__.lower()} --help` explains it."
    if given is None:
        return f"{option} needs a value, {wanted}{explained}"
    if typing.get_origin(kind) is tuple:
        return f"Each value of {option} must be {wanted}, but got {given[1]}{explained}"
    return f"{option} must be {wanted}, but is {given[1]}{explained}"


def types_of(command: type[Any]) -> dict[str, Any]:
    """The types of a command's options by name, including those in groups."""
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(command).items():
        grouped = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        found |= types_of(kind) if grouped else {name: kind}
    return found


def alternatives(kind: Any) -> list[str]:
    """The values that a type allows, in words: ["printed", "scaled", "a number"]."""
    plain = {int: "a whole number", float: "a number", Path: "a path", str: "a word"}
    if kind in plain:
        return [plain[kind]]
    inside = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return [str(value) for value in inside]
    # a tuple's values or a union's types
    return [word for each in inside if each not in (type(None), ...) for word in alternatives(each)]


def execute(command: Command) -> None:
    """Check and run it."""
    from rich.console import Console

    from arsm_experiments.runs.files import RunError

    # only one of several processes prints
    console = Console(quiet=os.environ.get("RANK", "0") != "0")
    try:
        command.check()
    except (ValueError, TypeError) as error:
        raise Refusal(str(error)) from None
    try:
        command.run(console)
        if isinstance(command, Experiment):
            print_tables(console, command)
    except (RunError, FloatingPointError, ValueError, OSError) as error:
        raise Refusal(str(error)) from None


def print_tables(console: Console, experiment: Experiment) -> None:
    """Print the results of an experiment's runs."""
    from arsm_experiments.report.chapters import make_chapters
    from arsm_experiments.report.sections import print_results
    from arsm_experiments.runs.reader import read_run

    folders = list(experiment.runs())
    # a comparison has printed its own tables, which fit 80 columns
    shown = [] if experiment.experiment == "compare" else folders
    for chapter in make_chapters([read_run(folder) for folder in shown]).values():
        for section in chapter.sections:
            print_results(console, section)
    console.print(f"Run folders: {folders[0].parent}; `arsm report` makes a page from them.")


def wrapped(text: str) -> str:
    """Paragraphs, wrapped to at most 79 characters."""
    return "\n\n".join(
        textwrap.fill(" ".join(paragraph.split()), 79) for paragraph in text.split("\n\n")
    )


def overview(known: Mapping[str, type[Command]]) -> str:
    """All commands with the first paragraph of their documentation, in 80 columns."""
    lines = []
    for name, command in known.items():
        paragraph = (inspect.getdoc(command) or "").partition("\n\n")[0]
        words = f"  {name:<12} {' '.join(paragraph.split())}"
        lines.append(textwrap.fill(words, 79, subsequent_indent=" " * 15))
    return "\n".join(
        [
            "usage: arsm COMMAND [OPTIONS]",
            "",
            "Gradients through discrete choices: a demo, the paper's experiments, a report.",
            "",
            *lines,
            "",
            "`arsm COMMAND --help` lists a command's options.",
        ]
    )


def options(command: Any) -> dict[str, Any]:
    """A command's options by name, including those in groups."""
    found = {}
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        found |= options(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return found


def flag(name: str, value: Any) -> str:
    """The words to type for an option with this value."""
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def command_words(command: Command) -> list[str]:
    """The words to type for this command, without options at their defaults: the inverse of
    `parse`.
    """
    words = [type(command).__name__.lower()]
    defaults = options(type(command)())
    for name, value in options(command).items():
        if value != defaults[name]:
            values = (
                () if isinstance(value, bool) else value if isinstance(value, tuple) else (value,)
            )
            words += [flag(name, value), *map(str, values)]
    return words


def hint(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the known word that was probably meant, or all of them."""
    meant = closest(word, known)
    return f"; there are {', '.join(known)}." if meant is None else f': did you mean "{meant}"?'


def how_to_go_on(command: Command | None, arguments: Sequence[str]) -> str:
    """The command to type after an interruption, if it can resume."""
    resume = getattr(command, "resume", None)
    if resume is None:
        return ""
    words = arguments if resume else [*arguments, "--resume"]
    return (
        " Everything up to the last checkpoint is kept; to continue: "
        f"{shlex.join(['arsm', *words])}"
    )


if __name__ == "__main__":
    sys.exit(main())
