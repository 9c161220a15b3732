"""Measure what messages and compositions cost on the running group: a `Fabric` for the cost model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from zeco.collectives.groups import transport_of
from zeco.collectives.scan import start_scan
from zeco.collectives.transport import Message, Transport, wait_all
from zeco.core.blocks import Algebra, Value, make_algebra
from zeco.core.errors import ArgumentError
from zeco.core.fabric import Fabric, Link
from zeco.core.fabric_file import fabric_to_dict
from zeco.core.maps import AffineMap
from zeco.core.topology import check_nodes
from zeco.core.transitions import Dense, Diagonal, Identity

PURPOSE = "calibrate"
SMALL_BYTES = 64
FEW, MANY = 16, 128
SHAPE = (1, 16, 128, 128)


def calibrate(
    transport: Transport, *, device: torch.device | None = None, repetitions: int = 9
) -> Fabric:
    """Measure the fabric of a group; every rank calls this and gets the same one.

    A hop is timed by a message that goes round the ranks, as in a chain: round those of the first
    node for links inside, round the nodes' first ranks for links between. Its time at two sizes
    gives latency and bandwidth; what a message costs its ranks is that of one more block in a chain
    of tiny ones. Compositions are timed on all ranks at once, as scans run them.
    Everything is a median over repetitions.

    Args:
        transport: this rank's end of the group; its nodes, if any, are taken from it.
        device: where messages live; default the CPU.
        repetitions: of every measurement.

    Raises:
        ArgumentError: a group of one rank, which has no links.
    """
    if transport.size == 1:
        raise ArgumentError("calibrate: a group of one rank has no links; give at least 2 ranks")
    device = device or torch.device("cpu")
    nodes = check_nodes(transport.nodes, transport.size)
    firsts = [sum(nodes[:node]) for node in range(len(nodes))]
    combine_overhead_s, bytes_per_s, flop_per_s = (
        _agreed(transport, value, device) for value in _combine(device, repetitions)
    )
    message_s = _agreed(transport, _message_s(transport, device, repetitions), device)
    overhead_s = max(message_s - combine_overhead_s, 1e-7)
    inside = between = None
    if nodes[0] > 1:
        inside = _link(transport, range(nodes[0]), overhead_s, device, repetitions)
    if len(nodes) > 1:
        between = _link(transport, firsts, overhead_s, device, repetitions)
    link = inside or between
    if link is None:
        raise ArgumentError("calibrate: no two ranks share a link")
    return replace(
        transport.fabric,
        latency_s=link.latency_s,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        overhead_s=overhead_s,
        combine_bytes_per_s=bytes_per_s,
        combine_flop_per_s=flop_per_s,
        combine_overhead_s=combine_overhead_s,
        between=between,
    )


def _link(
    transport: Transport,
    ring: Sequence[int],
    overhead_s: float,
    device: torch.device,
    repetitions: int,
) -> Link:
    small = _hop_s(transport, ring, SMALL_BYTES, device, repetitions)
    # Large enough to outweigh a token bucket's burst: two sizes, so that it cancels out.
    lower, upper = (
        _hop_s(transport, ring, size << 10, device, repetitions) for size in (256, 1280)
    )
    # Noise must not promise a link without limits: the larger message has five times the bytes.
    bandwidth = (1024 << 10) / max(upper - lower, upper / 4)
    return Link(max(small - overhead_s, 1e-7), bandwidth)


def _hop_s(
    transport: Transport,
    ring: Sequence[int],
    num_bytes: int,
    device: torch.device,
    repetitions: int,
) -> float:
    """Return the seconds of one hop of a message that goes round some ranks."""
    times: list[float] = []
    buffer = torch.zeros(num_bytes // 4, device=device)
    for repetition in range(repetitions + 1):
        tag = transport.next_tags()
        meet(transport, device)
        if transport.rank not in ring:
            continue
        place = list(ring).index(transport.rank)
        after, before = ring[(place + 1) % len(ring)], ring[place - 1]
        start = time.perf_counter()
        if place == 0:
            _send(transport, buffer, after, tag)
        _receive(transport, buffer, before, tag)
        if place != 0:
            _send(transport, buffer, after, tag)
        if repetition:  # the first one connects
            times.append((time.perf_counter() - start) / len(ring))
    mine = median(times) if transport.rank == ring[0] else 0.0
    return _agreed(transport, mine, device, source=ring[0])


def _message_s(transport: Transport, device: torch.device, repetitions: int) -> float:
    """Return what one more message costs each rank of a chain that is full of small ones.

    That is what many blocks cost: posting, waking up for and composing a message, on processors
    that ranks may have to share. To time the posting alone would promise too much.
    """
    update = torch.zeros(1, 1, MANY, 4, device=device)
    own = AffineMap(update, Identity())
    times: dict[int, list[float]] = {FEW: [], MANY: []}
    for repetition in range(repetitions + 1):
        for num_blocks, found in times.items():
            meet(transport, device)
            start = time.perf_counter()
            scan = start_scan(
                transport, own, algorithm="chain", num_blocks=num_blocks, purpose=PURPOSE
            )
            scan.wait()
            _synchronize(device)
            if repetition:
                found.append(time.perf_counter() - start)
    return max(0.0, median(times[MANY]) - median(times[FEW])) / (MANY - FEW)


def _combine(device: torch.device, repetitions: int) -> tuple[float, float, float]:
    """Return a composition's fixed seconds, its bytes a second and its operations a second."""
    B, H, K, V = SHAPE
    state = torch.ones(SHAPE, device=device)
    decay = Diagonal(torch.zeros(B, H, K, device=device))
    dense = Dense(torch.zeros(B, H, K, K, device=device))
    whole = _apply_s(make_algebra(decay, SHAPE, 1), decay, state, device, repetitions)
    part = _apply_s(make_algebra(decay, SHAPE, 64), decay, state, device, repetitions)
    matrices = _apply_s(make_algebra(dense, SHAPE, 1), dense, state, device, repetitions)
    num_bytes = state.numel() * state.element_size()
    per_byte = max(whole - part, 1e-7) / (num_bytes * 63 / 64)
    fixed = max(part - per_byte * num_bytes / 64, 1e-7)
    flop = 2 * B * H * K * K * V
    return fixed, 1 / per_byte, flop / max(matrices - whole, 1e-7)


def _apply_s(
    algebra: Algebra,
    transition: Dense | Diagonal,
    state: Tensor,
    device: torch.device,
    repetitions: int,
) -> float:
    rows = algebra.to_rows(state)
    start, stop = algebra.cuts[0]
    out = torch.empty_like(rows[start:stop])
    later = Value(rows[start:stop], algebra.parameters(transition, rows)[0])
    times: list[float] = []
    for _ in range(repetitions + 2):
        _synchronize(device)
        began = time.perf_counter()
        algebra.apply(0, later, rows[start:stop], out)
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times[2:])


def _send(transport: Transport, tensor: Tensor, peer: int, tag: int) -> None:
    wait_all(transport.exchange([Message(tensor, peer, tag)], [], PURPOSE))
    _synchronize(tensor.device)


def _receive(transport: Transport, tensor: Tensor, peer: int, tag: int) -> None:
    wait_all(transport.exchange([], [Message(tensor, peer, tag)], PURPOSE))
    _synchronize(tensor.device)


def meet(transport: Transport, device: torch.device | None = None) -> None:
    """Wait until every rank is here."""
    token = torch.zeros(1, device=device or torch.device("cpu"))
    transport.all_gather(token, transport.next_tags(), PURPOSE)
    _synchronize(token.device)


def _agreed(
    transport: Transport, value: float, device: torch.device, *, source: int | None = None
) -> float:
    """Return one rank's value, or the largest, on every rank: choices must be the same."""
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    found = transport.all_gather(mine, transport.next_tags(), PURPOSE)
    values = [float(v) for v in found]
    return max(values) if source is None else values[source]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def calibrate_default_group(device: torch.device, repetitions: int) -> Fabric:
    """Calibrate torch.distributed's default group."""
    return calibrate(transport_of(None), device=device, repetitions=repetitions)


def calibrate_for_json(transport: Transport, *, repetitions: int) -> dict[str, Any]:
    """Calibrate as a task of `hosts.run_on_hosts`, whose results are JSON."""
    return fabric_to_dict(calibrate(transport, repetitions=repetitions))
