"""A line along which maps are scanned: of ranks, or of nodes with one rank of each for every block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """One rank's place in a line, and the registers with which it takes part.

    Attributes:
        place: from 0 on, in the direction of travel.
        size: places of the line.
        blocks: those that this rank scans.
        peer: the rank that scans a block at a place.
        own: register of the map of this place.
        entering: register for the state that enters this place.
        leaving: register for the state that leaves it.
        has_left: whether ``leaving`` is there already; at the first place only.
        keeps_leaving: whether ``leaving`` is wanted even where nobody is sent it.
    """

    place: int
    size: int
    blocks: tuple[int, ...]
    peer: Callable[[int, int], int]
    own: str
    entering: str
    leaving: str
    has_left: bool = False
    keeps_leaving: bool = True

    @property
    def is_first(self) -> bool:
        """Whether the direction of travel begins here."""
        return self.place == 0

    @property
    def is_last(self) -> bool:
        """Whether nothing comes after this place."""
        return self.place == self.size - 1
