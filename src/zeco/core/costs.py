"""The cost model: what a schedule takes on a fabric, and the choice of scan that follows from it.

A message of n bytes keeps its sender busy for ``overhead + n / bandwidth`` and is there
``latency + n / bandwidth`` after it left. A composition of n bytes takes
``overhead + n / combine_bandwidth``. The time of a schedule is found by running it under these rules.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from zeco.core.errors import ArgumentError, unknown_name
from zeco.core.schedule import (
    BUILDERS,
    AllGather,
    Combine,
    Exchange,
    Form,
    Receive,
    Schedule,
    Send,
    build_schedule,
)
from zeco.core.transitions import KINDS

StateShape = tuple[int, int, int, int]
Candidates = tuple[tuple["Plan", float], ...]


@dataclass(frozen=True)
class Fabric:
    """What links and ranks take.

    Attributes:
        latency_s: from a message's departure to its first byte's arrival.
        bandwidth_bytes_per_s: of a rank's link, each way.
        overhead_s: of starting a message or a composition.
        combine_bytes_per_s: state bytes that a rank composes a second.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    overhead_s: float
    combine_bytes_per_s: float


LOOPBACK = Fabric(100e-6, 1e9, 50e-6, 4e9)
"""Assumed for gloo between processes of one host, until it is measured."""

NVLINK_BY_NCCL = Fabric(5e-6, 150e9, 30e-6, 1e12)
"""Assumed for NCCL inside a node, until it is measured: a call costs more than its bytes."""


@dataclass(frozen=True)
class Plan:
    """A scan with nothing left open."""

    algorithm: str
    num_blocks: int


def map_bytes(shape: StateShape, kind: str, element_size: int) -> tuple[int, int]:
    """Return the bytes of a state and of a transition's parameters in a message.

    >>> map_bytes((1, 2, 4, 8), "dense", 4)
    (256, 128)
    """
    B, H, K, V = shape
    parameters = B * H * K * (K if kind == "dense" else 1)
    return B * H * K * V * element_size, parameters * element_size


@dataclass
class _Clock:
    """A rank's place in its program, and when its processor, its link and its values are free."""

    position: int = 0
    now: float = 0.0
    link: float = 0.0


def predict_s(schedule: Schedule, state_bytes: int, parameter_bytes: int, fabric: Fabric) -> float:
    """Return the seconds until every rank has its states, all ranks starting at once.

    Args:
        schedule: the programs.
        state_bytes: of a whole state.
        parameter_bytes: of a whole transition, sent beside the state in map form.
        fabric: costs of messages and compositions.
    """
    block = {
        Form.STATE: state_bytes / schedule.num_blocks,
        Form.MAP: (state_bytes + parameter_bytes) / schedule.num_blocks,
    }
    combine_s = fabric.overhead_s + block[Form.STATE] / fabric.combine_bytes_per_s
    clocks = [_Clock() for _ in schedule.programs]
    arrivals: dict[tuple[int, int, int, Form], list[float]] = defaultdict(list)
    taken: dict[tuple[int, int, int, Form], int] = defaultdict(int)
    meetings: dict[int, dict[int, float]] = defaultdict(dict)

    def send(rank: int, step: Send) -> None:
        clock = clocks[rank]
        clock.now += fabric.overhead_s
        clock.link = max(clock.link, clock.now) + block[step.form] / fabric.bandwidth_bytes_per_s
        key = (rank, step.peer, step.block, step.form)
        arrivals[key].append(clock.link + fabric.latency_s)

    def receive(rank: int, step: Receive) -> bool:
        key = (step.peer, rank, step.block, step.form)
        if taken[key] == len(arrivals[key]):
            return False
        clocks[rank].now = max(clocks[rank].now, arrivals[key][taken[key]])
        taken[key] += 1
        return True

    def all_gather(rank: int, step: AllGather) -> bool:
        here = meetings[step.block]
        here.setdefault(rank, clocks[rank].now)
        if len(here) < schedule.num_ranks:
            return False
        moved = block[Form.MAP] * (schedule.num_ranks - 1) / fabric.bandwidth_bytes_per_s
        clocks[rank].now = max(here.values()) + fabric.overhead_s + fabric.latency_s + moved
        return True

    def run(rank: int) -> bool:
        """Run a rank's program as far as it goes; return whether it moved."""
        clock, program = clocks[rank], schedule.programs[rank]
        begin = clock.position
        while clock.position < len(program):
            match program[clock.position]:
                case Combine():
                    clock.now += combine_s
                case Send() as step:
                    send(rank, step)
                case Receive() as step:
                    if not receive(rank, step):
                        break
                case AllGather() as step:
                    if not all_gather(rank, step):
                        break
                case Exchange(transfers):
                    if not exchange(rank, transfers):
                        break
            clock.position += 1
        return clock.position > begin

    posted: set[tuple[int, int]] = set()

    def exchange(rank: int, transfers: tuple[Send | Receive, ...]) -> bool:
        if (rank, clocks[rank].position) not in posted:
            posted.add((rank, clocks[rank].position))
            for transfer in transfers:
                if isinstance(transfer, Send):
                    send(rank, transfer)
        receives = [t for t in transfers if isinstance(t, Receive)]
        keys = [(t.peer, rank, t.block, t.form) for t in receives]
        if any(taken[key] == len(arrivals[key]) for key in keys):
            return False
        for transfer in receives:
            receive(rank, transfer)
        return True

    moved = True
    while moved:
        moved = any([run(rank) for rank in range(schedule.num_ranks)])  # noqa: C419 (run them all)
    return max(max(clock.now, clock.link) for clock in clocks)


def candidates(
    num_ranks: int, shape: StateShape, kind: str, element_size: int, fabric: Fabric
) -> Candidates:
    """Return the plans that ``auto`` weighs, each with its predicted seconds, fastest first."""
    state, parameters = map_bytes(shape, kind, element_size)
    if num_ranks == 1:
        return ((Plan("chain", 1), 0.0),)
    plans = [Plan("chain", 1 << i) for i in range(8)] + [Plan("gather", 1)]
    priced = [
        (
            p,
            predict_s(
                build_schedule(p.algorithm, num_ranks, p.num_blocks), state, parameters, fabric
            ),
        )
        for p in plans
        if p.num_blocks <= max(1, math.prod(shape[:3]))
    ]
    return tuple(sorted(priced, key=lambda item: item[1]))


@lru_cache(maxsize=512)
def choose_plan(
    num_ranks: int,
    shape: StateShape,
    kind: str,
    element_size: int,
    *,
    algorithm: str = "auto",
    num_blocks: int | None = None,
    fabric: Fabric = LOOPBACK,
) -> Plan:
    """Fill in what a caller left open.

    Args:
        num_ranks: P.
        shape: [B, H, K, V] of the states.
        kind: of the transitions.
        element_size: bytes of an element of the state.
        algorithm: a scan, or ``"auto"``.
        num_blocks: pipeline blocks, or None.
        fabric: costs to choose by.

    >>> choose_plan(4, (1, 16, 128, 128), "diagonal", 4).algorithm
    'chain'
    """
    if algorithm != "auto" and algorithm not in BUILDERS:
        raise ArgumentError(unknown_name("algorithm", algorithm, ["auto", *BUILDERS]))
    if kind not in KINDS:
        raise ArgumentError(unknown_name("transition kind", kind, KINDS))
    if algorithm in ("serial", "gather") and num_blocks is None:
        return Plan(algorithm, 1)
    if algorithm != "auto" and num_blocks is not None:
        return Plan(algorithm, num_blocks)
    ranked = candidates(num_ranks, shape, kind, element_size, fabric)
    fitting = [p for p, _ in ranked if algorithm in ("auto", p.algorithm)]
    best = fitting[0]
    return best if num_blocks is None else Plan(best.algorithm, num_blocks)
