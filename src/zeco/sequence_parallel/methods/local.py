"""No exchange at all: every rank starts from zero, as if nothing came before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeco.collectives.transport import Transport
from zeco.operators.segment import Gradients, Outcome, Segment
from zeco.sequence_parallel.methods.method import do_nothing


@dataclass(frozen=True)
class Local:
    """A control: what a model does when the state doesn't cross ranks. It isn't the same model."""

    def forward(
        self,
        transport: Transport,
        segments: Sequence[Segment],
        initial: Tensor,
        initials: Sequence[Tensor | None],
        meanwhile: Callable[[], None] = do_nothing,
    ) -> Outcome:
        """Run each pass from zeros, but from the initial state where the sequence starts."""
        found = Outcome([], [], [])
        for slot, segment in enumerate(segments):
            starts = transport.rank == 0 and slot == 0
            entering = initial if starts else torch.zeros_like(initial)
            o, finals = segment.output(entering, initials[slot])
            found.o.append(o)
            found.finals.append(finals)
            found.entering.append(entering)
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
        """Run the gradient passes; nothing comes back from later tokens."""
        found: list[Gradients] = []
        for slot, segment in enumerate(segments):
            segment.replay(entering[slot], initials[slot])
            found.append(segment.backward(d_o[slot], d_finals[slot]))
        return found
