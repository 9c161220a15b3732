"""The one autograd function: every operator under every sequence-parallel method.

It saves the inputs, the entering state and what little a segment keeps. Forward and backward are an
`Exchange`'s: it decides when the segment's passes run around the communication. See
`zeco.operators.segment` for the order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeco.core.documents import Pieces, check_cu_seqlens, local_pieces, whole
from zeco.core.errors import ArgumentError
from zeco.core.precision import true_fp32, uses_tf32
from zeco.core.shapes import state_dtype
from zeco.operators.segment import (
    Exchange,
    Gradients,
    HeadExchange,
    Inputs,
    Operator,
    Outcome,
    Segment,
    spares_zeros,
)

CallT = ParamSpec("CallT")
ResultT = TypeVar("ResultT")


class SingleDevice:
    """The exchange of a sequence that lies whole on one device: there is none."""

    check = False

    def report_failure(self, error: BaseException) -> None:
        """Do nothing: no other rank waits."""

    def mirrored(self) -> SingleDevice:
        """Return this: reversed, the sequence lies whole on this device too."""
        return self

    def is_first(self) -> bool:
        """Return True: the sequence starts here."""
        return True

    def locate(self, num_tokens: int, cu_seqlens: Tensor | None, batch: int) -> tuple[Pieces, ...]:
        """Return the documents among the tokens, which are the whole sequence."""
        if cu_seqlens is None:
            return (whole(num_tokens),)
        bounds = check_cu_seqlens(cu_seqlens, num_tokens, batch)
        return (local_pieces(bounds, 0, num_tokens),)

    def swap_heads(
        self, num_tokens: int, cu_seqlens: Tensor | None, num_heads: int, device: torch.device
    ) -> None:
        """Return None: all heads of all tokens are here."""

    def forward(
        self, segments: Sequence[Segment], initial: Tensor, initials: Sequence[Tensor | None]
    ) -> Outcome:
        """Run the pass from the initial state."""
        (segment,) = segments
        o, finals = segment.output(initial, initials[0])
        return Outcome([o], [finals], [initial])

    def backward(
        self,
        segments: Sequence[Segment],
        entering: Sequence[Tensor],
        initials: Sequence[Tensor | None],
        d_o: Sequence[Tensor],
        d_finals: Sequence[Tensor],
    ) -> list[Gradients]:
        """Replay the pass and take its gradients."""
        (segment,) = segments
        segment.replay(entering[0], initials[0])
        return [segment.backward(d_o[0], d_finals[0])]


_ALONE = SingleDevice()


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
        segments, found = _run(operator, exchange, slots, initial, initials, inputs)
        ctx.operator, ctx.exchange, ctx.slots = operator, exchange, slots
        kept = [segment.keep() for segment in segments]
        ctx.num_kept = [len(tensors) for tensors in kept]
        saved = (tensor for tensors in kept for tensor in tensors)
        ctx.save_for_backward(initials, *found.entering, *inputs, *saved)
        # Mostly nobody uses the finals: then no zeros are made for them.
        ctx.set_materialize_grads(False)
        return _joined(found.o, 1), _joined(found.finals, 0)

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
        with _Reported(exchange), _own_precision(first.device):
            segments = _segments(ctx.operator, inputs, slots)
            if d_o is None:
                B, H, _, V = ctx.operator.state_shape(inputs)
                d_o = first.new_zeros(B, first.shape[1], H, V)
            spared = spares_zeros(exchange, segments, alone=type(exchange) is SingleDevice)
            if d_finals is None and not spared:
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
                None if parts[0] is None else _joined([p for p in parts if p is not None], 1)
                for parts in zip(*(f.inputs for f in found), strict=True)
            ]
        d_fresh = [f.initials for f in found if f.initials is not None]
        wanted = ctx.needs_input_grad[3] and exchange.is_first()
        d_initial = found[0].entering if wanted else None
        return None, None, None, d_initial, _joined(d_fresh, 0) if d_fresh else None, *d_inputs


def _run(
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
    with _Reported(exchange), _own_precision(cast("Tensor", inputs[0]).device):
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


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


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


class _Reported:
    """Tells the other ranks about an error on its way out."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            self.exchange.report_failure(error)


def operator_call(function: Callable[CallT, ResultT]) -> Callable[CallT, ResultT]:
    """Decorate a public operator: when it raises on one rank, the ranks that wait for it are told."""

    @functools.wraps(function)
    def call(*args: CallT.args, **kwargs: CallT.kwargs) -> ResultT:
        sp = cast("Exchange | None", kwargs.get("sp"))
        if sp is None:
            return function(*args, **kwargs)
        with _Reported(sp):
            return function(*args, **kwargs)

    return call


def run_operator(
    operator: Operator,
    inputs: Inputs,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    sp: Exchange | None,
) -> tuple[Tensor, Tensor | None]:
    """Call an operator on this rank's tokens; every public operator ends here.

    Args:
        operator: the operator, options fixed.
        inputs: its tensors [B, T, ...], shapes already checked, in the order of ``input_names``.
        initial_state: [B, H, K, V], used on the rank where the sequence starts; with
            ``cu_seqlens`` [N, H, K, V], each row on the rank where its document starts.
        output_final_state: whether to return the second value.
        cu_seqlens: global document boundaries [N+1], or None.
        sp: the exchange between ranks, or None for a sequence that lies whole on this device.

    Returns:
        The outputs [B, T, H, V] in the dtype of the first input, and the state that leaves this
        rank's (last) slot [B, H, K, V]; with ``cu_seqlens`` [N, H, K, V], zero except in the rows of
        the documents that end on this rank.
    """
    exchange = _ALONE if sp is None else sp
    first = inputs[0]
    if first is None:
        raise ArgumentError(f"{operator.name}: {operator.input_names[0]} is required")
    if cu_seqlens is not None and cu_seqlens.device != first.device:
        raise ArgumentError(
            f"{operator.name}: cu_seqlens is on {cu_seqlens.device}, but the inputs are on "
            f"{first.device}; move it there"
        )
    shape = operator.state_shape(inputs)
    slots = exchange.locate(first.shape[1], cu_seqlens, shape[0])
    states = None
    if initial_state is not None:
        states = _checked_states(operator, initial_state, shape, cu_seqlens)
        states = states.to(state_dtype(*inputs))
    heads = exchange.swap_heads(first.shape[1], cu_seqlens, shape[1], first.device)
    if heads is not None:
        if states is None:
            count = shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
            states = first.new_zeros((count, *shape[1:]), dtype=state_dtype(*inputs))
        with _Reported(exchange):
            return _run_by_heads(
                operator, inputs, states, output_final_state, cu_seqlens, exchange, slots, heads
            )
    initial, initials = states, None
    if cu_seqlens is not None:
        initial = None
        fresh = [pieces.documents[i] for pieces in slots for i in pieces.fresh]
        initials = None if states is None else states[fresh].unsqueeze(1)
    if initial is None and sp is not None:
        initial = first.new_zeros(shape, dtype=state_dtype(*inputs))
    tensors = (initial, initials, *inputs)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        o, finals = SegmentFunction.apply(operator, exchange, slots, *tensors)
    else:
        _, found = _run(operator, exchange, slots, initial, initials, inputs)
        o, finals = _joined(found.o, 1), _joined(found.finals, 0)
    if not output_final_state:
        return o, None
    if cu_seqlens is None:
        return o, finals[-1]
    return o, _scatter_finals(finals, slots, cu_seqlens)


def _checked_states(
    operator: Operator,
    initial_state: Tensor,
    shape: tuple[int, int, int, int],
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Refuse initial states of another shape than one for each sequence or document."""
    count = shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    expected = (count, *shape[1:])
    if tuple(initial_state.shape) != expected:
        raise ArgumentError(
            f"{operator.name}: initial_state has shape {list(initial_state.shape)}, but must be "
            f"{list(expected)}: one state [H, K, V] for each "
            + ("sequence of the batch" if cu_seqlens is None else "document of cu_seqlens")
        )
    return initial_state


def _run_by_heads(
    operator: Operator,
    inputs: Inputs,
    states: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    exchange: Exchange,
    slots: tuple[Pieces, ...],
    heads: HeadExchange,
) -> tuple[Tensor, Tensor | None]:
    """Run an operator on this rank's share of the heads of the whole sequence."""
    if cu_seqlens is None:
        mine = states if exchange.is_first() else torch.zeros_like(states)
    else:
        mine = _keep_rows(states, [p.documents[i] for p in slots for i in p.fresh])
    given = [x for x in inputs if x is not None]
    wholes, mine = heads.to_heads(given, mine)
    found = iter(wholes)
    o, final = run_operator(
        operator,
        tuple(None if x is None else next(found) for x in inputs),
        initial_state=mine,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        sp=None,
    )
    if final is None:
        raise RuntimeError("an operator gave no final state although it was asked for it")
    o, final = heads.to_tokens(o, final)
    if not output_final_state:
        return o, None
    if cu_seqlens is not None:
        final = _keep_rows(final, [p.documents[i] for p in slots for i in p.ended])
    return o, final


def _keep_rows(states: Tensor, rows: list[int]) -> Tensor:
    """Set the rows that aren't listed to zero."""
    index = torch.tensor(rows, dtype=torch.long, device=states.device)
    return torch.zeros_like(states).index_copy(0, index, states[index])


def _scatter_finals(finals: Tensor, slots: tuple[Pieces, ...], cu_seqlens: Tensor) -> Tensor:
    """Put the states of documents that end on this rank into rows [N, H, K, V], zeros elsewhere."""
    rows: list[int] = []
    documents: list[int] = []
    first = 0
    for pieces in slots:
        rows += [first + i for i in pieces.ended]
        documents += [pieces.documents[i] for i in pieces.ended]
        first += len(pieces.documents)
    index = torch.tensor(documents, dtype=torch.long, device=finals.device)
    ended = finals[rows].squeeze(1)
    return finals.new_zeros(len(cu_seqlens) - 1, *finals.shape[2:]).index_copy(0, index, ended)
