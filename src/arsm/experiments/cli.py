"""The `arsm` command."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Command(Protocol):
    """A documented dataclass whose fields are the command's options."""

    def check(self) -> None:
        """Raise ValueError or TypeError, in one sentence, for options that cannot run."""

    def run(self, console: Console) -> None:
        """Do it; raise RunError, in one sentence, for what the user can put right."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command: 0 if done, 2 if asked for what cannot be, 130 if interrupted."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        import tyro
        from rich.console import Console

        from arsm.experiments.compare import Compare
        from arsm.experiments.control import Control
        from arsm.experiments.record import RunError
        from arsm.experiments.report import Report
        from arsm.experiments.toy import Toy
        from arsm.experiments.vae import Vae
    except ModuleNotFoundError as missing:
        return _refuse(f"The command line needs {missing.name}; install it with `pip install 'arsm[experiments]'`.")

    command: Command = tyro.extras.subcommand_cli_from_dict(
        {"toy": Toy, "vae": Vae, "compare": Compare, "control": Control, "report": Report},
        prog="arsm",
        description="Gradient estimators for categorical variables: the paper's experiments and their report.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        command.check()
    except (ValueError, TypeError) as error:
        return _refuse(str(error))
    try:
        command.run(Console())
    except RunError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        again = ""
        if hasattr(command, "resume"):
            words = arguments if "--resume" in arguments else [*arguments, "--resume"]
            again = f" Everything up to the last checkpoint is kept; to go on: {shlex.join(['arsm', *words])}"
        print(f"Interrupted.{again}", file=sys.stderr)
        return 130
    return 0


def _refuse(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
