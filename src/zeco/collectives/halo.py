"""The tokens just before a rank's own, for short convolutions and token shifts.

The last ``reach`` tokens that a rank has seen are a state that a shift register carries along: a rank
pushes its own tokens in and passes on what it then holds. A rank with at least ``reach`` tokens needn't
wait for what enters it; a shorter, or empty, one passes older tokens through, so the halo reaches over
as many ranks as it must and nobody has to know the others' lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeco.collectives.recompute import Slot, take_slot
from zeco.collectives.transport import Message, Transport, wait_all
from zeco.core.errors import ArgumentError

PURPOSE = "halo"


class _HaloFunction(torch.autograd.Function):
    """Forward: tails travel to later ranks. Backward: their gradients travel back."""

    @staticmethod
    def forward(
        ctx: Any,
        transport: Transport,
        reach: int,
        reverse: bool,
        slot: Slot | None,
        x: Tensor,
        initial: Tensor | None,
    ) -> Tensor:
        step, first = (-1, transport.size - 1) if reverse else (1, 0)
        ctx.transport, ctx.reach, ctx.length = transport, reach, x.shape[1]
        ctx.step, ctx.is_first = step, transport.rank == first
        kept = None if slot is None else slot.read()
        if kept is not None:
            return kept[0].clone()
        shape = (x.shape[0], reach, *x.shape[2:])
        if ctx.is_first:
            left = x.new_zeros(shape) if initial is None else initial.to(x.dtype)
        else:
            left = x.new_empty(shape)

        def tail() -> Tensor:
            return x[:, -reach:] if x.shape[1] >= reach else torch.cat([left, x], 1)[:, -reach:]

        _pass_on(transport, left, tail, step=step, early=x.shape[1] >= reach)
        if slot is not None:
            slot.write(left)
        return left

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_left: Tensor) -> tuple[Any, ...]:
        transport: Transport = ctx.transport
        reach: int = ctx.reach
        length: int = ctx.length
        d_tail = torch.zeros_like(d_left, memory_format=torch.contiguous_format)

        def d_entering() -> Tensor:
            """Add what came back for older tokens that were passed through."""
            through = max(0, reach - length)
            d = d_left.clone()
            if through:
                d[:, reach - through :] += d_tail[:, :through]
            return d

        d_out = _pass_on(transport, d_tail, d_entering, step=-ctx.step, early=length >= reach)
        own = min(reach, length)
        d_x = d_left.new_zeros(d_left.shape[0], length, *d_left.shape[2:])
        if own:
            d_x[:, length - own :] = d_tail[:, reach - own :]
        d_initial = d_out if ctx.is_first and ctx.needs_input_grad[5] else None
        return None, None, None, None, d_x, d_initial


def _pass_on(
    transport: Transport,
    arriving: Tensor,
    outgoing: Callable[[], Tensor],
    *,
    step: int,
    early: bool,
) -> Tensor:
    """Receive from one side into ``arriving`` and send ``outgoing()`` to the other; return it.

    Args:
        transport: this rank's end of the group.
        arriving: buffer; left as it is on the rank at which the direction of travel begins.
        outgoing: makes what is sent on.
        step: 1 to send to the next rank, -1 to the previous one.
        early: whether what is sent doesn't depend on what arrives.
    """
    tag = transport.next_tags()
    source, target = transport.rank - step, transport.rank + step
    receives = [Message(arriving, source, tag)] if 0 <= source < transport.size else []
    if early:
        sent = outgoing().contiguous()
        sends = [Message(sent, target, tag)] if 0 <= target < transport.size else []
        wait_all(transport.exchange(sends, receives, PURPOSE))
        return sent
    wait_all(transport.exchange([], receives, PURPOSE))
    sent = outgoing().contiguous()
    sends = [Message(sent, target, tag)] if 0 <= target < transport.size else []
    wait_all(transport.exchange(sends, [], PURPOSE))
    return sent


def halo(
    x: Tensor,
    reach: int,
    transport: Transport,
    *,
    initial: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """Return the ``reach`` tokens before this rank's first one.

    Differentiable in ``x`` and ``initial``. Every rank calls it with the same ``reach``. When a
    checkpointed region is recomputed, no message is sent again.

    Args:
        x: this rank's tokens [B, T, ...]; T may differ between ranks, and be 0.
        reach: tokens wanted, at least 0.
        transport: this rank's end of the group.
        initial: what lies before the sequence [B, reach, ...], used on the rank at which the
            direction of travel begins; None for zeros.
        reverse: whether the sequence runs from the last rank to the first.

    Returns:
        [B, reach, ...]: older tokens first.

    Raises:
        ArgumentError: a negative reach, or an ``initial`` of another shape.
    """
    expected = (x.shape[0], reach, *x.shape[2:])
    if reach < 0 or (initial is not None and tuple(initial.shape) != expected):
        shape = None if initial is None else list(initial.shape)
        raise ArgumentError(
            f"halo: reach={reach} with initial of shape {shape}; reach must be at least 0 and "
            f"initial [B, reach, ...] = {list(expected)}"
        )
    if reach == 0:
        return x[:, :0]
    transport.check_tensor(x)
    return _HaloFunction.apply(transport, reach, reverse, take_slot(), x, initial)
