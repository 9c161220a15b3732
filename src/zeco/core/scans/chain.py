"""The paper's All-Scan: only states travel, block after block, from one rank to the next."""

from __future__ import annotations

from zeco.core.errors import ArgumentError
from zeco.core.scans.line import Member
from zeco.core.steps import (
    ENTERING,
    LEAVING,
    OWN,
    Combine,
    Form,
    Programs,
    Receive,
    Send,
    Step,
)


def chain(num_ranks: int, num_blocks: int) -> Programs:
    """Receive a block, apply the own map, pass it on at once (ZeCO, arXiv:2507.01004, algorithm 1).

    Sent by a rank: one state. Serial steps: P - 1 + num_blocks - 1 block hops.
    """
    blocks = tuple(range(num_blocks))
    return [
        chain_along(
            Member(place, num_ranks, blocks, lambda other, _: other, OWN, ENTERING, LEAVING)
        )
        for place in range(num_ranks)
    ]


def serial(num_ranks: int, num_blocks: int) -> Programs:
    """The chain in one block, as LASP-1 passes its state: each hop waits for the whole one before."""
    if num_blocks != 1:
        raise ArgumentError(f"num_blocks={num_blocks}: 'serial' has one block; use 'chain'")
    return chain(num_ranks, 1)


def chain_along(member: Member) -> list[Step]:
    """Return a member's steps of a chain along its line."""
    steps: list[Step] = []
    for block in member.blocks:
        if not member.is_first:
            peer = member.peer(member.place - 1, block)
            steps.append(Receive(peer, block, member.entering, Form.STATE))
        if not member.has_left and (member.keeps_leaving or not member.is_last):
            steps.append(Combine(block, member.leaving, member.own, member.entering))
        if not member.is_last:
            peer = member.peer(member.place + 1, block)
            steps.append(Send(peer, block, member.leaving, Form.STATE))
    return steps
