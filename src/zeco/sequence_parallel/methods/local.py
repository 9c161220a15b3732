"""No exchange at all: every rank starts from the initial state, as if nothing came before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeco.collectives.transport import Transport
from zeco.operators.segment import Gradients, Segment


@dataclass(frozen=True)
class Local:
    """A control: what a model does when the state doesn't cross ranks. It isn't the same model."""

    def forward(
        self,
        transport: Transport,
        segment: Segment,
        initial: Tensor,
        initials: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the pass from the initial state on the first rank, from zeros elsewhere."""
        entering = initial if transport.rank == 0 else torch.zeros_like(initial)
        o, finals = segment.output(entering, initials)
        return o, finals, entering

    def backward(
        self,
        transport: Transport,
        segment: Segment,
        entering: Tensor,
        initials: Tensor | None,
        d_o: Tensor,
        d_finals: Tensor,
    ) -> Gradients:
        """Run the gradient pass; nothing comes back from later ranks."""
        segment.replay(entering, initials)
        return segment.backward(d_o, d_finals)
