"""Times of an operator under several methods: launched one by one and as graphs, between equals."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any

import torch

from zeco.benchmarks.device import Run, synchronize
from zeco.benchmarks.gpus.graphs import capture_runs
from zeco.benchmarks.gpus.team import REPLAY_LEAD_CYCLES, Team
from zeco.benchmarks.op import BOTH, EAGER, FORWARD, GRAPH
from zeco.benchmarks.timing import spread

NONE, MIDDLE = "none", "a middle rank, its scans arrived"
Key = tuple[str, str]
"""A method and a pass."""


def time_methods(
    team: Team, runs: Mapping[Key, Run], repetitions: int, left_out: dict[str, str]
) -> dict[str, Any]:
    """Time runs in turn, eager and then as graphs.

    Args:
        team: the ranks, which have the same runs.
        runs: by method and pass.
        repetitions: of every time.
        left_out: gets why a run isn't timed, by name.

    Returns:
        ``times``: with ``how`` each was launched and what it is ``over_none`` launched so; ``ratios``
        of ZeCO to the others, by how; on GPUs ``not_captured``: why a run has no graph.
    """
    usable: dict[Key, Run] = {}
    for (name, work), run in runs.items():
        reason = _why_too_large(team, run)
        if reason is None:
            usable[name, work] = run
        else:
            left_out[f"{name}, {work}"] = reason
    found: dict[str, Any] = {}
    host = {key: {"launches_ms": _host_ms(team, run)} for key, run in usable.items()}
    times = {EAGER: team.times(usable, repetitions, warm_up=0)}  # each has run twice
    if team.on_gpu:
        replays, refused = capture_runs(team, usable)
        found["not_captured"] = {", ".join(key): reason for key, reason in refused.items()}
        if replays:
            lead = REPLAY_LEAD_CYCLES
            times[GRAPH] = team.times(replays, repetitions, warm_up=1, lead_cycles=lead)
    figures = {how: {k: spread(t) for k, t in some.items()} for how, some in times.items()}
    found["times"] = [
        {"method": name, "pass": work, "how": how, **row}
        | _over(row, rows.get((NONE, work)))
        | (host[name, work] if how == EAGER else {})
        for how, rows in figures.items()
        for (name, work), row in rows.items()
    ]
    found["ratios"] = {how: _ratios(rows) for how, rows in figures.items()}
    return found


def free(team: Team) -> None:
    """Give back what a case took; graphs too, which hold what a communicator can't end without."""
    gc.collect()
    if team.on_gpu:
        torch.cuda.empty_cache()


def _why_too_large(team: Team, run: Run) -> str | None:
    """Run a call once; return why it doesn't fit a GPU's memory, None if it does.

    The ranks hold alike much, so that where one can't go on, none of them waits for it.
    """
    reason = None
    try:
        run()
        synchronize(team.device)
    except torch.OutOfMemoryError as error:
        reason = str(error)
    if team.least([float(reason is None)])[0] > 0:
        return None
    free(team)
    return reason or "another rank's memory is too small"


def _host_ms(team: Team, run: Run) -> float:
    """Return how long the host is busy with a call; with waiting, if it waits for the GPU halfway."""
    synchronize(team.device)
    team.meet()
    start = time.perf_counter()
    run()
    took = (time.perf_counter() - start) * 1e3
    synchronize(team.device)
    return round(team.worst([took])[0], 3)


def _over(row: dict[str, Any], none: dict[str, Any] | None) -> dict[str, float]:
    return {} if none is None else {"over_none": round(row["median_ms"] / none["median_ms"], 4)}


def _ratios(figures: dict[Key, dict[str, Any]]) -> dict[str, float]:
    """Return what ZeCO, at its best scan, is to the others: below 1 it is faster."""
    found: dict[str, float] = {}
    for work in (FORWARD, BOTH):
        times = {n: f["median_ms"] for (n, w), f in figures.items() if w == work}
        ours = [t for n, t in times.items() if n.startswith("zeco")]
        if ours:
            found |= {
                f"{work}: zeco over {name}": round(min(ours) / t, 4)
                for name, t in times.items()
                if not name.startswith("zeco")
            }
    return found
