"""Execution of a schedule's program on one rank: the only place where scans move data."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from zeco.collectives.transport import Message, Request, Transport
from zeco.core.blocks import Algebra, Value
from zeco.core.errors import RankFailedError
from zeco.core.maps import AffineMap
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
from zeco.core.steps import Message as Parcel
from zeco.core.steps import messages_of
from zeco.core.transitions import Reset

Pass = Callable[[Tensor], Tensor]
"""A rank's whole local pass: the state [B, H, K, V] that leaves, from the one that enters."""


class Execution:
    """One scan on one rank.

    Args:
        schedule: whose program of this rank is run.
        transport: this rank's end of the group.
        algebra: how maps of this kind act on blocks; it has as many as the schedule.
        own: this rank's map; only its transition's kind matters if ``local_pass`` is given.
        initial: the state that enters the first rank of the direction of travel; None for zeros.
        tags: first tag of this scan's range.
        purpose: under which the ledger counts the messages.
        local_pass: used instead of ``own`` to get from the entering to the leaving state, in
            schedules of one block: the rank's whole pass runs inside the scan, as in LASP-1.
    """

    def __init__(
        self,
        schedule: Schedule,
        transport: Transport,
        algebra: Algebra,
        own: AffineMap,
        initial: Tensor | None,
        *,
        tags: int,
        purpose: str,
        local_pass: Pass | None = None,
    ) -> None:
        self.schedule = schedule
        self.transport = transport
        self.tags = tags
        self.purpose = purpose
        self.local_pass = local_pass
        self.algebra = algebra
        self.pass_s = 0.0
        self.resets = isinstance(own.transition, Reset) and local_pass is None
        update = self.algebra.to_rows(own.update)
        self.entering = torch.empty_like(update)
        self.leaving = torch.empty_like(update)
        self.values: dict[tuple[str, int], Value] = {}
        self.arriving: dict[tuple[str, int], tuple[Request, Tensor]] = {}
        """Parcels under way to this rank, by their first transfers."""
        self.sending: list[tuple[Request, Message]] = []
        parameters = self.algebra.parameters(own.transition, update)
        for block, (start, stop) in enumerate(self.algebra.cuts):
            self.values[OWN, block] = Value(update[start:stop], parameters[block])
        if transport.rank == schedule.first:
            rows = None if initial is None else self.algebra.to_rows(initial)
            if rows is None:
                self.entering.zero_()
            else:
                self.entering.copy_(rows)
            for block, (start, stop) in enumerate(self.algebra.cuts):
                self.values[ENTERING, block] = Value(self.entering[start:stop], None)

    def run(self) -> tuple[Tensor, Tensor]:
        """Run the program; return the entering and the leaving state [B, H, K, V]."""
        program = self.schedule.programs[self.transport.rank]
        if self.transport.posts_receives_early:
            self._post([p for step in program for p in _incoming(step) if self._is_early(step, p)])
        if self.resets:
            program = _without_waiting(program)
        for number, step in enumerate(program):
            try:
                self._run_step(step)
            except RankFailedError as error:
                raise RankFailedError(
                    f"{error} (at step {number} of {self.schedule.algorithm!r}, {self.purpose})"
                ) from error
        for request, _ in self.sending:
            request.wait()
        return self.algebra.from_rows(self.entering), self.algebra.from_rows(self.leaving)

    def _run_step(self, step: Step) -> None:
        match step:
            case Combine():
                self._combine(step)
            case Send() | Receive() | Exchange():
                # Together with what it sends, what wasn't posted early.
                incoming = _incoming(step)
                missing = [p for p in incoming if _name(p) not in self.arriving]
                self._post([p for p in messages_of(step) if p not in incoming] + missing)
                for parcel in incoming:
                    self._finish(parcel)
            case AllGather():
                self._all_gather(step)

    def _is_early(self, step: Step, parcel: Parcel) -> bool:
        """Whether a receive is posted long before its step: then its data come when they can.

        Those of an exchange may come rounds too early, and share a link with what is waited for.
        So they wait for their step, unless to tell the sender so takes longer than they take.
        """
        link = self.transport.fabric.outside
        element_size = self.entering.element_size()
        num_bytes = sum(self._numel_of(t) for t in parcel) * element_size
        return isinstance(step, Receive) or num_bytes < link.latency_s * link.bandwidth_bytes_per_s

    def _rows(self, register: str, block: int) -> Tensor:
        """Return the buffer of a register's block."""
        start, stop = self.algebra.cuts[block]
        if register == ENTERING:
            return self.entering[start:stop]
        if register == LEAVING:
            return self.leaving[start:stop]
        return torch.empty_like(self.entering[start:stop])

    def _combine(self, step: Combine) -> None:
        later = self.values[step.later, step.block]
        out = self._rows(step.target, step.block)
        if self.resets and step.later == OWN and step.target == LEAVING:
            out.copy_(later.rows)
            self.values[LEAVING, step.block] = Value(out, None)
            return
        earlier = self.values[step.earlier, step.block]
        if self.local_pass is not None and step.target == LEAVING:
            start = time.perf_counter()
            leaving = self.local_pass(self.algebra.from_rows(self.entering))
            self.pass_s += time.perf_counter() - start
            out.copy_(self.algebra.to_rows(leaving))
            self.values[LEAVING, step.block] = Value(out, None)
            return
        self.algebra.apply(step.block, later, earlier.rows, out)
        parameters = None
        if earlier.parameters is not None and later.parameters is not None:
            parameters = self.algebra.compose(step.block, later.parameters, earlier.parameters)
        self.values[step.target, step.block] = Value(out, parameters)

    def _post(self, parcels: list[Parcel]) -> None:
        """Start parcels together; a lone state arrives straight in its place."""
        outgoing: list[Message] = []
        incoming: list[Message] = []
        received: list[Parcel] = []
        for parcel in parcels:
            peer, tag = parcel[0].peer, self.tags + parcel[0].block
            if isinstance(parcel[0], Send):
                outgoing.append(Message(self._pack(parcel), peer, tag))
            else:
                incoming.append(Message(self._room(parcel), peer, tag))
                received.append(parcel)
        requests = self.transport.exchange(outgoing, incoming, self.purpose)
        self.sending += zip(requests, outgoing, strict=False)
        for parcel, request, message in zip(
            received, requests[len(outgoing) :], incoming, strict=True
        ):
            self.arriving[_name(parcel)] = (request, message.tensor)

    def _pack(self, parcel: Parcel) -> Tensor:
        """Return what a parcel to be sent carries."""
        parts = [
            self.values[t.register, t.block].rows
            if t.form is Form.STATE
            else self._pack_map(self.values[t.register, t.block], t.block)
            for t in parcel
        ]
        return parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])

    def _room(self, parcel: Parcel) -> Tensor:
        """Return a buffer for a parcel."""
        if len(parcel) == 1 and parcel[0].form is Form.STATE:
            return self._rows(parcel[0].register, parcel[0].block)
        return self.entering.new_empty(sum(self._numel_of(t) for t in parcel))

    def _finish(self, parcel: Parcel) -> None:
        """Wait for a parcel and put what it carries where it belongs."""
        request, buffer = self.arriving.pop(_name(parcel))
        request.wait()
        if buffer.dim() > 1:
            self.values[_name(parcel)] = Value(buffer, None)
            return
        for part, t in zip(buffer.split([self._numel_of(t) for t in parcel]), parcel, strict=True):
            if t.form is Form.MAP:
                self.values[t.register, t.block] = self._unpack_map(part, t.block)
                continue
            rows = self._rows(t.register, t.block)
            rows.copy_(part.view_as(rows))
            self.values[t.register, t.block] = Value(rows, None)

    def _numel_of(self, transfer: Send | Receive) -> int:
        own = self.values[OWN, transfer.block]
        state = own.rows.numel()
        return state if transfer.form is Form.STATE else state + _numel(own.parameters)

    def _all_gather(self, step: AllGather) -> None:
        message = self._pack_map(self.values[step.register, step.block], step.block)
        found = self.transport.all_gather(message, self.tags + step.block, self.purpose)
        for target, form, other in zip(step.targets, step.forms, found, strict=True):
            value = self._unpack_map(other, step.block)
            if form is Form.STATE:
                value.parameters = None
            if target == ENTERING:
                self._rows(ENTERING, step.block).copy_(value.rows)
            self.values[target, step.block] = value

    def _pack_map(self, value: Value, block: int) -> Tensor:
        """Lay out a map as one message; a state takes the same room, its parameters unused."""
        parameters = value.parameters
        if parameters is None:
            parameters = value.rows.new_zeros(_numel(self.values[OWN, block].parameters))
        return torch.cat([parameters.reshape(-1), value.rows.reshape(-1)])

    def _unpack_map(self, message: Tensor, block: int) -> Value:
        own = self.values[OWN, block]
        size = _numel(own.parameters)
        parameters = message[:size]
        if own.parameters is not None:
            parameters = parameters.view_as(own.parameters)
        return Value(message[size:].view_as(own.rows), parameters)


def _without_waiting(program: tuple[Step, ...]) -> tuple[Step, ...]:
    """Put what a reset can do at once first: what leaves it doesn't depend on what enters.

    >>> from zeco.core.schedule import build_schedule
    >>> steps = _without_waiting(build_schedule("chain", 3, 1).programs[1])
    >>> [type(step).__name__ for step in steps]
    ['Combine', 'Send', 'Receive']
    """
    at_once = [
        step
        for step in program
        if (isinstance(step, Combine) and step.later == OWN and step.target == LEAVING)
        or (isinstance(step, Send) and step.register == LEAVING)
    ]
    return (*at_once, *(step for step in program if step not in at_once))


def _incoming(step: Step) -> list[Parcel]:
    """Return what a step receives."""
    return [parcel for parcel in messages_of(step) if isinstance(parcel[0], Receive)]


def _name(parcel: Parcel) -> tuple[str, int]:
    """Return what tells a parcel that arrives from all others of a rank."""
    return parcel[0].register, parcel[0].block


def _numel(parameters: Tensor | None) -> int:
    return 0 if parameters is None else parameters.numel()
