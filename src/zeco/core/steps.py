"""Steps of a rank's program, and the registers that they work on.

A register has one value a block. A value is a *map* (transition and update) or a *state* (the update
alone: everything from the start of the sequence on). Registers that every program knows:

| register | value |
| --- | --- |
| ``own`` | this rank's map, given |
| ``entering`` | the state that enters this rank; given on the first rank, to be found elsewhere |
| ``leaving`` | the state that leaves it, to be found |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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
    """Transfers that are posted together; the step ends when all have.

    Those to, and those from, the same peer travel as one message, in their order here.
    """

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
Message = tuple[Transfer, ...]
"""Transfers that travel together, all sent or all received; its first block names it."""

Programs = list[list[Step]]
"""Every rank's steps in order."""


def messages_of(step: Step) -> list[Message]:
    """Return the messages of a step, in the order of their first transfers.

    >>> sends = [Send(peer, block, OWN, Form.MAP) for peer, block in ((1, 0), (2, 1), (1, 2))]
    >>> [[t.block for t in message] for message in messages_of(Exchange(tuple(sends)))]
    [[0, 2], [1]]
    """
    match step:
        case Send() | Receive():
            return [(step,)]
        case Exchange(transfers):
            together: dict[tuple[type[Transfer], int], list[Transfer]] = {}
            for transfer in transfers:
                together.setdefault((type(transfer), transfer.peer), []).append(transfer)
            return [tuple(message) for message in together.values()]
        case _:
            return []
