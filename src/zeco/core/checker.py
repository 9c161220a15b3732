"""Proof, by running it on symbols, that a schedule ends and gives every rank its entering state.

Values are intervals of ranks: a map of ranks [i, j) or, where it starts before the first rank, a
state. Sends are taken to block until their receive is posted, the strictest rule of any transport,
so a schedule that passes runs on all of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from zeco.core.errors import ScheduleError
from zeco.core.schedule import (
    ENTERING,
    LEAVING,
    OWN,
    AllGather,
    Combine,
    Exchange,
    Form,
    Receive,
    Schedule,
    Send,
    Step,
    Transfer,
)
from zeco.core.steps import Message, messages_of

BEFORE_ALL = -1
"""Where a state's interval begins: with the initial state, before the first rank."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The composition of the maps of ranks [start, stop), in the direction of travel."""

    start: int
    stop: int

    @property
    def form(self) -> Form:
        """A state if it begins with the initial state, else a map."""
        return Form.STATE if self.start == BEFORE_ALL else Form.MAP


class _Rank:
    """One rank's program, registers and posted transfers."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.rank = rank
        self.place = schedule.num_ranks - 1 - rank if schedule.reverse else rank
        self.steps = schedule.programs[rank]
        self.position = 0
        self.sends: dict[tuple[int, int], tuple[Send, Message]] = {}
        self.receives: dict[tuple[int, int], tuple[Receive, Message]] = {}
        self.posted = False
        self.values: dict[tuple[str, int], Interval] = {}
        for block in range(schedule.num_blocks):
            self.values[OWN, block] = Interval(self.place, self.place + 1)
            if self.place == 0:
                self.values[ENTERING, block] = Interval(BEFORE_ALL, 0)

    @property
    def step(self) -> Step | None:
        """The step that this rank is at; None at the end."""
        return self.steps[self.position] if self.position < len(self.steps) else None

    def where(self) -> str:
        """Name the step that this rank is at, or its last one."""
        if self.step is None:
            last = self.steps[-1] if self.steps else "an empty program"
            return f"rank {self.rank}, at its end, after step {len(self.steps) - 1} ({last})"
        return f"rank {self.rank}, step {self.position} ({self.step})"

    def read(self, register: str, block: int) -> Interval:
        """Return a register's value."""
        try:
            return self.values[register, block]
        except KeyError:
            raise ScheduleError(
                f"{self.where()} reads {register!r}, block {block}, before anything is in it"
            ) from None

    def combine(self, step: Combine) -> None:
        """Compose two neighbouring intervals."""
        later, earlier = self.read(step.later, step.block), self.read(step.earlier, step.block)
        if earlier.stop != later.start:
            raise ScheduleError(
                f"{self.where()} composes ranks [{later.start}, {later.stop}) after "
                f"[{earlier.start}, {earlier.stop}), which aren't neighbours in this order"
            )
        self.values[step.target, step.block] = Interval(earlier.start, later.stop)

    def post(self, transfer: Transfer, message: Message) -> None:
        """Put a transfer of a message up for its peer to find."""
        table = self.sends if isinstance(transfer, Send) else self.receives
        key = (transfer.peer, transfer.block)
        if key in table:
            raise ScheduleError(
                f"{self.where()} has two transfers of block {transfer.block} with rank "
                f"{transfer.peer} at once, which can't be told apart"
            )
        table[key] = transfer, message  # type: ignore[assignment]


def check_schedule(schedule: Schedule) -> None:
    """Refuse a schedule that would hang, lose a block or combine maps in a wrong order.

    Takes time in proportion to the number of steps.

    Raises:
        ScheduleError: naming the rank and step at fault.
    """
    _Check(schedule).run()


class _Check:
    """All ranks, and which of them can go on."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ranks = [_Rank(schedule, rank) for rank in range(schedule.num_ranks)]
        self.ready = deque(self.ranks)
        self.gathering = 0

    def run(self) -> None:
        """Run all programs to their ends and look at what they leave."""
        while self.ready:
            self._go_on(self.ready.popleft())
        stuck = [r.where() for r in self.ranks if r.step is not None]
        if stuck:
            raise ScheduleError(f"deadlock: every unfinished rank waits: {'; '.join(stuck)}")
        for rank in self.ranks:
            for block in range(self.schedule.num_blocks):
                for register, stop in ((ENTERING, rank.place), (LEAVING, rank.place + 1)):
                    found = rank.values.get((register, block))
                    if found != Interval(BEFORE_ALL, stop):
                        raise ScheduleError(
                            f"{rank.where()}, has {found} in {register!r}, block {block}, "
                            f"instead of the state after {stop} ranks"
                        )

    def _go_on(self, rank: _Rank) -> None:
        """Run a rank's steps until it has to wait."""
        while (step := rank.step) is not None:
            match step:
                case Combine():
                    rank.combine(step)
                case AllGather():
                    if not rank.posted:
                        rank.posted = True
                        self.gathering += 1
                    if self.gathering < len(self.ranks):
                        return
                    self._all_gather()
                    return
                case Send() | Receive() | Exchange():
                    if not self._through(rank, messages_of(step)):
                        return
            rank.position += 1
            rank.posted = False

    def _through(self, rank: _Rank, messages: list[Message]) -> bool:
        """Post a step's transfers once, and return whether all have found their peers'."""
        if not rank.posted:
            rank.posted = True
            for message in messages:
                for transfer in message:
                    if not 0 <= transfer.peer < len(self.ranks) or transfer.peer == rank.rank:
                        raise ScheduleError(
                            f"{rank.where()} names rank {transfer.peer} as its peer"
                        )
                    rank.post(transfer, message)
            for message in messages:
                for transfer in message:
                    self._match(rank, transfer)
        return not rank.sends and not rank.receives

    def _match(self, rank: _Rank, mine: Transfer) -> None:
        """Move the value if the peer has posted the other end; wake the peer when it can go on."""
        peer = self.ranks[mine.peer]
        source, target = (rank, peer) if isinstance(mine, Send) else (peer, rank)
        outgoing = source.sends.get((target.rank, mine.block))
        incoming = target.receives.get((source.rank, mine.block))
        if outgoing is None or incoming is None:
            return
        (sent, sent_with), (received, received_with) = outgoing, incoming
        blocks = [[t.block for t in message] for message in (sent_with, received_with)]
        if blocks[0] != blocks[1]:
            raise ScheduleError(
                f"{source.where()} sends blocks {blocks[0]} as one message to {target.where()}, "
                f"which expects blocks {blocks[1]}"
            )
        value = source.read(sent.register, sent.block)
        if not value.form == sent.form == received.form:
            raise ScheduleError(
                f"{source.where()} sends a {value.form.value} as a {sent.form.value} to "
                f"{target.where()}, which expects a {received.form.value}"
            )
        target.values[received.register, received.block] = value
        del source.sends[target.rank, mine.block]
        del target.receives[source.rank, mine.block]
        if not peer.sends and not peer.receives:
            self.ready.append(peer)

    def _all_gather(self) -> None:
        """Run the all-gather that every rank is at."""
        gathers = [r.step for r in self.ranks if isinstance(r.step, AllGather)]
        if len({s.block for s in gathers}) > 1:
            raise ScheduleError(
                "ranks gather different blocks: " + "; ".join(r.where() for r in self.ranks)
            )
        values = [r.read(s.register, s.block) for r, s in zip(self.ranks, gathers, strict=True)]
        for rank, step in zip(self.ranks, gathers, strict=True):
            for value, target, form in zip(values, step.targets, step.forms, strict=True):
                if value.form != form:
                    raise ScheduleError(
                        f"{rank.where()} expects a {form.value} in {target!r}, but gets a "
                        f"{value.form.value}"
                    )
                rank.values[target, step.block] = value
            rank.position += 1
            rank.posted = False
            self.ready.append(rank)
        self.gathering = 0
