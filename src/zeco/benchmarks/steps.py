"""One layer's training step under every method, its computing a sleep (see `sleep`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from zeco.benchmarks.calibration import calibrate
from zeco.benchmarks.cluster import ClusterSpec
from zeco.benchmarks.hosts import run_on_hosts
from zeco.benchmarks.sleep import LayerTimes, SleepSegment
from zeco.benchmarks.timing import spread, timed_together
from zeco.collectives.all_to_all import Swap, Way, all_to_all
from zeco.collectives.transport import Transport
from zeco.core.errors import ArgumentError, unknown_name
from zeco.core.maps import AffineMap
from zeco.core.transitions import Diagonal
from zeco.sequence_parallel.methods import Lasp1, Method, Scanned

METHODS: dict[str, Method | None] = {
    "zeco": Scanned(),
    "LASP-1": Lasp1(),
    "LASP-2, overlapped": Scanned("gather"),
    "LASP-2": Scanned("gather", overlap=False),
    "all-to-all": None,
}
SLEEPS = "A rank's computing is a sleep of the measured GPU time, stretched with the link."
DECAY = 0.5
BOUND = 1e-5
TASK = "zeco.benchmarks.steps:measure"

# Queries, keys, values and gates go to the heads' ranks, the outputs come back; in the backward pass
# the outputs' gradients go, and those of the four inputs come back.
INPUTS = 4
TOKEN_ELEMENT_BYTES = 2


def check_methods(names: list[str], shape: tuple[int, int, int], ranks: tuple[int, ...]) -> None:
    """Refuse a method that doesn't exist, and heads that an all-to-all can't share out."""
    for name in names:
        if name not in METHODS:
            raise ArgumentError(unknown_name("method", name, METHODS))
    uneven = [P for P in ranks if shape[0] % P]
    if "all-to-all" in names and uneven:
        raise ArgumentError(
            f"all-to-all: {shape[0]} heads don't divide by {uneven[0]} ranks; give other ranks, "
            "another --state, or --methods without it"
        )


def run_steps(
    spec: ClusterSpec,
    *,
    shape: tuple[int, int, int],
    tokens: int,
    times: LayerTimes,
    methods: list[str],
    repetitions: int,
) -> dict[str, Any]:
    """Lay a cluster and time the methods' steps on it.

    Args:
        spec: the cluster.
        shape: heads, key dim and value dim of the fp32 state.
        tokens: of a rank, for the bytes of all-to-all.
        times: of the layer's passes.
        methods: names in `METHODS`.
        repetitions: of every step, after one that isn't timed.
    """
    arguments = {
        "shape": shape,
        "tokens": tokens,
        "times": asdict(times),
        "methods": methods,
        "repetitions": repetitions,
    }
    compute_s = times.forward_s + times.backward_s
    # LASP-1 takes P steps' time; an all-to-all may take as long as its bytes on one link.
    H, K, _ = shape
    swapped_s = 2 * (INPUTS + 1) * tokens * H * K * TOKEN_ELEMENT_BYTES * 8 / spec.rate_bits_per_s
    a_round_s = compute_s * (spec.num_ranks + len(methods)) + 3 * swapped_s
    timeout_s = 120 + 3 * (repetitions + 1) * a_round_s
    ranks = run_on_hosts(spec, TASK, arguments, timeout_s=timeout_s)
    rows: list[dict[str, Any]] = []
    for i, row in enumerate(ranks[0]["rows"]):
        waits = [rank["rows"][i]["wait_ms"] for rank in ranks]
        sent = [rank["rows"][i]["sent_bytes"] for rank in ranks]
        exposed = row["median_ms"] - compute_s * 1e3
        rows.append(
            row
            | {"wait_ms": max(waits), "sent_bytes": max(sent), "exposed_ms": round(exposed, 4)}
            | {"exposed_share": round(exposed / row["median_ms"], 5)}
        )
    return {"ranks": spec.num_ranks, "compute_ms": compute_s * 1e3, "rows": rows}


def measure(
    transport: Transport,
    *,
    shape: list[int],
    tokens: int,
    times: dict[str, float],
    methods: list[str],
    repetitions: int,
) -> dict[str, Any]:
    """Time the methods' steps in turn, on every rank of a group; see `run_steps`."""
    if transport.size > 1:
        transport.fabric = calibrate(transport)
    layer = LayerTimes(**times)
    works = {name: _step_of(name, transport, shape, tokens, layer) for name in methods}
    found: dict[str, list[float]] = {name: [] for name in methods}
    waits: dict[str, float] = {}
    sent: dict[str, int] = {}
    for work in (_step_of(n, transport, shape, 1, LayerTimes(0, 0, 0, 0, 0, 0)) for n in methods):
        work()  # connects, and checks the states
    for _ in range(repetitions):
        for name, work in works.items():
            transport.ledger.clear()
            found[name].append(timed_together(transport, work))
            ledger = transport.ledger
            waits[name] = waits.get(name, 0.0) + ledger.wait_s
            sent[name] = sum(t.bytes for kind, t in ledger.sent.items() if kind != "calibrate")
    rows = [
        {"method": name, **spread(found[name])}
        | {"wait_ms": round(waits[name] / repetitions * 1e3, 4), "sent_bytes": sent[name]}
        for name in methods
    ]
    return {"rows": rows}


def _step_of(
    name: str, transport: Transport, shape: list[int], tokens: int, times: LayerTimes
) -> Callable[[], None]:
    """Return a function that runs a step."""
    method = METHODS[name]
    if method is None:
        return _swap_step_of(transport, shape, tokens, times)
    H, K, V = shape
    update = torch.full((1, H, K, V), float(transport.rank + 1))
    own = AffineMap(update, Diagonal(torch.full((1, H, K), DECAY).log()))
    zeros = torch.zeros_like(update)
    expected = 0.0
    for earlier in range(transport.rank):
        expected = DECAY * expected + earlier + 1

    def step() -> None:
        segments = [SleepSegment(times, own)]
        outcome = method.forward(transport, segments, zeros, [None])
        error = float((outcome.entering[0] - expected).abs().max())
        if not error <= BOUND * max(1.0, expected):
            raise ArithmeticError(f"{name}: the entering state is off by {error:.1e}")
        d_o, d_finals = [torch.zeros_like(outcome.o[0])], [torch.zeros_like(outcome.finals[0])]
        method.backward(transport, segments, outcome.entering, [None], d_o, d_finals)

    return step


def _swap_step_of(
    transport: Transport, shape: list[int], tokens: int, times: LayerTimes
) -> Callable[[], None]:
    """Exchange as Ulysses does, without the copies into the order of the sequence."""
    P, (H, K, _) = transport.size, shape
    size = tokens * (H // P) * K
    x = torch.zeros(P, size, dtype=torch.bfloat16)
    way = Way(0, (1,) * P, 0, (1,) * P)

    def swap(number: int) -> None:
        if P == 1:  # nothing to exchange, and the copy isn't what is measured
            return
        start = time.perf_counter()
        all_to_all([Swap(x, way)] * number, transport)
        transport.ledger.count_wait(time.perf_counter() - start)

    def step() -> None:
        swap(INPUTS)
        time.sleep(times.forward_s)
        swap(1)
        swap(1)
        time.sleep(times.backward_s)
        swap(INPUTS)

    return step
