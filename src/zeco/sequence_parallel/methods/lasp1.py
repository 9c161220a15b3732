"""LASP-1 as published (arXiv:2404.02882): receive the state, run the whole local pass, send it on.

The ranks take turns, so a step takes P local passes; but every operation is that of one device, and
with shards on chunk boundaries outputs and gradients are bitwise equal to it. The paper's decay is a
fixed scalar; here it is whatever the operator's transition is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeco.collectives.scan import BACKWARD, FORWARD, start_scan
from zeco.collectives.transport import Transport
from zeco.core.maps import AffineMap
from zeco.core.transitions import Identity
from zeco.operators.segment import Gradients, Segment
from zeco.sequence_parallel.methods.method import add_to_last


@dataclass(frozen=True)
class Lasp1:
    """The serial ring of LASP-1."""

    def forward(
        self,
        transport: Transport,
        segment: Segment,
        initial: Tensor,
        initials: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the entering state, run the pass, pass the leaving state on."""
        results: list[tuple[Tensor, Tensor, Tensor]] = []

        def whole_pass(entering: Tensor) -> Tensor:
            o, finals = segment.output(entering, initials)
            results.append((o, finals, entering))
            return finals[-1]

        start_scan(
            transport,
            AffineMap(torch.zeros_like(initial), Identity()),
            initial,
            algorithm="serial",
            purpose=FORWARD,
            local_pass=whole_pass,
        ).wait()
        return results[0]

    def backward(
        self,
        transport: Transport,
        segment: Segment,
        entering: Tensor,
        initials: Tensor | None,
        d_o: Tensor,
        d_finals: Tensor,
    ) -> Gradients:
        """Wait for the adjoint of the leaving state, run the gradient pass, pass it on."""
        results: list[Gradients] = []

        def whole_pass(arrived: Tensor) -> Tensor:
            segment.replay(entering, initials)
            results.append(segment.backward(d_o, add_to_last(d_finals, arrived)))
            return results[0].entering

        start_scan(
            transport,
            AffineMap(torch.zeros_like(entering), Identity()),
            reverse=True,
            algorithm="serial",
            purpose=BACKWARD,
            local_pass=whole_pass,
        ).wait()
        return results[0]
