"""What a sequence-parallel method is: when a segment's passes run around which scan."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from zeco.collectives.transport import Transport
from zeco.operators.segment import Gradients, Segment


class Method(Protocol):
    """A way to find entering states; `zeco.operators.segment.Exchange` says what each part gets."""

    def forward(
        self,
        transport: Transport,
        segment: Segment,
        initial: Tensor,
        initials: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (o, finals, entering)."""
        ...

    def backward(
        self,
        transport: Transport,
        segment: Segment,
        entering: Tensor,
        initials: Tensor | None,
        d_o: Tensor,
        d_finals: Tensor,
    ) -> Gradients:
        """Return all gradients."""
        ...


def add_to_last(d_finals: Tensor, arrived: Tensor) -> Tensor:
    """Add what the later ranks sent back to the gradient of the leaving state, the last final."""
    d_finals = d_finals.clone()
    d_finals[-1] += arrived
    return d_finals
