"""Scans as data: for every rank, the ordered steps that bring it its entering state.

A step works on *registers*, one value a block. A value is a *map* (transition and update) or a *state*
(the update alone: everything from the start of the sequence on). Registers that every program knows:

| register | value |
| --- | --- |
| ``own`` | this rank's map, given |
| ``entering`` | the state that enters this rank; given on the first rank, to be found elsewhere |
| ``leaving`` | the state that leaves it, to be found |

The runtime executes these steps (`zeco.collectives`), the checker proves them free of deadlock and
complete (`zeco.core.checker`), the cost model prices them (`zeco.core.costs`). There is no second
copy of an algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from zeco.core.errors import ArgumentError, unknown_name

OWN, ENTERING, LEAVING = "own", "entering", "leaving"


class Form(Enum):
    """What a message carries of a value: a state is an update alone, a map has its transition too."""

    STATE = "state"
    MAP = "map"


@dataclass(frozen=True, slots=True)
class Send:
    """Send one block of a register to another rank."""

    peer: int
    block: int
    register: str
    form: Form


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive one block from another rank into a register."""

    peer: int
    block: int
    register: str
    form: Form


@dataclass(frozen=True, slots=True)
class Combine:
    """Put the composition ``later ∘ earlier`` of two registers into a third."""

    block: int
    target: str
    later: str
    earlier: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """Transfers that are posted together; the step ends when all have."""

    transfers: tuple[Send | Receive, ...]


@dataclass(frozen=True, slots=True)
class AllGather:
    """Give every rank one block of every rank's ``register``, in map form.

    Rank r's value lands in the register ``targets[r]`` and is what ``forms[r]`` says.
    """

    block: int
    register: str
    targets: tuple[str, ...]
    forms: tuple[Form, ...]


Transfer = Send | Receive
Step = Send | Receive | Combine | Exchange | AllGather


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


def chain(num_ranks: int, num_blocks: int) -> list[list[Step]]:
    """The paper's All-Scan: receive a block, apply the own map, pass it on at once.

    Sent by a rank: one state. Serial steps: P - 1 + num_blocks - 1 block hops.
    """
    programs: list[list[Step]] = []
    for rank in range(num_ranks):
        steps: list[Step] = []
        for block in range(num_blocks):
            if rank > 0:
                steps.append(Receive(rank - 1, block, ENTERING, Form.STATE))
            steps.append(Combine(block, LEAVING, OWN, ENTERING))
            if rank < num_ranks - 1:
                steps.append(Send(rank + 1, block, LEAVING, Form.STATE))
        programs.append(steps)
    return programs


def serial(num_ranks: int, num_blocks: int) -> list[list[Step]]:
    """The chain in one block, as LASP-1 passes its state: each hop waits for the whole one before."""
    if num_blocks != 1:
        raise ArgumentError(f"num_blocks={num_blocks}: 'serial' has one block; use 'chain'")
    return chain(num_ranks, 1)


def gather(num_ranks: int, num_blocks: int) -> list[list[Step]]:
    """LASP-2: all-gather the maps, then every rank folds those before it.

    Received by a rank: P - 1 maps. Serial steps: one all-gather.
    """
    # The first rank knows its entering state: what it contributes is a state already.
    forms = (Form.STATE, *[Form.MAP] * (num_ranks - 1))
    programs: list[list[Step]] = []
    for rank in range(num_ranks):
        targets = [f"gathered{r}" for r in range(num_ranks)]
        if rank == 1:
            targets[0] = ENTERING
        steps: list[Step] = []
        for block in range(num_blocks):
            if rank == 0:
                steps.append(Combine(block, LEAVING, OWN, ENTERING))
            register = LEAVING if rank == 0 else OWN
            steps.append(AllGather(block, register, tuple(targets), forms))
            if rank == 0:
                continue
            prefix = targets[0]
            for earlier in range(1, rank):
                target = ENTERING if earlier == rank - 1 else f"prefix{earlier}"
                steps.append(Combine(block, target, targets[earlier], prefix))
                prefix = target
            steps.append(Combine(block, LEAVING, OWN, ENTERING))
        programs.append(steps)
    return programs


BUILDERS: dict[str, Callable[[int, int], list[list[Step]]]] = {
    "chain": chain,
    "serial": serial,
    "gather": gather,
}


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


@lru_cache(maxsize=512)
def build_schedule(
    algorithm: str, num_ranks: int, num_blocks: int = 1, *, reverse: bool = False
) -> Schedule:
    """Build the programs of a scan.

    Args:
        algorithm: one of `BUILDERS`.
        num_ranks: P, at least 1.
        num_blocks: pipeline blocks, at least 1.
        reverse: whether the state travels from the last rank to the first.

    Raises:
        ArgumentError: an unknown algorithm, or a number below 1.

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
    programs = BUILDERS[algorithm](num_ranks, num_blocks)
    if reverse:
        programs = [[_mirrored(s, num_ranks) for s in steps] for steps in reversed(programs)]
    return Schedule(
        algorithm, num_ranks, num_blocks, reverse, tuple(tuple(steps) for steps in programs)
    )
