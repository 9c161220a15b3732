"""Scans for clusters of nodes: few bytes and few hops between nodes, the rest inside.

Each block of the state has an *owner* in every node. The owners of a node are as evenly spread over
its ranks as the blocks allow, so that each rank carries about 1/G of what crosses between nodes.

    1. inside: every rank gives each owner its map's block          (one exchange)
    2. the owner composes the node's map
    3. between: the owners of a block, one a node, scan their nodes' maps
    4. the owner passes the entering state through the node's maps, rank by rank
    5. inside: the owner gives every rank its entering state's block (one exchange)

Where there is one node, steps 1, 4 and 5 are left: a scan of two exchanges, whatever P is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from zeco.core.scans.chain import chain_along
from zeco.core.scans.doubling import doubling_along
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

Along = Callable[[Member], list[Step]]


def two_level(num_blocks: int, nodes: tuple[int, ...]) -> Programs:
    """Two-level scan whose nodes pass states in a chain.

    Sent by a rank between nodes: 1/G of a state; inside: a map and a state. Serial steps: two
    exchanges inside a node and nodes - 1 hops.
    """
    return _programs(num_blocks, nodes, chain_along)


def two_level_doubling(num_blocks: int, nodes: tuple[int, ...]) -> Programs:
    """Two-level scan whose nodes compose their maps by doubling.

    Sent by a rank between nodes: at most log2(nodes)/G maps; inside: a map and a state. Serial
    steps: two exchanges inside a node and ceil(log2(nodes)) rounds.
    """
    return _programs(num_blocks, nodes, doubling_along)


def _programs(num_blocks: int, nodes: tuple[int, ...], along: Along) -> Programs:
    starts = [sum(nodes[:node]) for node in range(len(nodes))]
    return [
        _RankPart(num_blocks, nodes, starts, node, local).program(along)
        for node, size in enumerate(nodes)
        for local in range(size)
    ]


@dataclass(frozen=True)
class _RankPart:
    """What one rank does.

    Attributes:
        num_blocks: blocks of a state.
        nodes: ranks of every node.
        starts: first rank of every node.
        node: this rank's.
        local: this rank's number in its node.
    """

    num_blocks: int
    nodes: tuple[int, ...]
    starts: list[int]
    node: int
    local: int

    @property
    def size(self) -> int:
        """Ranks of this node."""
        return self.nodes[self.node]

    @property
    def knows_entering(self) -> bool:
        """Whether this is the first rank of all."""
        return self.node == 0 and self.local == 0

    @cached_property
    def owned(self) -> tuple[int, ...]:
        """The blocks that this rank owns in its node."""
        return tuple(range(self.local, self.num_blocks, self.size))

    @property
    def others(self) -> list[int]:
        """The node's other ranks, each rank's own next ones first, so that they don't all crowd one."""
        return [(self.local + step) % self.size for step in range(1, self.size)]

    def owner(self, node: int, block: int) -> int:
        """Return the rank that owns a block in a node."""
        return self.starts[node] + block % self.nodes[node]

    def part(self, local: int) -> str:
        """Return the register of the map of a rank of this node."""
        return OWN if local == self.local else f"part{local}"

    def state(self, local: int) -> str:
        """Return the register of the state that enters a rank of this node."""
        if local == self.local:
            return ENTERING
        if self.knows_entering and local == 1:
            return LEAVING
        return f"state{local}"

    def program(self, along: Along) -> list[Step]:
        """Return all steps."""
        steps: list[Step] = []
        blocks = range(self.num_blocks)
        if self.knows_entering:
            steps += [Combine(b, LEAVING, OWN, ENTERING) for b in blocks]
        steps += _exchange(self._collect())
        if self.owned:
            # The first node's states don't wait for another node, but the others' wait for them.
            between, walk = self._node_map() + along(self._member()), self._walk()
            steps += walk + between if self.node == 0 else between + walk
        steps += _exchange(self._hand_out())
        if not self.knows_entering:
            steps += [Combine(b, LEAVING, OWN, ENTERING) for b in blocks]
        return steps

    def _collect(self) -> list[Transfer]:
        """Step 1. What the first rank of all gives is a state already: that which leaves it."""
        register, form = (LEAVING, Form.STATE) if self.knows_entering else (OWN, Form.MAP)
        transfers: list[Transfer] = [
            Send(self.owner(self.node, b), b, register, form)
            for other in self.others
            for b in range(other, self.num_blocks, self.size)
        ]
        for other in self.others:
            first = self.node == 0 and other == 0
            target = self.state(1) if first else self.part(other)
            form = Form.STATE if first else Form.MAP
            rank = self.starts[self.node] + other
            transfers += [Receive(rank, b, target, form) for b in self.owned]
        return transfers

    def _node_map(self) -> list[Step]:
        """Step 2, where a later node wants it; in the first node it is a state."""
        if self.node in (0, len(self.nodes) - 1):
            return []
        steps: list[Step] = []
        for block in self.owned:
            upto = self.part(0)
            for local in range(1, self.size):
                steps.append(Combine(block, f"upto{local}", self.part(local), upto))
                upto = f"upto{local}"
        return steps

    def _member(self) -> Member:
        """Step 3."""
        own = self.part(0) if self.size == 1 else f"upto{self.size - 1}"
        return Member(
            self.node,
            len(self.nodes),
            self.owned,
            self.owner,
            own,
            self.state(0),
            self.state(self.size) if self.node == 0 else "node_leaving",
            has_left=self.node == 0,
            keeps_leaving=False,
        )

    def _walk(self) -> list[Step]:
        """Step 4."""
        first = 1 if self.node == 0 else 0
        # The first node needs its leaving state too, if there is a node to send it to.
        stop = self.size if self.node == 0 and len(self.nodes) > 1 else self.size - 1
        return [
            Combine(block, self.state(local + 1), self.part(local), self.state(local))
            for block in self.owned
            for local in range(first, stop)
        ]

    def _hand_out(self) -> list[Transfer]:
        """Step 5."""
        start = self.starts[self.node]
        transfers: list[Transfer] = [
            Send(start + other, b, self.state(other), Form.STATE)
            for b in self.owned
            for other in self.others
            if not (self.node == 0 and other == 0)
        ]
        if not self.knows_entering:
            transfers += [
                Receive(self.owner(self.node, b), b, ENTERING, Form.STATE)
                for other in self.others
                for b in range(other, self.num_blocks, self.size)
            ]
        return transfers


def _exchange(transfers: list[Transfer]) -> list[Step]:
    return [Exchange(tuple(transfers))] if transfers else []
