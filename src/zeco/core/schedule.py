"""Scans as data: for every rank, the ordered steps that bring it its entering state.

The runtime executes these steps (`zeco.collectives`), the checker proves them free of deadlock and
complete (`zeco.core.checker`), the engine times them for the choice of scan and for the simulator
(`zeco.core.engine`). There is no second copy of an algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from zeco.core.errors import ArgumentError, unknown_name
from zeco.core.scans.chain import chain, serial
from zeco.core.scans.doubling import doubling
from zeco.core.scans.gather import gather
from zeco.core.scans.two_level import two_level, two_level_doubling
from zeco.core.steps import (
    ENTERING,
    LEAVING,
    OWN,
    AllGather,
    Combine,
    Exchange,
    Form,
    Programs,
    Receive,
    Send,
    Step,
    Transfer,
)
from zeco.core.topology import Nodes, check_nodes

__all__ = [
    "BUILDERS",
    "DEVICE_CHAIN",
    "ENTERING",
    "LEAVING",
    "OWN",
    "AllGather",
    "Combine",
    "Exchange",
    "Form",
    "Receive",
    "Schedule",
    "Send",
    "Step",
    "Transfer",
    "build_schedule",
]


@dataclass(frozen=True)
class Schedule:
    """The programs of all ranks for one scan.

    Attributes:
        algorithm: the scan's name.
        num_ranks: P.
        num_blocks: pipeline blocks that a state is cut into.
        reverse: whether the state travels from the last rank to the first.
        programs: each rank's steps in order.
    """

    algorithm: str
    num_ranks: int
    num_blocks: int
    reverse: bool
    programs: tuple[tuple[Step, ...], ...]

    @property
    def first(self) -> int:
        """The rank at which the direction of travel begins."""
        return self.num_ranks - 1 if self.reverse else 0


Builder = Callable[[int, Nodes], Programs]
"""From the number of blocks and the nodes, in the direction of travel, to all programs."""

BUILDERS: dict[str, Builder] = {
    "chain": lambda num_blocks, nodes: chain(sum(nodes), num_blocks),
    "serial": lambda num_blocks, nodes: serial(sum(nodes), num_blocks),
    "gather": lambda num_blocks, nodes: gather(sum(nodes), num_blocks),
    "doubling": lambda num_blocks, nodes: doubling(sum(nodes), num_blocks),
    "two_level": two_level,
    "two_level_doubling": two_level_doubling,
}

DEVICE_CHAIN = "device_chain"
"""The chain inside CUDA kernels, which has no schedule: see `zeco.collectives.device_ring`."""


def _mirrored_transfer(step: Transfer, num_ranks: int) -> Transfer:
    return replace(step, peer=num_ranks - 1 - step.peer)


def _mirrored(step: Step, num_ranks: int) -> Step:
    match step:
        case Send() | Receive():
            return _mirrored_transfer(step, num_ranks)
        case Exchange(transfers):
            return Exchange(tuple(_mirrored_transfer(t, num_ranks) for t in transfers))
        case AllGather(block, register, targets, forms):
            return AllGather(block, register, targets[::-1], forms[::-1])
        case Combine():
            return step


def build_schedule(
    algorithm: str,
    num_ranks: int,
    num_blocks: int = 1,
    *,
    reverse: bool = False,
    nodes: Sequence[int] | None = None,
) -> Schedule:
    """Build the programs of a scan.

    Args:
        algorithm: one of `BUILDERS`.
        num_ranks: P, at least 1.
        num_blocks: pipeline blocks, at least 1.
        reverse: whether the state travels from the last rank to the first.
        nodes: ranks of every node in the order of the ranks, for the two-level scans (the others
            are the same on any nodes); None means one node.

    Raises:
        ArgumentError: an unknown algorithm, a number below 1, or nodes that don't hold P ranks.

    >>> for step in build_schedule("chain", 3, 1).programs[1]:
    ...     print(type(step).__name__)
    Receive
    Combine
    Send
    """
    if algorithm not in BUILDERS:
        raise ArgumentError(unknown_name("algorithm", algorithm, ["auto", *BUILDERS]))
    if num_ranks < 1 or num_blocks < 1:
        raise ArgumentError(
            f"num_ranks={num_ranks}, num_blocks={num_blocks}: both must be at least 1"
        )
    known = check_nodes(nodes, num_ranks)
    return _build(algorithm, num_ranks, num_blocks, reverse, known)


@lru_cache(maxsize=64)
def _build(
    algorithm: str, num_ranks: int, num_blocks: int, reverse: bool, nodes: Nodes
) -> Schedule:
    programs = BUILDERS[algorithm](num_blocks, nodes[::-1] if reverse else nodes)
    if reverse:
        programs = [[_mirrored(s, num_ranks) for s in steps] for steps in reversed(programs)]
    return Schedule(
        algorithm, num_ranks, num_blocks, reverse, tuple(tuple(steps) for steps in programs)
    )
