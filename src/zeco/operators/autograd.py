"""The one autograd function: every operator under every sequence-parallel method.

It saves the inputs, the entering state and what little a segment keeps. Forward and backward are an
`Exchange`'s: it decides when the segment's passes run around the communication. See
`zeco.operators.segment` for the order.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeco.core.documents import Pieces
from zeco.core.precision import true_fp32, uses_tf32
from zeco.core.shapes import state_dtype
from zeco.operators.segment import Exchange, Inputs, Operator, Outcome, Segment
from zeco.operators.single_device import SingleDevice


class SegmentFunction(torch.autograd.Function):
    """Outputs and finals of an operator call, differentiable in inputs and initial states.

    Autocast and TF32 are off inside: states and gates keep their own precision.
    """

    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        exchange: Exchange,
        slots: tuple[Pieces, ...],
        initial: Tensor | None,
        initials: Tensor | None,
        *inputs: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the exchange's forward."""
        segments, found = run_segments(operator, exchange, slots, initial, initials, inputs)
        ctx.operator, ctx.exchange, ctx.slots = operator, exchange, slots
        kept = [segment.keep() for segment in segments]
        ctx.num_kept = [len(tensors) for tensors in kept]
        saved = (tensor for tensors in kept for tensor in tensors)
        ctx.save_for_backward(initials, *found.entering, *inputs, *saved)
        # Mostly nobody uses the finals: then no zeros are made for them.
        ctx.set_materialize_grads(False)
        return joined(found.o, 1), joined(found.finals, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_finals: Tensor | None) -> tuple[Any, ...]:
        """Run the exchange's backward."""
        exchange: Exchange = ctx.exchange
        slots: tuple[Pieces, ...] = ctx.slots
        initials, *rest = ctx.saved_tensors
        entering, rest = rest[: len(slots)], rest[len(slots) :]
        num_inputs = len(rest) - sum(ctx.num_kept)
        inputs, kept = tuple(rest[:num_inputs]), iter(rest[num_inputs:])
        first = cast("Tensor", inputs[0])
        with Reported(exchange), _own_precision(first.device):
            segments = _segments(ctx.operator, inputs, slots)
            if d_o is None:
                B, H, _, V = ctx.operator.state_shape(inputs)
                d_o = first.new_zeros(B, first.shape[1], H, V)
            if d_finals is None and not _spares_zeros(exchange, segments):
                d_finals = _zero_states(ctx.operator, inputs, sum(len(p.documents) for p in slots))
            for segment, count in zip(segments, ctx.num_kept, strict=True):
                segment.wanted = ctx.needs_input_grad[-num_inputs:]
                segment.recall(tuple(islice(kept, count)))
            found = exchange.backward(
                segments,
                entering,
                _split_initials(initials, slots),
                _cut(d_o, [p.num_tokens for p in slots], 1),
                _cut(d_finals, [len(p.documents) for p in slots], 0),
            )
        if len(found) == 1:
            d_inputs = found[0].inputs
        else:
            d_inputs = [
                None if parts[0] is None else joined([p for p in parts if p is not None], 1)
                for parts in zip(*(f.inputs for f in found), strict=True)
            ]
        d_fresh = [f.initials for f in found if f.initials is not None]
        wanted = ctx.needs_input_grad[3] and exchange.is_first()
        d_initial = found[0].entering if wanted else None
        return None, None, None, d_initial, joined(d_fresh, 0) if d_fresh else None, *d_inputs


def run_segments(
    operator: Operator,
    exchange: Exchange,
    slots: tuple[Pieces, ...],
    initial: Tensor | None,
    initials: Tensor | None,
    inputs: Inputs,
) -> tuple[list[Segment], Outcome]:
    """Run the exchange's forward on new segments; ``initial`` is None for zeros on one device."""
    segments = _segments(operator, inputs, slots)
    if initial is None and not segments[0].takes_none:
        initial = _zero_states(operator, inputs, 1)[0]
    given = cast("Tensor", initial), _split_initials(initials, slots)
    with Reported(exchange), _own_precision(cast("Tensor", inputs[0]).device):
        return segments, exchange.forward(segments, *given)


def _segments(operator: Operator, inputs: Inputs, slots: tuple[Pieces, ...]) -> list[Segment]:
    """Cut the inputs, tokens in dim 1, into the segments of the rank's slots."""
    if len(slots) == 1:
        return [operator.segment(inputs, slots[0])]
    sizes = [pieces.num_tokens for pieces in slots]
    parts = [[None] * len(slots) if x is None else _cut(x, sizes, 1) for x in inputs]
    return [
        operator.segment(tuple(part[slot] for part in parts), pieces)
        for slot, pieces in enumerate(slots)
    ]


def _split_initials(initials: Tensor | None, slots: tuple[Pieces, ...]) -> Sequence[Tensor | None]:
    if initials is None:
        return [None] * len(slots)
    return _cut(initials, [len(pieces.fresh) for pieces in slots], 0)


def _cut(x: Any, sizes: list[int], dim: int) -> Sequence[Any]:
    return [x] * len(sizes) if len(sizes) == 1 or x is None else x.split(sizes, dim)


def _zero_states(operator: Operator, inputs: Inputs, count: int) -> Tensor:
    """Return ``count`` states [n, B, H, K, V] of zeros."""
    size = (count, *operator.state_shape(inputs))
    return cast("Tensor", inputs[0]).new_zeros(size, dtype=state_dtype(*inputs))


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return the parts as one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _spares_zeros(exchange: Exchange, segments: Sequence[Segment]) -> bool:
    """Return whether None may stand for the gradients of finals that nobody uses.

    The segment of a sequence that lies whole on one device says so itself. Whatever else exchanges
    states reads them, unless its ``takes_none`` says that it needn't where each slot has one final.
    """
    if type(exchange) is SingleDevice:
        return segments[0].takes_none
    takes_none: bool = getattr(exchange, "takes_none", False)
    return takes_none and all(len(segment.pieces.documents) == 1 for segment in segments)


_NOTHING = nullcontext()


def _own_precision(device: torch.device) -> AbstractContextManager[None]:
    """Keep autocast and TF32 away from states and gates, and let kernels start where tensors are.

    To ask whether anything has to change for that takes less time than to change it.
    """
    kind = device.type
    elsewhere = kind == "cuda" and device.index != torch.cuda.current_device()
    if elsewhere or torch.is_autocast_enabled(kind) or uses_tf32(device):
        return _switched(device)
    return _NOTHING


@contextmanager
def _switched(device: torch.device) -> Generator[None]:
    where = torch.cuda.device(device) if device.type == "cuda" else _NOTHING
    with where, torch.autocast(device.type, enabled=False), true_fp32(device):
        yield


class Reported:
    """Tells the other ranks about an error on its way out."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            self.exchange.report_failure(error)
