"""``zeco calibrate``: measure what messages cost on a group, for the choice of scan."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from zeco.benchmarks.calibration import calibrate_default_group
from zeco.benchmarks.record import write_record
from zeco.core.errors import ArgumentError
from zeco.core.fabric import DeviceChain, Fabric
from zeco.core.fabric_file import fabric_to_dict
from zeco.training.launch import World, launch


@dataclass(frozen=True)
class Arguments:
    """Measure latency, bandwidth, the cost of a message and of compositions on a group of ranks.

    Attributes:
        ranks: processes to start on this machine; under torchrun leave it out.
        device: "auto", "cpu" or "cuda".
        repetitions: of every measurement, of which the median counts.
        out: JSON file for the cost model.
    """

    ranks: int | None = None
    device: str = "auto"
    repetitions: int = 9
    out: Path | None = None


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    given = tyro.cli(Arguments, args=list(arguments), prog="zeco calibrate")
    if given.repetitions < 1:
        raise ArgumentError(f"--repetitions {given.repetitions}: give at least 1")
    found = launch(_measure, given.repetitions, num_ranks=given.ranks, device=given.device)
    if found is None:
        return 0
    command = shlex.join(["zeco", "calibrate", *arguments])
    show(found)
    if given.out is not None:
        write_record(given.out, command=command, figures={"fabric": fabric_to_dict(found)})
    return 0


def show(fabric: Fabric) -> None:
    """Print a fabric as a table."""
    table = Table("what", "figure", title="Measured fabric", title_justify="left")
    for name, link in (("inside", fabric.inside), ("between nodes", fabric.between)):
        if link is not None:
            table.add_row(f"latency, {name}", f"{link.latency_s * 1e6:.1f} us")
            table.add_row(
                f"bandwidth, {name}", f"{link.bandwidth_bytes_per_s * 8 / 1e6:,.0f} Mbit/s"
            )
    table.add_row("starting a message", f"{fabric.overhead_s * 1e6:.1f} us")
    table.add_row("starting a composition", f"{fabric.combine_overhead_s * 1e6:.1f} us")
    table.add_row("composing, elementwise", f"{fabric.combine_bytes_per_s / 1e9:.2f} GB/s")
    table.add_row("composing, dense", f"{fabric.combine_flop_per_s / 1e9:.1f} GFLOP/s")
    chain = fabric.device_chain
    if chain != DeviceChain():
        table.add_row("a chain inside kernels: its start", f"{chain.start_s * 1e6:.1f} us")
        table.add_row("its states", f"{chain.bytes_per_s / 1e9:.1f} GB/s")
        table.add_row("its products", f"{chain.flop_per_s / 1e9:.1f} GFLOP/s")
    Console().print(table)


def _measure(world: World, repetitions: int) -> Fabric | None:
    fabric = calibrate_default_group(world.device, repetitions)
    return fabric if world.rank == 0 else None
