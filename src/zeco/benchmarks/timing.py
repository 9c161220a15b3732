"""Time the same work on all ranks of one machine from a common start."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from zeco.benchmarks.calibration import PURPOSE, meet
from zeco.collectives.transport import Transport

LEAD_S = 0.03


def timed_together(transport: Transport, work: Callable[[], object]) -> float:
    """Start work at the same moment on all ranks; return the seconds until the last has ended.

    The ranks are processes of one machine, so they share a clock. Rank 0 names the moment.
    """
    meet(transport)
    moment = _shared(transport, time.monotonic() + LEAD_S)[0]
    time.sleep(max(0.0, moment - time.monotonic()))
    work()
    return max(_shared(transport, time.monotonic())) - moment


def spread(times: list[float]) -> dict[str, Any]:
    """Return the median, the quartiles and the extremes of times in seconds, as milliseconds."""
    low, high = times[0], times[0]
    if len(times) > 1:
        low, _, high = quantiles(times, n=4, method="inclusive")
    figures = {
        "median_ms": median(times),
        "quartile_1_ms": low,
        "quartile_3_ms": high,
        "least_ms": min(times),
        "most_ms": max(times),
    }
    return {name: round(value * 1e3, 4) for name, value in figures.items()} | {"runs": len(times)}


def interface_bytes() -> int:
    """Return the bytes that this host's links have sent, headers included."""
    total = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() != "lo":
            total += int(counters.split()[8])
    return total


def _shared(transport: Transport, value: float) -> list[float]:
    mine = torch.tensor([value], dtype=torch.float64)
    found = transport.all_gather(mine, transport.next_tags(), PURPOSE)
    return [float(v) for v in found]
