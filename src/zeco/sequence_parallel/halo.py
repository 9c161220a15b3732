"""The tokens before a rank's own, as layers ask for them."""

from __future__ import annotations

from torch import Tensor

from zeco.collectives import halo as collective
from zeco.collectives.single import SingleTransport
from zeco.sequence_parallel.context import SequenceParallel


def halo(
    x: Tensor, reach: int, sp: SequenceParallel | None = None, *, initial: Tensor | None = None
) -> Tensor:
    """Return the ``reach`` tokens [B, reach, ...] before this rank's first one.

    As `zeco.collectives.halo.halo`, for the ranks of ``sp``; None is a single rank.
    """
    transport = SingleTransport() if sp is None else sp.transport
    return collective.halo(x, reach, transport, initial=initial)
