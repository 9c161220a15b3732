"""LASP-1 as published (arXiv:2404.02882): receive the state, run the whole local pass, send it on.

The ranks take turns, so a step takes P local passes; but every operation is that of one device, and
with shards on chunk boundaries outputs and gradients are bitwise equal to it. The paper's decay is a
fixed scalar; here it is whatever the operator's transition is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeco.collectives.scan import BACKWARD, FORWARD, start_scan
from zeco.collectives.transport import Transport
from zeco.core.maps import AffineMap
from zeco.core.transitions import Identity
from zeco.operators.segment import Gradients, Outcome, Segment
from zeco.sequence_parallel.methods.method import (
    add_to_last,
    do_nothing,
    is_turn,
    travels_down,
)


@dataclass(frozen=True)
class Lasp1:
    """The serial ring of LASP-1."""

    def forward(
        self,
        transport: Transport,
        segments: Sequence[Segment],
        initial: Tensor,
        initials: Sequence[Tensor | None],
        meanwhile: Callable[[], None] = do_nothing,
    ) -> Outcome:
        """Wait for the entering state, run the pass, pass the leaving state on."""
        found = Outcome([], [], [])
        placeholder = AffineMap(torch.zeros_like(initial), Identity())
        for slot, segment in enumerate(segments):

            def whole_pass(
                entering: Tensor, segment: Segment = segment, slot: int = slot
            ) -> Tensor:
                o, finals = segment.output(entering, initials[slot])
                found.o.append(o)
                found.finals.append(finals)
                found.entering.append(entering)
                return finals[-1]

            start_scan(
                transport,
                placeholder,
                found.finals[-1][-1] if is_turn(transport, slot) else initial,
                reverse=travels_down(slot),
                algorithm="serial",
                purpose=FORWARD,
                local_pass=whole_pass,
            ).wait()
        meanwhile()
        return found

    def backward(
        self,
        transport: Transport,
        segments: Sequence[Segment],
        entering: Sequence[Tensor],
        initials: Sequence[Tensor | None],
        d_o: Sequence[Tensor],
        d_finals: Sequence[Tensor],
    ) -> list[Gradients]:
        """Wait for the adjoint of the leaving state, run the gradient pass, pass it on."""
        found: dict[int, Gradients] = {}
        placeholder = AffineMap(torch.zeros_like(entering[0]), Identity())
        for slot in reversed(range(len(segments))):

            def whole_pass(arrived: Tensor, slot: int = slot) -> Tensor:
                segment = segments[slot]
                segment.replay(entering[slot], initials[slot])
                found[slot] = segment.backward(d_o[slot], add_to_last(d_finals[slot], arrived))
                return found[slot].entering

            turns = is_turn(transport, slot + 1) and slot + 1 in found
            start_scan(
                transport,
                placeholder,
                found[slot + 1].entering if turns else None,
                reverse=not travels_down(slot),
                algorithm="serial",
                purpose=BACKWARD,
                local_pass=whole_pass,
            ).wait()
        return [found[slot] for slot in range(len(segments))]
