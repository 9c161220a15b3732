"""ZeCO and LASP-2: a scan of the ranks' maps, in flight while the rank does what needn't wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zeco.collectives.scan import BACKWARD, FORWARD, ScanHandle, start_scan
from zeco.collectives.transport import Transport
from zeco.core.maps import AffineMap
from zeco.operators.segment import Gradients, Outcome, Segment
from zeco.sequence_parallel.methods.method import (
    add_to_last,
    do_nothing,
    is_turn,
    travels_down,
)


@dataclass(frozen=True)
class Scanned:
    """A scan between the state pass and the output pass.

    Attributes:
        algorithm: the scan (see `zeco.all_scan`).
        num_blocks: pipeline blocks; None lets the cost model choose.
        overlap: whether the rank goes on computing while the scan is in flight.
    """

    takes_none: ClassVar[bool] = True
    """Whether ``d_finals`` may be None for slots of one piece each whose finals nobody uses."""

    algorithm: str = "auto"
    num_blocks: int | None = None
    overlap: bool = True

    def forward(
        self,
        transport: Transport,
        segments: Sequence[Segment],
        initial: Tensor,
        initials: Sequence[Tensor | None],
        meanwhile: Callable[[], None] = do_nothing,
    ) -> Outcome:
        """State pass, scan, intra-chunk and other work in its shadow, output pass."""
        scans: list[ScanHandle] = []
        for slot, segment in enumerate(segments):
            own = segment.summarize(initials[slot])
            if is_turn(transport, slot):
                _, initial = scans[-1].wait_for_both()
            down = travels_down(slot)
            # At a turn what leaves enters the next slot; the finals are the segments' own.
            turns = slot + 1 < len(segments) and is_turn(transport, slot + 1)
            scans.append(
                self._start(
                    transport,
                    own,
                    initial,
                    reverse=down,
                    purpose=FORWARD,
                    output_leaving=turns,
                )
            )
        if self.overlap:
            for segment in segments:
                segment.prepare()
        beside = self.overlap and not any(scan.can_be_held_up for scan in scans)
        if beside:
            meanwhile()
        found = Outcome([], [], [])
        for slot, segment in enumerate(segments):
            if segment.pieces.continued:
                entering, _ = scans[slot].wait()
            else:  # a document starts with the slot: what enters isn't used, nor waited for
                entering = torch.zeros_like(initial)
            o, finals = segment.output(entering, initials[slot])
            found.o.append(o)
            found.finals.append(finals)
            found.entering.append(entering)
        if not beside:
            meanwhile()
        return found

    def backward(
        self,
        transport: Transport,
        segments: Sequence[Segment],
        entering: Sequence[Tensor],
        initials: Sequence[Tensor | None],
        d_o: Sequence[Tensor],
        d_finals: Sequence[Tensor | None],
    ) -> list[Gradients]:
        """Adjoint state pass, reverse scan, recomputation in its shadow, gradient pass."""
        slots = range(len(segments))
        scans: dict[int, ScanHandle] = {}
        for slot in reversed(slots):
            segment, d_final = segments[slot], d_finals[slot]
            d_entering = segment.adjoint(d_o[slot], d_final)
            own = AffineMap(d_entering, segment.transition())
            arriving = None
            if is_turn(transport, slot + 1) and slot + 1 in scans:
                _, arriving = scans[slot + 1].wait_for_both()
            scans[slot] = self._start(
                transport,
                own.adjoint(d_entering, None if d_final is None else d_final[-1]),
                arriving,
                reverse=not travels_down(slot),
                purpose=BACKWARD,
                output_leaving=is_turn(transport, slot),
            )
        if self.overlap:
            for slot in slots:
                segments[slot].replay(entering[slot], initials[slot])
        found: dict[int, Gradients] = {}
        for slot in reversed(slots):
            segment, d_leaving = segments[slot], d_finals[slot]
            if segment.pieces.continues:
                arrived, _ = scans[slot].wait()
                d_leaving = add_to_last(d_leaving, arrived)
            elif d_leaving is None:
                d_leaving = torch.zeros_like(entering[slot]).unsqueeze(0)
            if not self.overlap:
                segment.replay(entering[slot], initials[slot])
            found[slot] = segment.backward(d_o[slot], d_leaving)
        return [found[slot] for slot in slots]

    def _start(
        self,
        transport: Transport,
        own: AffineMap,
        initial: Tensor | None,
        *,
        reverse: bool,
        purpose: str,
        output_leaving: bool,
    ) -> ScanHandle:
        return start_scan(
            transport,
            own,
            initial,
            reverse=reverse,
            algorithm=self.algorithm,
            num_blocks=self.num_blocks,
            purpose=purpose,
            output_leaving=output_leaving,
        )
