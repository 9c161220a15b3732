"""``zeco bench``: measurements on emulated hosts, which need root, and of operators on one device."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from zeco.benchmarks.cluster import ClusterSpec
from zeco.benchmarks.comm import compare_scans
from zeco.benchmarks.hosts import run_on_hosts
from zeco.benchmarks.overlap import overlap
from zeco.benchmarks.record import write_record
from zeco.benchmarks.report import comm_table, draw_lines, lines_of, step_table
from zeco.benchmarks.sleep import read_layer
from zeco.benchmarks.steps import METHODS, SLEEPS
from zeco.benchmarks.units import parse_numbers, parse_rate, parse_shape, parse_time
from zeco.benchmarks.weak_scaling import weak_scaling
from zeco.cli.bench_op import OpArguments, run_op
from zeco.cli.calibrate import show
from zeco.core.errors import ArgumentError
from zeco.core.fabric_file import fabric_from_dict, fabric_to_dict, read_fabric


@dataclass(frozen=True)
class Links:
    """The emulated links.

    Attributes:
        rate: of every host's link each way; with nodes, of its link to other nodes.
        inside_rate: of a host's link inside its node.
        latency: added to messages between nodes (without nodes: to all); 0ms adds none.
        out: JSON file for the figures; a chart goes beside it, as PNG.
        repetitions: of every measurement, of which the median is told.
    """

    rate: str = "200mbit"
    inside_rate: str = "2gbit"
    latency: str = "0ms"
    out: Path | None = None
    repetitions: int = 9


@dataclass(frozen=True)
class ClusterArguments(Links):
    """Lay emulated hosts, measure their links through the library, and remove them.

    Attributes:
        ranks: hosts, one for each rank.
        nodes: ranks of every node, such as 4,4,4,4.
    """

    ranks: int = 4
    nodes: str | None = None


@dataclass(frozen=True)
class CommArguments(Links):
    """Compare the scans, an all-gather and the choice of auto in one run.

    Attributes:
        ranks: numbers of ranks, such as 2,4,8,16; one number means the powers of two up to it.
        nodes: ranks of every node, such as 4,4,4,4; replaces ranks.
        state: heads x keys x values of the fp32 state.
        kind: of the transitions: identity, scalar, diagonal or dense.
        blocks: block counts of the chain, beside 1.
        fabric: what auto chooses by, from zeco calibrate; left out, it is measured first.
        timeout: for one number of ranks.
    """

    ranks: str = "2,4,8,16"
    nodes: str | None = None
    state: str = "16x128x128"
    kind: str = "diagonal"
    blocks: str = "4,16,64"
    fabric: Path | None = None
    timeout: str = "600s"


@dataclass(frozen=True)
class StepArguments(Links):
    """What overlap and weak-scaling share.

    Attributes:
        state: heads x keys x values of the fp32 state; the sleeps are stretched accordingly.
        methods: names to compare.
        layer: JSON file with a layer's measured GPU times; left out, the package's own.
    """

    repetitions: int = 3
    state: str = "16x64x64"
    methods: tuple[str, ...] = tuple(METHODS)
    layer: Path | None = None


@dataclass(frozen=True)
class OverlapArguments(StepArguments):
    """Time a layer's step with fewer and fewer tokens on a rank; computing is a sleep.

    Attributes:
        ranks: of the cluster.
        shares: of the layer's measured tokens.
    """

    ranks: int = 8
    shares: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class WeakScalingArguments(StepArguments):
    """Time a layer's step on more and more ranks; computing is a sleep.

    Attributes:
        ranks: numbers of ranks, the first of which the others are compared with.
    """

    ranks: str = "1,2,4,8,16"


Benchmarks = (
    Annotated[ClusterArguments, tyro.conf.subcommand("cluster")]
    | Annotated[CommArguments, tyro.conf.subcommand("comm")]
    | Annotated[OverlapArguments, tyro.conf.subcommand("overlap")]
    | Annotated[WeakScalingArguments, tyro.conf.subcommand("weak-scaling")]
    | Annotated[OpArguments, tyro.conf.subcommand("op")]
)


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    given: Any = tyro.cli(Benchmarks, args=list(arguments), prog="zeco bench")  # type: ignore[call-overload]
    if given.repetitions < 1:
        raise ArgumentError(f"--repetitions {given.repetitions}: give at least 1")
    figures = run_op(given) if isinstance(given, OpArguments) else _run_on_hosts(given)
    if given.out is not None:
        command = shlex.join(["zeco", "bench", *arguments])
        write_record(given.out, command=command, figures=figures)
    return 1 if "refused" in figures else 0


def _run_on_hosts(given: Links) -> dict[str, Any]:
    match given:
        case ClusterArguments():
            figures = _cluster(given)
        case CommArguments():
            figures = _comm(given)
        case OverlapArguments():
            figures = _overlap(given)
        case WeakScalingArguments():
            figures = _weak_scaling(given)
        case _:
            raise TypeError(f"no benchmark takes {type(given).__name__}")
    links = {"rate": given.rate, "inside_rate": given.inside_rate, "latency": given.latency}
    return {"links": links, **figures}


def _spec(given: Links, num_ranks: int, nodes: str | None = None) -> ClusterSpec:
    sizes = None if nodes is None else parse_numbers(nodes, "nodes")
    return ClusterSpec(
        num_ranks if sizes is None else sum(sizes),
        parse_rate(given.rate),
        sizes,
        parse_rate(given.inside_rate),
        0.0 if given.latency == "0ms" else parse_time(given.latency),
    )


def _cluster(given: ClusterArguments) -> dict[str, Any]:
    spec = _spec(given, given.ranks, given.nodes)
    task = "zeco.benchmarks.calibration:calibrate_for_json"
    found = run_on_hosts(spec, task, {"repetitions": given.repetitions})
    show(fabric_from_dict(found[0]))
    return {"ranks": spec.num_ranks, "nodes": spec.nodes, "fabric": found[0]}


def _comm(given: CommArguments) -> dict[str, Any]:
    shape = parse_shape(given.state)
    ranks = parse_numbers(given.ranks, "ranks")
    if len(ranks) == 1:
        ranks = (*(P for P in (2, 4, 8, 16, 32, 64, 128) if ranks[0] > P), ranks[0])
    if min(ranks) < 2:
        raise ArgumentError(f"--ranks {given.ranks}: scans need at least 2 ranks")
    spec = _spec(given, ranks[0], given.nodes)
    specs = [replace(spec, num_ranks=P) for P in ranks] if spec.nodes is None else [spec]
    fabric = None if given.fabric is None else fabric_to_dict(read_fabric(given.fabric))
    points: list[dict[str, Any]] = []
    for each in specs:
        point = compare_scans(
            each,
            shape=shape,
            kind=given.kind,
            blocks=parse_numbers(given.blocks, "blocks"),
            repetitions=given.repetitions,
            fabric=fabric,
            timeout_s=parse_time(given.timeout),
        )
        Console().print(comm_table(point))
        points.append(point)
    _draw(
        given,
        lines_of(points, "ranks", "name", "median_ms"),
        f"Scans of a {given.state} state, {given.kind} transitions",
        f"Emulated hosts, links of {given.rate}"
        + (f", nodes {given.nodes} with {given.inside_rate} inside" if given.nodes else ""),
        ("ranks", "ms"),
    )
    figures = {"state": given.state, "kind": given.kind, "nodes": spec.nodes, "points": points}
    return figures


def _overlap(given: OverlapArguments) -> dict[str, Any]:
    if not given.shares or min(given.shares) <= 0:
        raise ArgumentError(f"--shares {given.shares}: give positive shares of the layer's tokens")
    found = overlap(
        _spec(given, given.ranks),
        shares=given.shares,
        shape=parse_shape(given.state),
        layer=read_layer(given.layer),
        methods=list(given.methods),
        repetitions=given.repetitions,
        told=_show_steps,
    )
    lines = lines_of(found["points"], "tokens", "method", "median_ms")
    lines["computing alone"] = [(p["tokens"], p["compute_ms"]) for p in found["points"]]
    title = f"A layer's step on {given.ranks} ranks, links of {given.rate}"
    _draw(given, lines, title, SLEEPS, ("tokens on a rank", "ms"))
    return found


def _weak_scaling(given: WeakScalingArguments) -> dict[str, Any]:
    ranks = parse_numbers(given.ranks, "ranks")
    found = weak_scaling(
        _spec(given, ranks[0]),
        ranks=ranks,
        shape=parse_shape(given.state),
        layer=read_layer(given.layer),
        methods=list(given.methods),
        repetitions=given.repetitions,
        told=_show_steps,
    )
    lines = lines_of(found["points"], "ranks", "method", "median_ms")
    title = f"A layer's step, as many tokens on every rank, links of {given.rate}"
    _draw(given, lines, title, SLEEPS, ("ranks", "ms a step"))
    return found


def _show_steps(point: dict[str, Any]) -> None:
    Console().print(step_table(point))


def _draw(
    given: Links,
    lines: dict[str, list[tuple[float, float]]],
    title: str,
    note: str,
    axes: tuple[str, str],
) -> None:
    if given.out is not None:
        draw_lines(given.out.with_suffix(".png"), lines, title=title, note=note, axes=axes)
