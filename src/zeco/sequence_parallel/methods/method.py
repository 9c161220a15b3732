"""What a sequence-parallel method is: when a rank's passes run around which scans.

A rank's slots are visited by the state in a zigzag: up the ranks through everyone's slot 0, down
through everyone's slot 1, and so on. Where the direction turns, the state passes from one slot of a rank
to its next::

    slot 0   rank 0 ──▶ rank 1 ──▶ rank 2 ┐
    slot 1   rank 0 ◀── rank 1 ◀── rank 2 ┘

With the contiguous layout there is one slot, and no turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from zeco.collectives.transport import Transport
from zeco.operators.segment import Gradients, Outcome, Segment


def do_nothing() -> None:
    """Do nothing: a caller without work for the time in which a scan is in flight."""


class Method(Protocol):
    """A way to find entering states; `zeco.operators.segment.Exchange` says what each part gets."""

    def forward(
        self,
        transport: Transport,
        segments: Sequence[Segment],
        initial: Tensor,
        initials: Sequence[Tensor | None],
        meanwhile: Callable[[], None] = do_nothing,
    ) -> Outcome:
        """Find the entering states and run the segments.

        ``meanwhile`` is work of the caller's that needs none of this. It is called in any case,
        while the scans are in flight if the method has such a time and the work can't delay them.
        """
        ...

    def backward(
        self,
        transport: Transport,
        segments: Sequence[Segment],
        entering: Sequence[Tensor],
        initials: Sequence[Tensor | None],
        d_o: Sequence[Tensor],
        d_finals: Sequence[Tensor],
    ) -> list[Gradients]:
        """Return all gradients, slot by slot."""
        ...


def travels_down(slot: int) -> bool:
    """Whether the state visits a slot from the last rank to the first."""
    return slot % 2 == 1


def is_turn(transport: Transport, slot: int) -> bool:
    """Whether the state enters a slot on this rank from this rank's slot before."""
    return slot > 0 and transport.rank == (transport.size - 1 if travels_down(slot) else 0)


def add_to_last(d_finals: Tensor | None, arrived: Tensor) -> Tensor:
    """Add what the later ranks sent back to the gradient of the leaving state, the last final.

    None stands for no gradient of the one final that there is.
    """
    if d_finals is None:
        return arrived.unsqueeze(0)
    d_finals = d_finals.clone()
    d_finals[-1] += arrived
    return d_finals
