"""Proof, by running it on symbols, that a schedule ends and gives every rank its entering state.

Values are intervals of ranks: a map of ranks [i, j) or, where it starts before the first rank, a
state. Sends are taken to block until their receive is posted, the strictest rule of any transport,
so a schedule that passes runs on all of them.
"""

from __future__ import annotations

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
)

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
    """One rank's program, registers and transfers under way."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.rank = rank
        self.place = schedule.num_ranks - 1 - rank if schedule.reverse else rank
        self.steps = schedule.programs[rank]
        self.position = 0
        self.pending: list[Send | Receive] = []
        self.values: dict[tuple[str, int], Interval] = {}
        for block in range(schedule.num_blocks):
            self.values[OWN, block] = Interval(self.place, self.place + 1)
            if self.place == 0:
                self.values[ENTERING, block] = Interval(BEFORE_ALL, 0)
        self._post()

    @property
    def step(self) -> Step | None:
        """The step that this rank is at; None at the end."""
        return self.steps[self.position] if self.position < len(self.steps) else None

    def where(self) -> str:
        """Name the step that this rank is at."""
        return f"rank {self.rank}, step {self.position} ({self.step})"

    def advance(self) -> None:
        """Go to the next step and post its transfers."""
        self.position += 1
        self._post()

    def _post(self) -> None:
        match self.step:
            case Send() | Receive() as transfer:
                self.pending = [transfer]
            case Exchange(transfers):
                self.pending = list(transfers)
            case _:
                self.pending = []

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


def check_schedule(schedule: Schedule) -> None:
    """Refuse a schedule that would hang, lose a block or combine maps in a wrong order.

    Raises:
        ScheduleError: naming the rank and step at fault.
    """
    ranks = [_Rank(schedule, rank) for rank in range(schedule.num_ranks)]
    while any(r.step is not None for r in ranks):
        moved = [_progress(r, ranks) for r in ranks]
        if not any(moved):
            stuck = "; ".join(r.where() for r in ranks if r.step is not None)
            raise ScheduleError(f"deadlock: every unfinished rank waits: {stuck}")
    for rank in ranks:
        for block in range(schedule.num_blocks):
            for register, stop in ((ENTERING, rank.place), (LEAVING, rank.place + 1)):
                found = rank.values.get((register, block))
                if found != Interval(BEFORE_ALL, stop):
                    raise ScheduleError(
                        f"rank {rank.rank} ends with {found} in {register!r}, block {block}, "
                        f"instead of the state after {stop} ranks"
                    )


def _progress(rank: _Rank, ranks: list[_Rank]) -> bool:
    """Let one rank do what it can; return whether anything happened."""
    moved = False
    while (step := rank.step) is not None:
        if isinstance(step, Combine):
            rank.combine(step)
        elif isinstance(step, AllGather):
            if not _all_gather(ranks):
                return moved
            return True
        else:
            moved |= _transfer(rank, ranks)
            if rank.pending:
                return moved
        rank.advance()
        moved = True
    return moved


def _transfer(rank: _Rank, ranks: list[_Rank]) -> bool:
    """Match this rank's posted transfers with its peers'; return whether one was."""
    matched = False
    for mine in list(rank.pending):
        peer = ranks[mine.peer]
        other = next(
            (
                t
                for t in peer.pending
                if t.peer == rank.rank and t.block == mine.block and type(t) is not type(mine)
            ),
            None,
        )
        if other is None:
            continue
        source, sent = (rank, mine) if isinstance(mine, Send) else (peer, other)
        target, received = (peer, other) if isinstance(mine, Send) else (rank, mine)
        value = source.read(sent.register, sent.block)
        if not value.form == sent.form == received.form:
            raise ScheduleError(
                f"{source.where()} sends a {value.form.value} as a {sent.form.value} to "
                f"{target.where()}, which expects a {received.form.value}"
            )
        target.values[received.register, received.block] = value
        rank.pending.remove(mine)
        peer.pending.remove(other)
        matched = True
    return matched


def _all_gather(ranks: list[_Rank]) -> bool:
    """Run the all-gather that every rank is at; return whether every rank was."""
    steps = [r.step for r in ranks]
    gathers = [s for s in steps if isinstance(s, AllGather)]
    if len(gathers) < len(ranks):
        return False
    if len({s.block for s in gathers}) > 1:
        raise ScheduleError("ranks gather different blocks: " + "; ".join(r.where() for r in ranks))
    values = [r.read(s.register, s.block) for r, s in zip(ranks, gathers, strict=True)]
    for rank, step in zip(ranks, gathers, strict=True):
        for value, target, form in zip(values, step.targets, step.forms, strict=True):
            if value.form != form:
                raise ScheduleError(
                    f"{rank.where()} expects a {form.value} in {target!r}, but gets a "
                    f"{value.form.value}"
                )
            rank.values[target, step.block] = value
        rank.advance()
    return True
