"""Hillis–Steele over maps: the ranks that a prefix covers double with every round."""

from __future__ import annotations

from zeco.core.scans.line import Member
from zeco.core.steps import (
    ENTERING,
    LEAVING,
    OWN,
    Combine,
    Exchange,
    Form,
    Programs,
    Receive,
    Send,
    Step,
    Transfer,
)


def doubling(num_ranks: int, num_blocks: int) -> Programs:
    """Exclusive scan in ceil(log2 P) rounds, for any P (Hillis and Steele, 1986).

    In the round of distance d a rank sends the composition of its d last maps to the rank d places
    on. It differs from the textbook's in that it is exclusive, and in that a prefix which starts
    at the first rank is a state, so that less is sent and composed.

    Sent by a rank: at most ceil(log2 P) maps. The blocks of a round travel as one message,
    so they pipeline nothing.
    """
    blocks = tuple(range(num_blocks))
    programs: Programs = []
    for place in range(num_ranks):
        member = Member(place, num_ranks, blocks, lambda other, _: other, OWN, ENTERING, LEAVING)
        programs.append(doubling_along(member))
    return programs


def doubling_along(member: Member) -> list[Step]:
    """Return a member's steps of a doubling scan along its line.

    Before the round of distance d, ``inclusive`` covers the places ``(place - d, place]`` and
    ``exclusive`` covers ``(place - d, place)``; both are states where they would start before the
    first place.
    """
    steps: list[Step] = []
    place, size = member.place, member.size
    inclusive, exclusive = member.own, ""
    if member.is_first:
        inclusive = member.leaving
        if not member.has_left and (member.keeps_leaving or size > 1):
            steps += [
                Combine(b, member.leaving, member.own, member.entering) for b in member.blocks
            ]
    distance = 1
    while distance < size:
        transfers: list[Transfer] = []
        arrived = _arrival_register(member, distance)
        if place + distance < size:
            form = Form.STATE if place < distance else Form.MAP
            transfers += [
                Send(member.peer(place + distance, b), b, inclusive, form) for b in member.blocks
            ]
        if place >= distance:
            form = Form.STATE if place < 2 * distance else Form.MAP
            transfers += [
                Receive(member.peer(place - distance, b), b, arrived, form) for b in member.blocks
            ]
        if transfers:
            steps.append(Exchange(tuple(transfers)))
        if place >= distance:
            ends = place < 2 * distance
            earlier, exclusive = exclusive, arrived
            if earlier:
                exclusive = member.entering if ends else f"exclusive{distance}"
                steps += [Combine(b, exclusive, earlier, arrived) for b in member.blocks]
            sends_on = place + 2 * distance < size
            inclusive = member.leaving if ends else f"inclusive{distance}"
            if sends_on or (ends and member.keeps_leaving):
                steps += [Combine(b, inclusive, member.own, exclusive) for b in member.blocks]
        distance *= 2
    return steps


def _arrival_register(member: Member, distance: int) -> str:
    """Return where a round's prefix arrives: it is the whole answer for the second place alone."""
    if distance == 1 and member.place == 1:
        return member.entering
    return f"arrived{distance}"
