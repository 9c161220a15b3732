"""The tokens before a rank's own, as layers ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeco.collectives import halo as collective
from zeco.collectives.single import SingleTransport
from zeco.sequence_parallel.context import SequenceParallel
from zeco.sequence_parallel.methods.method import is_turn, travels_down


def halos(
    x: Tensor,
    sizes: Sequence[int],
    reach: int,
    sp: SequenceParallel | None = None,
    *,
    initial: Tensor | None = None,
) -> list[Tensor]:
    """Return, for each of this rank's slots, the ``reach`` tokens before its first one.

    Differentiable in ``x`` and ``initial``. Every rank calls it with the same ``reach``.

    Args:
        x: this rank's tokens [B, T, ...], slot after slot.
        sizes: tokens of each slot; there is one slot but in the layout "zigzag".
        reach: tokens wanted, at least 0.
        sp: the ranks that share the sequence, or None.
        initial: what lies before the sequence [B, reach, ...], used where it starts; None for zeros.

    Returns:
        For each slot [B, reach, ...], older tokens first.
    """
    if sp is not None and sp.method_name == "local":
        return _zeros_but_at_the_start(x, len(sizes), reach, sp, initial)
    transport = SingleTransport() if sp is None else sp.transport
    lefts: list[Tensor] = []
    before = initial
    for slot, part in enumerate(x.split(list(sizes), 1)):
        start = before if slot == 0 or is_turn(transport, slot) else None
        left = collective.halo(part, reach, transport, initial=start, reverse=travels_down(slot))
        if slot + 1 < len(sizes):
            recent = part[:, max(0, part.shape[1] - reach) :]
            before = torch.cat([left, recent], 1)[:, recent.shape[1] :]
        lefts.append(left)
    return lefts


def _zeros_but_at_the_start(
    x: Tensor, num_slots: int, reach: int, sp: SequenceParallel, initial: Tensor | None
) -> list[Tensor]:
    """Return the halos of the method that exchanges nothing."""
    zeros = x.new_zeros(x.shape[0], reach, *x.shape[2:])
    first = initial if initial is not None and sp.is_first() else zeros
    return [first if slot == 0 else zeros for slot in range(num_slots)]
