"""All-Scan inside kernels and driven by the host, beside NCCL's own collectives, state by state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeco.benchmarks.gpus.team import Team, Told, teams
from zeco.benchmarks.timing import spread
from zeco.collectives.groups import transport_of
from zeco.collectives.scan import make_plan, start_scan
from zeco.core.maps import AffineMap
from zeco.core.transitions import Dense, Diagonal, Transition

MIB = (2.0, 0.25, 8.0, 64.0, 1.0, 0.5, 4.0, 16.0, 32.0)
"""Sizes of the fp32 states, the most important first."""

DEVICE = "device_chain"
DRIVEN: dict[str, tuple[str, int | None]] = {
    "chain, 1 block": ("chain", 1),
    "chain, 4 blocks": ("chain", 4),
    "auto": ("auto", None),
    "gather": ("gather", None),
}
"""Scans driven by the host: algorithm and blocks."""

BOUND = 1e-5
"""Of the difference to the chain of one block driven by the host, over the norm of its states."""

Call = Callable[[int], object]


@dataclass(frozen=True)
class ScanSizes:
    """What is timed.

    Attributes:
        mib: sizes of the states, in this order.
        head_dim: K = V of them.
        kind: of the transitions, ``"diagonal"`` or ``"dense"``; inside kernels dense ones are timed too.
        rounds: scans in a row that are timed as one.
        repetitions: of every time.
    """

    mib: Sequence[float] = MIB
    head_dim: int = 128
    kind: str = "diagonal"
    rounds: int = 8
    repetitions: int = 5


def measure_scans(world: Team, told: Told, sizes: ScanSizes) -> dict[str, Any]:
    """Time all scans on all ranks and on each smaller power of two.

    Returns:
        ``rows``: one for each number of ranks and size, and ``complete``.
    """
    figures: dict[str, Any] = {"kind": sizes.kind, "complete": False, "rows": []}
    if world.size == 1:
        figures["skipped"] = (
            "one rank has nobody to pass a state to; virtual ranks: benchmarks/device_scan.py"
        )
        return figures
    figures["measures"] = (
        "us: of a scan in a row of them that go forward and back in turn, queued behind a kernel that "
        "spins (from_python_us: not queued); forward and reverse: alone, from a common start to the "
        "slowest rank's end, in ms"
    )
    for team in teams(world):
        for mib in sizes.mib:
            if not world.has_time():
                return figures
            row = None if team is None else _measure(team, mib, sizes)
            # Ranks outside the team go on when the first has the row.
            world.gather()
            if row is not None:
                figures["rows"].append(row)
                told(figures)
    figures["complete"] = True
    return figures


def _measure(team: Team, mib: float, sizes: ScanSizes) -> dict[str, Any]:
    own = _make_map(team, mib, sizes)
    calls = _scan_calls(team, own)
    row: dict[str, Any] = {"ranks": team.size, "state_mib": mib, "refused": {}, "errors": {}}
    plan = make_plan(transport_of(team.group), own, "auto", None)
    row["auto_takes"] = [plan.algorithm, plan.num_blocks]
    good: dict[str, Call] = {}
    expected = [calls["chain, 1 block"](number) for number in (0, 1)]
    for name, call in calls.items():
        try:
            found = [call(number) for number in (0, 1)]
        except Exception as error:  # said beside the others' times
            row["refused"][name] = f"{type(error).__name__}: {error}"
            continue
        (row["errors"][name],) = team.worst([_difference(found, expected)])
        if row["errors"][name] <= BOUND:
            good[name] = call
        else:
            row["refused"][name] = f"its states are off by {row['errors'][name]:.1e}"
    del expected
    row["in_a_row"] = {}
    if DEVICE in good:
        row["in_a_row"][DEVICE] = _time_ring(team, own, sizes)
        _add_dense(row, team, mib, replace(sizes, kind="dense"))
        good_rows = {f"{DEVICE}, waited for": good[DEVICE]}
    else:
        good_rows = {}
    good_rows |= {name: call for name, call in good.items() if name != DEVICE}
    for name, call in {**good_rows, "send and receive": _hop(team, own.update)}.items():
        row["in_a_row"][name] = team.row_us(
            call, rounds=sizes.rounds, repetitions=sizes.repetitions
        )
    row["alone_ms"] = _time_alone(team, own.update, good, sizes)
    return row


def _make_map(team: Team, mib: float, sizes: ScanSizes) -> AffineMap:
    """Return a rank's own random map."""
    K = sizes.head_dim
    heads = max(1, int(mib * 2**20) // (K * K * 4))
    draw = torch.Generator(team.device).manual_seed(team.rank)
    update = torch.randn(1, heads, K, K, device=team.device, generator=draw)
    transition: Transition
    if sizes.kind == "dense":
        matrix = torch.randn(1, heads, K, K, device=team.device, generator=draw)
        transition = Dense(matrix / K**0.5)
    else:
        transition = Diagonal(-torch.rand(1, heads, K, device=team.device, generator=draw))
    return AffineMap(update, transition)


def _scan_calls(team: Team, own: AffineMap) -> dict[str, Call]:
    """Return the scans by name; a call of an odd number goes from the last rank to the first."""
    transport = transport_of(team.group)

    def call(algorithm: str, num_blocks: int | None) -> Call:
        def scan(number: int) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                return start_scan(
                    transport,
                    own,
                    reverse=number % 2 == 1,
                    algorithm=algorithm,
                    num_blocks=num_blocks,
                ).wait_for_both()

        return scan

    return {name: call(*how) for name, how in {**DRIVEN, DEVICE: (DEVICE, None)}.items()}


def _difference(found: list[Any], expected: list[Any]) -> float:
    """Return the largest relative difference of states, forward and reverse, infinite where NaN."""
    worst = 0.0
    for some, others in zip(found, expected, strict=True):
        for x, y in zip(some, others, strict=True):
            error = float((x - y).norm() / (y.norm() + 1e-30))
            worst = max(worst, error if error == error else float("inf"))
    return worst


def _time_ring(team: Team, own: AffineMap, sizes: ScanSizes) -> dict[str, Any]:
    """Time scans inside kernels on their own stream, where no other stream has to wait for them."""
    ring = transport_of(team.group).device_ring(team.device)

    def scan(number: int) -> None:
        ring.scan(own, None, reverse=number % 2 == 1, check=lambda: None)

    with torch.cuda.stream(ring.stream):
        return team.row_us(scan, rounds=2 * sizes.rounds, repetitions=sizes.repetitions)


def _add_dense(row: dict[str, Any], team: Team, mib: float, sizes: ScanSizes) -> None:
    """Add the times of scans of dense transitions inside kernels, if they are right."""
    name = f"{DEVICE}, dense"
    own = _make_map(team, mib, sizes)
    calls = _scan_calls(team, own)
    expected, found = (
        [calls[which](number) for number in (0, 1)] for which in ("chain, 1 block", DEVICE)
    )
    (row["errors"][name],) = team.worst([_difference(found, expected)])
    if row["errors"][name] <= BOUND:
        row["in_a_row"][name] = _time_ring(team, own, sizes)
    else:
        row["refused"][name] = f"its states are off by {row['errors'][name]:.1e}"


def _hop(team: Team, state: Tensor) -> Call:
    """Return the way of a bare state from rank to rank by the group's own messages, up and down."""
    state = state.clone()

    def hop(number: int) -> None:
        down = number % 2 == 1
        first, last = (team.size - 1, 0) if down else (0, team.size - 1)
        step = -1 if down else 1
        if team.rank != first:
            dist.recv(state, group=team.group, group_src=team.rank - step)
        if team.rank != last:
            dist.send(state, group=team.group, group_dst=team.rank + step)

    return hop


def _time_alone(
    team: Team, state: Tensor, scans: dict[str, Call], sizes: ScanSizes
) -> dict[str, dict[str, Any]]:
    """Time everything once from a common start, all in turn."""
    whole = state.new_empty(team.size, state.numel())
    flat = state.reshape(-1)
    cut = flat[: flat.numel() // team.size * team.size]
    swapped = torch.empty_like(cut)
    runs: dict[tuple[str, str], Callable[[], object]] = {
        ("all-gather", "forward"): lambda: dist.all_gather(list(whole), flat, group=team.group),
        ("all-to-all", "forward"): lambda: dist.all_to_all_single(swapped, cut, group=team.group),
    }
    for name, scan in scans.items():
        for number, way in enumerate(("forward", "reverse")):
            runs[name, way] = lambda scan=scan, number=number: scan(number)
    found: dict[str, dict[str, Any]] = {}
    for (name, way), times in team.times(runs, sizes.repetitions).items():
        found.setdefault(name, {})[way] = spread(times)
    return found
