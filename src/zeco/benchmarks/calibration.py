"""Measure what messages and compositions cost on the running group: a `Fabric` for the cost model."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from zeco.benchmarks.record import usable_cores
from zeco.collectives.groups import transport_of
from zeco.collectives.scan import can_scan_in_kernels, start_scan
from zeco.collectives.transport import Message, Transport, wait_all
from zeco.core.blocks import Algebra, Value, make_algebra
from zeco.core.costs import Plan, predict_s
from zeco.core.errors import ArgumentError
from zeco.core.fabric import DeviceChain, Fabric, Link, Load, gather_moved_s
from zeco.core.fabric_file import fabric_to_dict
from zeco.core.maps import AffineMap
from zeco.core.schedule import DEVICE_CHAIN
from zeco.core.topology import check_nodes, find_machine
from zeco.core.transitions import Dense, Diagonal, Identity

PURPOSE = "calibrate"
SHORTEST_S = 1e-7
SMALL_BYTES = 64
TINY_BYTES, BLOCK_BYTES = 16, 16384
CROWD_BYTES = (64 << 10, 256 << 10)
FEW, MANY = 16, 64
DEAREST, HALVINGS, NOISE = 8.0, 10, 0.1
SHAPE = (1, 16, 128, 128)
LARGER = 16


def calibrate(
    transport: Transport, *, device: torch.device | None = None, repetitions: int = 9
) -> Fabric:
    """Measure the fabric of a group; every rank calls this and gets the same one.

    A hop is timed by a message that goes round the ranks, as in a chain: round those of the first
    node for links inside, round the nodes' first ranks for links between. Its time at two sizes
    gives latency and bandwidth; what a message costs its ranks is that of one more block in a chain
    of tiny ones, shared out where ranks share processors. Compositions are timed on all ranks at
    once, as scans run them. What a whole scan takes beyond that is the price of starting one.
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
    shared = _shared_processors(transport, device)
    tiny_few_s, tiny_many_s, few_s, many_s = (
        _agreed(transport, _chain_s(transport, blocks, size, device, repetitions), device)
        for size in (TINY_BYTES, BLOCK_BYTES)
        for blocks in (FEW, MANY)
    )
    period_s = max(0.0, tiny_many_s - tiny_few_s) / (MANY - FEW)
    message = _message_s(period_s, combine_overhead_s, transport.size, shared)
    inside = between = None
    if nodes[0] > 1:
        inside = _link(transport, range(nodes[0]), device, repetitions)
    if len(nodes) > 1:
        between = _link(transport, firsts, device, repetitions)
    # Of one node at least, or of all: there are two ranks.
    link = inside or between or _link(transport, range(2), device, repetitions)
    measured = replace(
        transport.fabric,
        latency_s=link.latency_s,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        processors=shared,
        start_s=0.0,
        combine_bytes_per_s=bytes_per_s,
        combine_flop_per_s=flop_per_s,
        combine_overhead_s=combine_overhead_s,
        between=between,
        crowd_efficiency=1.0,
        host_bytes_per_s=None,
        gather_bandwidth_bytes_per_s=None,
    )
    measured = _crowded(measured, transport, device, repetitions)
    chain = _device_chain(measured.device_chain, transport, device, repetitions)
    measured = replace(measured, device_chain=chain)
    return _fit(measured, message, transport, tiny_few_s, many_s - few_s)


def _fit(
    fabric: Fabric, message: tuple[float, float], transport: Transport, few_s: float, more_s: float
) -> Fabric:
    """Fill in what a message and the start of a scan cost, so that the probed chains come out.

    Args:
        fabric: the rest; its latencies are those of whole hops.
        message: what one of many tiny messages costs its sender and its receiver.
        transport: whose ranks were probed.
        few_s: what the chain of few tiny blocks took.
        more_s: what many blocks took more than few that have as many bytes as real ones. Such blocks
            come one by one, and each wakes its receiver: where links aren't the limit, it tells more.
    """

    def filled(factor: float) -> Fabric:
        overhead_s, receive_s = (factor * cost for cost in message)

        def without(hop_s: float) -> float:
            return max(hop_s - overhead_s - receive_s, SHORTEST_S)

        between = fabric.between
        return replace(
            fabric,
            latency_s=without(fabric.latency_s),
            between=between and replace(between, latency_s=without(between.latency_s)),
            overhead_s=overhead_s,
            receive_overhead_s=receive_s,
        )

    def chain_s(num_blocks: int, block_bytes: int, costs: Fabric) -> float:
        load = Load(num_blocks * block_bytes, 0.0)
        plan = Plan("chain", num_blocks, transport.nodes)
        return predict_s(plan, transport.size, load, costs)

    def start_s(costs: Fabric) -> float:
        left_s = max(0.0, few_s - chain_s(FEW, TINY_BYTES, costs))
        # All ranks start at once, and may share processors.
        return left_s * min(1.0, (costs.processors or transport.size) / transport.size)

    def predicted_more_s(factor: float) -> float:
        costs = filled(factor)
        return chain_s(MANY, BLOCK_BYTES, costs) - chain_s(FEW, BLOCK_BYTES, costs)

    low, high = 1.0, DEAREST
    if predicted_more_s(low) > (1 - NOISE) * more_s:
        high = low  # links are the limit, or tiny messages cost as much
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if predicted_more_s(middle) < more_s:
            low = middle
        else:
            high = middle
    costs = filled(low)
    return replace(costs, start_s=start_s(costs))


def _shared_processors(transport: Transport, device: torch.device) -> int | None:
    """Return how many processors the ranks share, if they are more, and all on one machine's."""
    if device.type != "cpu":
        return None
    where = float(zlib.crc32(find_machine().encode()))
    mine = torch.tensor([where, float(usable_cores())], dtype=torch.float64)
    found = torch.stack(transport.all_gather(mine, transport.next_tags(), PURPOSE))
    fewest = int(found[:, 1].min())
    return fewest if len(found[:, 0].unique()) == 1 and fewest < transport.size else None


def _message_s(
    period_s: float, combine_s: float, size: int, processors: int | None
) -> tuple[float, float]:
    """Return what a message costs its sender's program and its receiver's host.

    Args:
        period_s: of one more block in a full chain.
        combine_s: of a composition.
        size: ranks.
        processors: that they share, if any.

    >>> [round(s * 1e6, 2) for s in _message_s(70e-6, 20e-6, 8, None)]  # all compose and send
    [50.0, 0.0]
    >>> [round(s * 1e6, 2) for s in _message_s(70e-6, 20e-6, 8, 4)]  # 8 compose, 7 messages, on 4
    [8.57, 8.57]
    """
    if processors is None:
        return max(period_s - combine_s, SHORTEST_S), 0.0
    message_s = (period_s * processors - size * combine_s) / (size - 1)
    half_s = max(message_s / 2, SHORTEST_S)
    return half_s, half_s


def _link(
    transport: Transport, ring: Sequence[int], device: torch.device, repetitions: int
) -> Link:
    """Return a ring's link; its latency is that of a whole hop."""
    small = _hop_s(transport, ring, SMALL_BYTES, device, repetitions)
    # Large enough to outweigh a token bucket's burst: two sizes, so that it cancels out.
    lower, upper = (
        _hop_s(transport, ring, size << 10, device, repetitions) for size in (256, 1280)
    )
    # Noise must not promise a link without limits: the larger message has five times the bytes.
    bandwidth = (1024 << 10) / max(upper - lower, upper / 4)
    return Link(small, bandwidth)


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


def _crowded(
    fabric: Fabric, transport: Transport, device: torch.device, repetitions: int
) -> Fabric:
    """Fill in what is left of links and processors when everyone sends to everyone."""
    if fabric.collective_gather:
        return fabric
    took: list[float] = []
    busy: list[float] = []
    for size in CROWD_BYTES:
        value = torch.zeros(size // 4, device=device)
        times: list[float] = []
        processor_times: list[float] = []
        for repetition in range(min(repetitions, 3) + 1):
            meet(transport, device)
            start, processor_start = time.perf_counter(), time.process_time()
            transport.all_gather(value, transport.next_tags(), PURPOSE)
            _synchronize(device)
            if repetition:
                times.append(time.perf_counter() - start)
                processor_times.append(time.process_time() - processor_start)
        took.append(_agreed(transport, median(times), device))
        busy.append(_agreed(transport, median(processor_times), device))
    more_bytes = CROWD_BYTES[1] - CROWD_BYTES[0]
    node_size = max(check_nodes(transport.nodes, transport.size))
    least_s = gather_moved_s(fabric, transport.size, node_size, more_bytes)
    efficiency = min(1.0, least_s / max(took[1] - took[0], SHORTEST_S))
    busy_s = busy[1] - busy[0]
    # Each rank sends as much as it receives.
    host_bytes_per_s = 2 * more_bytes * (transport.size - 1) / busy_s if busy_s > 0 else None
    return replace(fabric, crowd_efficiency=efficiency, host_bytes_per_s=host_bytes_per_s)


def _chain_s(
    transport: Transport, num_blocks: int, block_bytes: int, device: torch.device, repetitions: int
) -> float:
    """Return the seconds of a chain that is full of blocks, as its slowest rank sees it.

    What one more block adds is posting, waking up for and composing a message, on processors that
    ranks may have to share. To time the posting alone would promise too much.
    """
    update = torch.zeros(1, 1, num_blocks, block_bytes // 4, device=device)
    own = AffineMap(update, Identity())
    return _scan_s(transport, own, repetitions, algorithm="chain", num_blocks=num_blocks)


def _scan_s(transport: Transport, own: AffineMap, repetitions: int, **options: Any) -> float:
    device = own.update.device
    times: list[float] = []
    for repetition in range(repetitions + 1):
        meet(transport, device)
        start = time.perf_counter()
        start_scan(transport, own, purpose=PURPOSE, output_leaving=False, **options).wait()
        _synchronize(device)
        if repetition:
            times.append(time.perf_counter() - start)
    return median(times)


def _device_chain(
    known: DeviceChain, transport: Transport, device: torch.device, repetitions: int
) -> DeviceChain:
    """Return what chains inside kernels take: of a tiny state, a large one, one that is multiplied.

    What of the tiny one's time is the start and what are hops, one group can't tell; a hop keeps the
    time that is known.
    """
    B, H, K, V = SHAPE
    if not can_scan_in_kernels(transport, SHAPE, Dense.kind, device):
        return known

    def took_s(heads: int, transition: Dense | Identity, rows: int = K) -> float:
        own = AffineMap(torch.zeros(B, heads, rows, V, device=device), transition)
        seconds = _scan_s(transport, own, repetitions, algorithm=DEVICE_CHAIN)
        return _agreed(transport, seconds, device)

    tiny_s, few_s, many_s = (
        took_s(1, Identity(), 1), took_s(H, Identity()), took_s(LARGER * H, Identity())
    )  # fmt: skip
    dense_s = took_s(H, Dense(torch.zeros(B, H, K, K, device=device)))
    more_bytes = 4 * (LARGER - 1) * B * H * K * V
    return DeviceChain(
        start_s=max(0.0, tiny_s - (transport.size - 1) * known.hop_s),
        hop_s=known.hop_s,
        bytes_per_s=more_bytes / max(many_s - few_s, SHORTEST_S),
        flop_per_s=2 * B * H * K * K * V / max(dense_s - few_s, SHORTEST_S),
    )


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
