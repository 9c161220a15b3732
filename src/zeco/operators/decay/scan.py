"""The recurrence over chunks: the one loop of an operator whose transitions are diagonal.

    S[c+1] = exp(log_decay[c]) ∘ S[c] + U[c]                           within each piece

Backward, with R[c] the gradient of the state that leaves chunk c and dS[c] what the outputs of
chunk c send to the state that enters it::

    R[c-1] = exp(log_decay[c]) ∘ R[c] + dS[c]        dU[c] = R[c]
    d log_decay[c] = exp(log_decay[c]) · (R[c] ∘ S[c]).sum(V)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Ranges = tuple[tuple[int, int], ...]


class DecayScanFunction(torch.autograd.Function):
    """States that enter every chunk, and the state after every piece; see `decay_scan`."""

    @staticmethod
    def forward(
        ctx: Any,
        update: Tensor,
        log_decay: Tensor | None,
        entering: Tensor,
        initials: Tensor | None,
        ranges: Ranges,
        continued: bool,
    ) -> tuple[Tensor, Tensor]:
        """Run the recurrence, every state written where it is kept."""
        decay = None if log_decay is None else log_decay.exp().unsqueeze(-1)
        states = torch.empty_like(update)
        finals = entering.new_empty(len(ranges), *entering.shape)
        fresh = iter(()) if initials is None else iter(initials)
        for piece, (first, stop) in enumerate(ranges):
            place = states[:, first] if first < stop else finals[piece]
            if piece == 0 and continued:
                place.copy_(entering)
            elif initials is None:
                place.zero_()
            else:
                place.copy_(next(fresh))
            for chunk in range(first, stop):
                target = states[:, chunk + 1] if chunk + 1 < stop else finals[piece]
                _step(update, decay, chunk, states[:, chunk], target)
        ctx.save_for_backward(states, decay)
        ctx.ranges, ctx.continued, ctx.has_initials = ranges, continued, initials is not None
        return states, finals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: Tensor, d_finals: Tensor) -> tuple[Any, ...]:
        """Run the adjoint recurrence from the last chunk of each piece to its first."""
        states, decay = ctx.saved_tensors
        ranges, continued = ctx.ranges, ctx.continued
        d_update = torch.empty_like(states)
        starts = torch.empty_like(d_finals)
        for piece, (first, stop) in enumerate(ranges):
            place = d_update[:, stop - 1] if first < stop else starts[piece]
            place.copy_(d_finals[piece])
            for chunk in reversed(range(first, stop)):
                target = d_update[:, chunk - 1] if chunk > first else starts[piece]
                _step(d_states, decay, chunk, d_update[:, chunk], target)
        d_log_decay = None
        if decay is not None:
            d_decay = (d_update * states).sum(-1, keepdim=True)
            if decay.shape[-2] == 1:
                d_decay = d_decay.sum(-2, keepdim=True)
            d_log_decay = (d_decay * decay).squeeze(-1)
        d_entering = starts[0] if continued else torch.zeros_like(starts[0])
        d_initials = starts[1 if continued else 0 :] if ctx.has_initials else None
        return d_update, d_log_decay, d_entering, d_initials, None, None


def decay_scan(
    update: Tensor,
    log_decay: Tensor | None,
    entering: Tensor,
    initials: Tensor | None,
    *,
    ranges: Ranges,
    continued: bool,
) -> tuple[Tensor, Tensor]:
    """Return the state that enters every chunk and the state after every piece.

    Differentiable in update, log_decay, entering and initials.

    Args:
        update: what each chunk adds [B, N, H, K, V].
        log_decay: of whole chunks, [B, N, H, K] or [B, N, H, 1]; None is the identity.
        entering: state [B, H, K, V] from which the first piece goes on if ``continued``.
        initials: states [n, B, H, K, V] of the other pieces, in order; None means zeros.
        ranges: first chunk and one past the last of every piece; they cover all N chunks.
        continued: whether the first piece starts from ``entering``.

    Returns:
        states [B, N, H, K, V] and finals [pieces, B, H, K, V].

    >>> ones = torch.ones(1, 3, 1, 1, 1)
    >>> states, finals = decay_scan(ones, None, ones[:, 0], None, ranges=((0, 3),), continued=True)
    >>> states.flatten().tolist(), finals.item()
    ([1.0, 2.0, 3.0], 4.0)
    """
    scanned = DecayScanFunction.apply(update, log_decay, entering, initials, ranges, continued)
    return cast("tuple[Tensor, Tensor]", scanned)


def fold_chunks(
    update: Tensor, log_decay: Tensor | None, start: Tensor, chunks: Iterable[int]
) -> Tensor:
    """Return the last state of the recurrence alone: nothing is kept, nothing is differentiable.

    Args:
        update: [B, N, H, K, V].
        log_decay: [B, N, H, K] or [B, N, H, 1]; None is the identity.
        start: state [B, H, K, V] to begin with.
        chunks: the chunks in the order in which they act; descending for the adjoint.
    """
    decay = None if log_decay is None else log_decay.exp().unsqueeze(-1)
    state = start.clone(memory_format=torch.contiguous_format)
    for chunk in chunks:
        _step(update, decay, chunk, state, state)
    return state


def _step(update: Tensor, decay: Tensor | None, chunk: int, state: Tensor, target: Tensor) -> None:
    """Write ``decay[chunk] ∘ state + update[chunk]`` into the target."""
    if decay is None:
        torch.add(state, update[:, chunk], out=target)
    else:
        torch.addcmul(update[:, chunk], state, decay[:, chunk], out=target)
