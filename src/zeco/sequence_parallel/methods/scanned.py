"""ZeCO and LASP-2: a scan of the ranks' maps, in flight while the rank does work that doesn't wait."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeco.collectives.scan import BACKWARD, FORWARD, start_scan
from zeco.collectives.transport import Transport
from zeco.core.maps import AffineMap
from zeco.operators.segment import Gradients, Segment
from zeco.sequence_parallel.methods.method import add_to_last


@dataclass(frozen=True)
class Scanned:
    """A scan between the state pass and the output pass.

    Attributes:
        algorithm: the scan (see `zeco.all_scan`).
        num_blocks: pipeline blocks; None lets the cost model choose.
        overlap: whether the rank goes on computing while the scan is in flight.
    """

    algorithm: str = "auto"
    num_blocks: int | None = None
    overlap: bool = True

    def forward(
        self,
        transport: Transport,
        segment: Segment,
        initial: Tensor,
        initials: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """State pass, scan, intra-chunk work in its shadow, output pass."""
        scan = start_scan(
            transport,
            segment.summarize(initials),
            initial,
            algorithm=self.algorithm,
            num_blocks=self.num_blocks,
            purpose=FORWARD,
        )
        if self.overlap:
            segment.prepare()
        if segment.pieces.continued:
            entering, _ = scan.wait()
        else:  # a document starts with the rank: what enters isn't used, nor waited for
            entering = torch.zeros_like(initial)
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
        """Adjoint state pass, reverse scan, recomputation in its shadow, gradient pass."""
        d_entering = segment.adjoint(d_o, d_finals)
        own = AffineMap(d_entering, segment.transition()).adjoint(d_entering, d_finals[-1])
        scan = start_scan(
            transport,
            own,
            reverse=True,
            algorithm=self.algorithm,
            num_blocks=self.num_blocks,
            purpose=BACKWARD,
        )
        if self.overlap:
            segment.replay(entering, initials)
        if segment.pieces.continues:
            arrived, _ = scan.wait()
            d_finals = add_to_last(d_finals, arrived)
        if not self.overlap:
            segment.replay(entering, initials)
        return segment.backward(d_o, d_finals)
