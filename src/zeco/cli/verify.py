"""``zeco verify``: every operator under every method, against one rank and against its oracle."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from zeco.benchmarks.record import write_record
from zeco.core.errors import ArgumentError, unknown_name
from zeco.testing.cases import CASES, SETTINGS
from zeco.testing.conformance import Problem, relative_errors

DTYPES = {"float64": torch.float64, "float32": torch.float32}
METHODS = ("zeco", "lasp1", "lasp2", "ulysses")

WIDTH = 180

BOUNDS = {"float64": (1e-10, 1e-10), "float32": (1e-5, 1e-4)}
"""Largest relative errors against one rank and against the fp64 oracle."""


def _parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="zeco verify", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="largest P; all from 1 on are checked")
    parser.add_argument("--dtype", default="float64", help=" or ".join(DTYPES))
    parser.add_argument("--operators", nargs="*", default=[], help="default: all")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="default: all")
    parser.add_argument("--settings", nargs="*", default=["plain"], help="or 'all'")
    parser.add_argument(
        "--record", type=Path, help="write the largest errors, with machine and versions, as JSON"
    )
    return parser.parse_args(given)


def run(given: Sequence[str]) -> int:
    """Print a table of errors; return 1 if one is over its bound."""
    arguments = _parse(given)
    if arguments.ranks < 1:
        raise ArgumentError(f"--ranks {arguments.ranks}: give at least 1")
    _known("dtype", [arguments.dtype], DTYPES)
    _known("method", arguments.methods, METHODS)
    _known("operator", arguments.operators, CASES)
    settings = list(SETTINGS) if arguments.settings == ["all"] else arguments.settings
    _known("setting", settings, SETTINGS)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)  # a pipe has no width of its own, and the tables need one
    failed = 0
    worst: dict[str, float] = {}
    for name in arguments.operators or CASES:
        for setting in settings:
            failed += _verify(console, name, setting, arguments, worst)
    console.print(
        f"{failed} rows are over their bounds" if failed else "every error is within its bound"
    )
    if arguments.record is not None:
        write_record(
            arguments.record,
            command=f"zeco verify {' '.join(given)}",
            figures={"largest_relative_error_against_the_oracle": worst},
        )
    return 1 if failed else 0


def _verify(
    console: Console,
    name: str,
    setting: str,
    arguments: argparse.Namespace,
    worst: dict[str, float],
) -> int:
    """Print an operator's table; return how many rows are over their bounds.

    ``worst`` gets the largest error against the oracle of every method.
    """
    problem = Problem(CASES[name], SETTINGS[setting], DTYPES[arguments.dtype])
    one_rank, oracle = problem.one_rank(), problem.oracle()
    bounds = BOUNDS[arguments.dtype]
    table = Table(
        title=f"{name}, {setting}, {arguments.dtype}: largest relative errors, "
        "against one rank / against the oracle",
        title_justify="left",
    )
    for column in ("method", "P", *oracle, ""):
        table.add_column(column, no_wrap=True)
    failed = 0
    for method in arguments.methods:
        for ranks in range(1, arguments.ranks + 1):
            if method == "ulysses" and SETTINGS[setting].heads % ranks:
                continue
            found = problem.sharded(ranks, method=method)
            errors = relative_errors(found, one_rank), relative_errors(found, oracle)
            over = [max(e.values()) > bound for e, bound in zip(errors, bounds, strict=True)]
            failed += any(over)
            key = f"{name} | {setting} | {method}"
            worst[key] = max(worst.get(key, 0.0), *errors[1].values())
            cells = [f"{errors[0][n]:.0e} / {errors[1][n]:.0e}" for n in oracle]
            verdict = f"[red]over {bounds[0]:.0e} / {bounds[1]:.0e}" if any(over) else ""
            table.add_row(method, str(ranks), *cells, verdict)
    console.print(table)
    return failed


def _known(kind: str, names: list[str], accepted: Collection[str]) -> None:
    for name in names:
        if name not in accepted:
            raise ArgumentError(unknown_name(kind, name, accepted))
