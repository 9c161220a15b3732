"""The tokens before a rank's own, as layers ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zeco.collectives import halo as collective
from zeco.sequence_parallel.context import SequenceParallel
from zeco.sequence_parallel.methods.method import do_nothing, is_turn, travels_down


def halos(
    x: Tensor,
    sizes: Sequence[int],
    reach: int,
    sp: SequenceParallel | None = None,
    *,
    initial: Tensor | None = None,
    meanwhile: Callable[[], None] = do_nothing,
) -> tuple[list[Tensor], Tensor]:
    """Return, for each of this rank's slots, the ``reach`` tokens before its first one.

    Differentiable in ``x`` and ``initial``. Every rank calls it with the same ``reach``.

    Args:
        x: this rank's tokens [B, T, ...], slot after slot.
        sizes: tokens of each slot; there is one slot but in the layout "zigzag".
        reach: tokens wanted, at least 0.
        sp: the ranks that share the sequence, or None.
        initial: what lies before the sequence [B, reach, ...], used where it starts; None for zeros.
        meanwhile: work to do while the first message is under way.

    Returns:
        For each slot [B, reach, ...], older tokens first; and x, to be used in place of the given one
        (see `zeco.collectives.halo.split_tails`).
    """
    if sp is None or sp.method_name == "local" or reach == 0:
        meanwhile()
        return _zeros_but_at_the_start(x, len(sizes), reach, sp, initial), x
    transport = sp.transport
    x, tails = collective.split_tails(x, sizes, reach)
    lefts: list[Tensor] = []
    before = initial
    for slot, tail in enumerate(tails):
        start = before if slot == 0 or is_turn(transport, slot) else None
        handle = collective.halo_start(
            tail, reach, transport, initial=start, reverse=travels_down(slot)
        )
        if slot == 0:
            meanwhile()
        left = handle.wait()
        if slot + 1 < len(sizes):
            before = torch.cat([left, tail], 1)[:, tail.shape[1] :]
        lefts.append(left)
    return lefts, x


def _zeros_but_at_the_start(
    x: Tensor, num_slots: int, reach: int, sp: SequenceParallel | None, initial: Tensor | None
) -> list[Tensor]:
    """Return the halos of a lone rank, and of the method that exchanges nothing."""
    zeros = x.new_zeros(x.shape[0], reach, *x.shape[2:])
    first = initial if initial is not None and (sp is None or sp.is_first()) else zeros
    return [first if slot == 0 else zeros for slot in range(num_slots)]
