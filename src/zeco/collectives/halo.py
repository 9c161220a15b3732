"""The tokens just before a rank's own, for short convolutions and token shifts.

The last ``reach`` tokens that a rank has seen are a state that a shift register carries along: a rank
pushes its own tokens in and passes on what it then holds. A rank with at least ``reach`` tokens needn't
wait for what enters it; a shorter, or empty, one passes older tokens through, so the halo reaches over
as many ranks as it must and nobody has to know the others' lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeco.collectives.recompute import Slot, take_slot
from zeco.collectives.transport import Message, Request, Transport, wait_all
from zeco.core.errors import ArgumentError

PURPOSE = "halo"


class _Call:
    """What the two halves of an exchange and of its adjoint share."""

    def __init__(self, transport: Transport, reach: int, length: int, *, reverse: bool) -> None:
        self.transport = transport
        self.reach = reach
        self.length = length
        self.step = -1 if reverse else 1
        self.is_first = transport.rank == (transport.size - 1 if reverse else 0)
        self.slot: Slot | None = take_slot()
        self.forward: _Passing | None = None
        self.backward: _Passing | None = None


class _StartFunction(torch.autograd.Function):
    """Forward: the tail starts for the next rank. Backward: wait for what its gradient is there."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, initial: Tensor | None) -> Tensor:
        ctx.call = call
        # What ties the two halves together for autograd; it carries no data.
        token = x.new_empty(0)
        kept = None if call.slot is None else call.slot.read()
        if kept is not None:
            call.forward = _Passing(kept[0].clone(), kept[0], [])
            return token
        reach = call.reach
        shape = (x.shape[0], reach, *x.shape[2:])
        if call.is_first:
            left = x.new_zeros(shape)
            if initial is not None:
                left.copy_(initial)
        else:
            left = x.new_empty(shape)

        def tail() -> Tensor:
            return x[:, -reach:] if x.shape[1] >= reach else torch.cat([left, x], 1)[:, -reach:]

        early = x.shape[1] >= reach
        call.forward = _start_passing(call.transport, left, tail, step=call.step, early=early)
        return token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_token: Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        passing, call.backward = call.backward, None
        if passing is None:
            raise RuntimeError("the adjoint of a halo's start ran before that of its wait")
        d_tail = passing.wait()
        own = min(call.reach, call.length)
        d_x = d_tail.new_zeros(d_tail.shape[0], call.length, *d_tail.shape[2:])
        if own:
            d_x[:, call.length - own :] = d_tail[:, call.reach - own :]
        d_initial = passing.sent if call.is_first and ctx.needs_input_grad[2] else None
        return None, d_x, d_initial


class _WaitFunction(torch.autograd.Function):
    """Forward: wait for what comes from the rank before. Backward: its gradient starts back."""

    @staticmethod
    def forward(ctx: Any, call: _Call, token: Tensor) -> Tensor:
        passing, call.forward = call.forward, None
        if passing is None:
            raise ArgumentError("wait() was called twice on one halo; keep the first result")
        ctx.call = call
        left = passing.wait()
        if call.slot is not None:
            call.slot.write(left)
        return left

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_left: Tensor) -> tuple[None, Tensor]:
        call: _Call = ctx.call
        reach, length = call.reach, call.length
        d_tail = torch.zeros_like(d_left, memory_format=torch.contiguous_format)

        def d_entering() -> Tensor:
            """Add what came back for older tokens that were passed through."""
            through = max(0, reach - length)
            d = d_left.clone()
            if through:
                d[:, reach - through :] += d_tail[:, :through]
            return d

        call.backward = _start_passing(
            call.transport, d_tail, d_entering, step=-call.step, early=length >= reach
        )
        return None, d_left.new_empty(0)


class _Passing:
    """Messages under way.

    Args:
        arriving: the buffer of what arrives.
        sent: what is sent, which must stay as it is until then.
        requests: of both.
    """

    def __init__(self, arriving: Tensor, sent: Tensor, requests: list[Request]) -> None:
        self._arriving = arriving
        self.sent = sent
        self._requests = requests

    def wait(self) -> Tensor:
        """Return what arrives."""
        wait_all(self._requests)
        return self._arriving


def _start_passing(
    transport: Transport,
    arriving: Tensor,
    outgoing: Callable[[], Tensor],
    *,
    step: int,
    early: bool,
) -> _Passing:
    """Receive from one side into ``arriving`` and send ``outgoing()`` to the other.

    Args:
        transport: this rank's end of the group.
        arriving: buffer; left as it is on the rank at which the direction of travel begins.
        outgoing: makes what is sent on.
        step: 1 to send to the next rank, -1 to the previous one.
        early: whether what is sent doesn't depend on what arrives. Otherwise this waits for it.
    """
    tag = transport.next_tags()
    source, target = transport.rank - step, transport.rank + step
    receives = [Message(arriving, source, tag)] if 0 <= source < transport.size else []
    if not early:
        wait_all(transport.exchange([], receives, PURPOSE))
        receives = []
    sent = outgoing().contiguous()
    sends = [Message(sent, target, tag)] if 0 <= target < transport.size else []
    return _Passing(arriving, sent, transport.exchange(sends, receives, PURPOSE))


class _TailsFunction(torch.autograd.Function):
    """The last tokens of parts of a tensor beside it; backwards their gradients go in their places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], reach: int) -> tuple[Tensor, ...]:
        stops = list(accumulate(sizes))
        ctx.spans = [
            (max(stop - size, stop - reach), stop) for size, stop in zip(sizes, stops, strict=True)
        ]
        return x.view_as(x), *(x[:, start:stop].clone() for start, stop in ctx.spans)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor, *d_tails: Tensor) -> tuple[Tensor, None, None]:
        if 0 in d_x.stride():
            d_x = d_x.clone(memory_format=torch.contiguous_format)
        for (start, stop), d_tail in zip(ctx.spans, d_tails, strict=True):
            d_x[:, start:stop] += d_tail
        return d_x, None, None


def split_tails(x: Tensor, sizes: Sequence[int], reach: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return x for all other use, and the last ``reach`` tokens, or fewer, of each of its parts.

    So the gradient of a few tokens costs no tensor of the size of x: it is added in place. That is
    why what is made of the x that comes back must make its gradient anew, as convolutions and copies
    do: a sum would share it with its other terms.

    Args:
        x: tokens [B, T, ...].
        sizes: tokens of each part.
        reach: at least 0.
    """
    found = _TailsFunction.apply(x, tuple(sizes), reach)
    return found[0], found[1:]


class HaloHandle:
    """A halo under way; see `halo_start`."""

    def __init__(self, call: _Call, token: Tensor) -> None:
        self._call = call
        self._token = token

    def wait(self) -> Tensor:
        """Return the tokens [B, reach, ...], older ones first, as soon as they are there.

        Raises:
            ArgumentError: called twice.
            RankFailedError: another rank failed, or didn't come within the group's timeout.
        """
        return _WaitFunction.apply(self._call, self._token)


def halo_start(
    x: Tensor,
    reach: int,
    transport: Transport,
    *,
    initial: Tensor | None = None,
    reverse: bool = False,
) -> HaloHandle:
    """Start a halo and go on at once, unless this rank has to pass older tokens on.

    Under autograd ``wait``'s adjoint starts the gradients' way back, and the adjoint of this function
    waits for them.

    Takes the arguments of `halo`, with a reach of at least 1, and raises what it raises.
    """
    expected = (x.shape[0], reach, *x.shape[2:])
    if reach < 1 or (initial is not None and tuple(initial.shape) != expected):
        shape = None if initial is None else list(initial.shape)
        raise ArgumentError(
            f"halo: reach={reach} with initial of shape {shape}; reach must be at least 0 and "
            f"initial [B, reach, ...] = {list(expected)}"
        )
    transport.check_tensor(x)
    call = _Call(transport, reach, x.shape[1], reverse=reverse)
    return HaloHandle(call, _StartFunction.apply(call, x, initial))


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
        x: this rank's tokens [B, T, ...], or its last ``reach``; T may differ between ranks, and be 0.
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
    if reach == 0:
        return x[:, :0]
    return halo_start(x, reach, transport, initial=initial, reverse=reverse).wait()
