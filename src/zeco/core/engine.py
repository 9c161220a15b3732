"""The event engine: a schedule played on a fabric, message by message, in the order of time.

The choice of scan (`zeco.core.costs`) and the simulator both time scans with it. Rules:

- A program runs its steps in order, after the fabric's ``start_s``. A composition keeps it busy; so
  does starting a message, for the fabric's overhead (once for messages that are posted together
  where calls are grouped).
- A message of n bytes waits for its sender's port, which it keeps for n / bandwidth; ``latency``
  after it began to leave, it reaches its receiver's port, which it keeps as long. Ports serve
  messages in the order in which they come, and one that has rested passes ``burst_bytes`` at once.
  Messages that a rank sends to several others together pass at its ``crowd_efficiency``. A rank has
  a port inside its node and one to the other nodes, which the ranks of a node may share.
- While a message leaves and comes in, its hosts copy it, at ``host_bytes_per_s``. When it is there, it
  takes its receiver's host ``receive_overhead_s``. Programs go on meanwhile.
- Where ranks share processors, whatever keeps a program or a host busy waits for a free one.
- An all-gather starts when every rank has come.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from zeco.core.errors import ScheduleError
from zeco.core.fabric import Fabric, Link, Load, all_gather_s
from zeco.core.schedule import Schedule
from zeco.core.steps import (
    ENTERING,
    OWN,
    AllGather,
    Combine,
    Exchange,
    Form,
    Receive,
    Send,
    messages_of,
)
from zeco.core.steps import Message as Parcel
from zeco.core.topology import Nodes, check_nodes, node_of_ranks


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took place on a rank, for timelines.

    Attributes:
        rank: the composing or sending rank.
        name: ``"combine"``, ``"send"`` or ``"all-gather"``.
        start_s: its begin.
        stop_s: its end; of a message, when its last byte arrives.
        peer: the receiver of a message, else None.
        num_bytes: of a message.
    """

    rank: int
    name: str
    start_s: float
    stop_s: float
    peer: int | None = None
    num_bytes: float = 0.0


@dataclass
class Played:
    """What came of playing a schedule.

    Attributes:
        entering_s: when each rank had its whole entering state.
        finish_s: when each rank's program ended.
        sent_inside_bytes: that each rank sent inside its node.
        sent_between_bytes: that each rank sent to other nodes.
        spans: what took place, if asked for.
    """

    entering_s: list[float]
    finish_s: list[float]
    sent_inside_bytes: list[float]
    sent_between_bytes: list[float]
    spans: list[Span] = field(default_factory=list[Span])

    @property
    def end_s(self) -> float:
        """When the last rank's program ended."""
        return max(self.finish_s)


def play(
    schedule: Schedule,
    load: Load,
    fabric: Fabric,
    *,
    nodes: Sequence[int] | None = None,
    start_s: Sequence[float] | None = None,
    slowness: Sequence[float] | None = None,
    keep_spans: bool = False,
) -> Played:
    """Play a schedule.

    Args:
        schedule: the programs.
        load: what a whole state weighs.
        fabric: what messages and compositions cost.
        nodes: ranks of every node, in the order of the ranks; None means one node.
        start_s: when each rank's program may begin; None means at 0.
        slowness: by how much each rank's compositions take longer; None means 1 everywhere.
        keep_spans: whether to keep what took place, for a timeline.

    Raises:
        ScheduleError: the schedule hangs.
    """
    known = check_nodes(nodes, schedule.num_ranks)
    return _Engine(schedule, load, fabric, known, start_s, slowness, keep_spans).run()


class _Message:
    """A message under way."""

    __slots__ = ("block", "departed", "link", "num_bytes", "peer", "rank", "waits", "whole")

    def __init__(
        self, rank: int, peer: int, block: int, num_bytes: float, link: Link, waits: bool
    ) -> None:
        self.rank = rank
        self.peer = peer
        self.block = block
        self.num_bytes = num_bytes
        self.link = link
        self.waits = waits
        self.departed = 0.0
        self.whole = 0.0


_GO, _LEAVE, _REACH, _COME, _ARRIVE = range(5)
_Event = tuple[float, int, int, "_Message | int"]


class _Engine:
    """The state of one play."""

    def __init__(
        self,
        schedule: Schedule,
        load: Load,
        fabric: Fabric,
        nodes: Nodes,
        start_s: Sequence[float] | None,
        slowness: Sequence[float] | None,
        keep_spans: bool,
    ) -> None:
        ranks, blocks = schedule.num_ranks, schedule.num_blocks
        self.programs = schedule.programs
        self.fabric = fabric
        self.nodes = nodes
        self.node_of = node_of_ranks(nodes)
        self.bytes_of = {
            Form.STATE: load.state_bytes / blocks,
            Form.MAP: (load.state_bytes + load.parameter_bytes) / blocks,
        }
        self.combine_s = {
            Form.STATE: load.apply_s(fabric, blocks),
            Form.MAP: load.compose_s(fabric, blocks),
        }
        self.now = list(start_s) if start_s is not None else [0.0] * ranks
        self.slowness = slowness if slowness is not None else [1.0] * ranks
        self.position = [0] * ranks
        # A register has the same form in all blocks of a rank.
        self.forms: list[dict[str, Form]] = [{OWN: Form.MAP} for _ in range(ranks)]
        self.forms[schedule.first][ENTERING] = Form.STATE
        self.arrived: dict[tuple[int, int, int], deque[float]] = defaultdict(deque)
        self.awaited: list[set[tuple[int, int, int]]] = [set() for _ in range(ranks)]
        self.enters = [False] * ranks
        self.unsent = [0] * ranks
        # When each port is free again; at first it has rested for ever.
        self.ports: dict[tuple[bool, bool, int], float] = defaultdict(lambda: -math.inf)
        self.shared = fabric.processors is not None and fabric.processors < ranks
        self.processors = [0.0] * (fabric.processors or 0)  # when each is free, as a heap
        self.events: list[_Event] = []
        self.order = count()
        self.gathering = 0
        self.keep_spans = keep_spans
        self.played = Played(list(self.now), list(self.now), [0.0] * ranks, [0.0] * ranks)

    def run(self) -> Played:
        """Play all events."""
        for rank, start in enumerate(self.now):
            self.now[rank] = self._busy_until(start, self.fabric.start_s)
            self._put(self.now[rank], _GO, rank)
        events, fabric = self.events, self.fabric
        while events:
            time, _, kind, what = heapq.heappop(events)
            if isinstance(what, int):
                self._go_on(what)
            elif kind == _LEAVE:
                self._leave(time, what)
            elif kind == _REACH:
                self._reach(time, what)
            elif kind == _COME:
                self._put(self._busy_until(time, fabric.receive_overhead_s), _ARRIVE, what)
            else:
                self._arrive(time, what)
        for rank, program in enumerate(self.programs):
            if self.position[rank] < len(program):
                raise ScheduleError(
                    f"rank {rank} waits for ever at step {self.position[rank]} "
                    f"({program[self.position[rank]]})"
                )
        return self.played

    def _put(self, time: float, kind: int, what: _Message | int) -> None:
        heapq.heappush(self.events, (time, next(self.order), kind, what))

    def _busy_until(self, time: float, seconds: float) -> float:
        """Return when something that takes a processor from a time on is done."""
        if self.shared and seconds:
            time = max(time, heapq.heappop(self.processors))
            heapq.heappush(self.processors, time + seconds)
        return time + seconds

    def _go_on(self, rank: int) -> None:
        """Run a rank's program until it has to wait."""
        program = self.programs[rank]
        while self.position[rank] < len(program):
            began = self.now[rank]
            match program[self.position[rank]]:
                case Combine() as step:
                    self._combine(rank, step)
                case AllGather():
                    self._all_gather(rank)
                    return
                case Send() | Receive() | Exchange() as step:
                    if not self._post(rank, messages_of(step)):
                        return
            self.position[rank] += 1
            if self.shared and self.now[rank] > began:
                # Others that want a processor meanwhile come first.
                self._put(self.now[rank], _GO, rank)
                return
        self._ends(rank, self.now[rank])

    def _ends(self, rank: int, time: float) -> None:
        self.played.finish_s[rank] = max(self.played.finish_s[rank], time)

    def _combine(self, rank: int, step: Combine) -> None:
        form = self.forms[rank][step.earlier]
        self.forms[rank][step.target] = form
        start = self.now[rank]
        self.now[rank] = self._busy_until(start, self.combine_s[form] * self.slowness[rank])
        if step.target == ENTERING:
            self.played.entering_s[rank] = self.now[rank]
        if self.keep_spans:
            self.played.spans.append(Span(rank, "combine", start, self.now[rank]))

    def _post(self, rank: int, parcels: list[Parcel]) -> bool:
        """Start messages; return whether the program may go on already."""
        overhead_s = self.fabric.overhead_s
        if self.fabric.grouped_calls and any(isinstance(p[0], Send) for p in parcels):
            self.now[rank] = self._busy_until(self.now[rank], overhead_s)
            overhead_s = 0.0
        enters = False
        crowded = sum(isinstance(p[0], Send) for p in parcels) > 1
        efficiency = self.fabric.crowd_efficiency if crowded else 1.0
        for parcel in parcels:
            if isinstance(parcel[0], Send):
                self.now[rank] = self._busy_until(self.now[rank], overhead_s)
                self._send(rank, parcel, efficiency)
                continue
            for transfer in parcel:
                self.forms[rank][transfer.register] = transfer.form
                enters |= transfer.register == ENTERING
            address = (parcel[0].peer, rank, parcel[0].block)
            if self.arrived[address]:
                self.now[rank] = max(self.now[rank], self.arrived[address].popleft())
            else:
                self.awaited[rank].add(address)
        self.enters[rank] = enters
        if self.awaited[rank] or self.unsent[rank]:
            return False
        self._note_entering(rank)
        return True

    def _note_entering(self, rank: int) -> None:
        """Note the time if a step that is over has brought something of the entering state."""
        if self.enters[rank]:
            self.played.entering_s[rank] = self.now[rank]
            self.enters[rank] = False

    def _send(self, rank: int, parcel: Parcel, efficiency: float) -> None:
        num_bytes = sum(self.bytes_of[transfer.form] for transfer in parcel)
        peer, block = parcel[0].peer, parcel[0].block
        inside = self.node_of[rank] == self.node_of[peer]
        link = self.fabric.inside if inside else self.fabric.outside
        sent = self.played.sent_inside_bytes if inside else self.played.sent_between_bytes
        sent[rank] += num_bytes
        link = Link(link.latency_s, link.bandwidth_bytes_per_s * efficiency)
        waits = self.fabric.blocking_sends
        self.unsent[rank] += waits
        message = _Message(rank, peer, block, num_bytes, link, waits)
        self._put(self.now[rank], _LEAVE, message)

    def _port(self, rank: int, peer: int, *, receiving: bool) -> tuple[bool, bool, int]:
        """Return the port of a rank that a message with a peer passes."""
        inside = self.node_of[rank] == self.node_of[peer]
        shared = self.fabric.shared_nic and not inside
        return receiving, inside, self.node_of[rank] if shared else rank

    def _pass(self, time: float, message: _Message, port: tuple[bool, bool, int]) -> float:
        """Pass a message through a port and its host; return when its last byte is through."""
        bytes_per_s = message.link.bandwidth_bytes_per_s
        begun = max(time - self.fabric.burst_bytes / bytes_per_s, self.ports[port])
        self.ports[port] = begun + message.num_bytes / bytes_per_s
        if self.fabric.host_bytes_per_s is not None:
            time = self._busy_until(time, message.num_bytes / self.fabric.host_bytes_per_s)
        return max(time, self.ports[port])

    def _leave(self, time: float, message: _Message) -> None:
        """Let a message leave when its sender's port is free."""
        port = self._port(message.rank, message.peer, receiving=False)
        message.departed = max(time, self.ports[port])
        latency_s = message.link.latency_s
        message.whole = self._pass(time, message, port) + latency_s
        self._put(message.departed + latency_s, _REACH, message)

    def _reach(self, time: float, message: _Message) -> None:
        """Let a message's first byte in when its receiver's port is free."""
        port = self._port(message.peer, message.rank, receiving=True)
        self._put(max(self._pass(time, message, port), message.whole), _COME, message)

    def _arrive(self, time: float, message: _Message) -> None:
        """Hand a message over, and wake who waits for it."""
        if self.keep_spans:
            self.played.spans.append(
                Span(message.rank, "send", message.departed, time, message.peer, message.num_bytes)
            )
        self._ends(message.rank, time)
        if message.waits:
            self.unsent[message.rank] -= 1
            self._wake(message.rank, time)
        address = (message.rank, message.peer, message.block)
        if address in self.awaited[message.peer]:
            self.awaited[message.peer].remove(address)
            self._wake(message.peer, time)
        else:
            self.arrived[address].append(time)

    def _wake(self, rank: int, time: float) -> None:
        """Note that something which a rank waits for has come; go on if it was the last."""
        self.now[rank] = max(self.now[rank], time)
        if not self.awaited[rank] and self.unsent[rank] == 0:
            self._note_entering(rank)
            self.position[rank] += 1
            self._go_on(rank)

    def _all_gather(self, rank: int) -> None:
        """Note that a rank has come; if it is the last, gather and let all go on."""
        self.gathering += 1
        if self.gathering < len(self.programs):
            return
        self.gathering = 0
        start = max(self.now)
        for each, program in enumerate(self.programs):
            step = program[self.position[each]]
            if not isinstance(step, AllGather):
                raise ScheduleError(f"rank {each} isn't at an all-gather, but at {step}")
            self.forms[each].update(zip(step.targets, step.forms, strict=True))
            node_size, one = self.nodes[self.node_of[each]], self.bytes_of[Form.MAP]
            stop = start + all_gather_s(self.fabric, len(self.programs), node_size, one)
            self.now[each] = stop
            self.enters[each] = ENTERING in step.targets
            self._note_entering(each)
            self.played.sent_inside_bytes[each] += (node_size - 1) * one
            self.played.sent_between_bytes[each] += (len(self.programs) - node_size) * one
            if self.keep_spans:
                self.played.spans.append(Span(each, "all-gather", start, stop))
            self.position[each] += 1
            self._put(stop, _GO, each)
