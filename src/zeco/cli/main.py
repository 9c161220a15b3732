"""The command table and what all commands share: help, and errors in one line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from zeco.core.errors import ZecoError, unknown_name

# Each module has ``run(arguments) -> exit code``; it is imported only when it is called.
COMMANDS = {
    "train": ("zeco.cli.train", "train a language model, its sequences split over ranks"),
    "generate": ("zeco.cli.generate", "continue a prompt with a trained model"),
    "demo": ("zeco.cli.demo", "train on 4 ranks, compare with 1, and show what was learned"),
    "simulate": ("zeco.cli.simulate", "time scans and layers on clusters that aren't here"),
    "verify": ("zeco.cli.verify", "measure the errors of every operator and method"),
    "bench": ("zeco.cli.bench", "measure operators, and scans and steps on emulated hosts (root)"),
    "doctor": ("zeco.cli.doctor", "check the installation and a group of ranks"),
    "calibrate": ("zeco.cli.calibrate", "measure what messages cost on a group"),
}
USER_ERROR = 2


def usage() -> str:
    """Return the list of commands."""
    lines = [f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: zeco COMMAND [--debug] ...",
            "",
            *lines,
            "",
            "'zeco COMMAND --help' shows a command's arguments.",
            "--debug shows where an error arose.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: those after ``zeco``; None takes the process's.

    Returns:
        The exit code: 0 success, 1 a check of the command failed, 2 wrong use, 130 interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [a for a in given if a != "--debug"]
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        return 0 if given else USER_ERROR
    name, *rest = given
    try:
        return _command(name)(rest)
    except ZecoError as error:
        if debug:
            raise
        print(f"zeco: error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        if debug:
            raise
        print("zeco: interrupted", file=sys.stderr)
        return 130


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name not in COMMANDS:
        raise ZecoError(unknown_name("command", name, COMMANDS))
    return importlib.import_module(COMMANDS[name][0]).run
