"""``zeco doctor``: is this installation right, and do its ranks find each other?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import tyro
from rich.console import Console
from rich.table import Table

from zeco.benchmarks.record import describe_machine, describe_versions
from zeco.core.errors import ArgumentError
from zeco.testing.examination import SCANNED, Examination, examine
from zeco.training.launch import World, launch

BOUND = 1e-4
"""Largest relative error of a sharded operator against one rank, in fp32 on any device."""


@dataclass(frozen=True)
class Arguments:
    """Check versions, devices, backends and a group of ranks; run every operator on it.

    Attributes:
        ranks: processes to start on this machine; under torchrun leave it out.
        device: "auto", "cpu" or "cuda".
    """

    ranks: int | None = None
    device: str = "auto"


def run(arguments: Sequence[str]) -> int:
    """Print what is found; return 1 if an operator is wrong."""
    given = tyro.cli(Arguments, args=list(arguments), prog="zeco doctor")
    if given.ranks is not None and given.ranks < 1:
        raise ArgumentError(f"--ranks {given.ranks}: give at least 1")
    found = launch(_examine, num_ranks=given.ranks, device=given.device)
    if found is None:
        return 0
    console = Console()
    console.print(_about())
    where = f"{found.num_ranks} ranks" if found.num_ranks > 1 else "one rank"
    console.print(f"{where} on {found.device}; scans of {list(SCANNED)} states by {found.scan}")
    console.print(_operators(found))
    wrong = [f.operator for f in found.findings if not f.error <= BOUND]
    console.print(f"wrong: {', '.join(wrong)}" if wrong else "all is well")
    return 1 if wrong else 0


def _about() -> Table:
    table = Table("what", "here", title="Installation", title_justify="left")
    for name, found in (describe_versions() | describe_machine()).items():
        table.add_row(name, found if isinstance(found, str) else json.dumps(found))
    return table


def _operators(examination: Examination) -> Table:
    table = Table(
        "operator",
        "largest error",
        "backend",
        title="Every operator on the group, its gradients too, against one rank",
        title_justify="left",
    )
    for found in examination.findings:
        table.add_row(found.operator, f"{found.error:.0e}", found.backend)
    return table


def _examine(world: World) -> Examination | None:
    found = examine(world.device)
    return found if world.rank == 0 else None
