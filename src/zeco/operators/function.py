"""What every public operator ends in: a call on this rank's tokens, under any exchange."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from zeco.core.documents import Pieces
from zeco.core.errors import ArgumentError
from zeco.core.shapes import state_dtype
from zeco.operators.autograd import Reported, SegmentFunction, joined, run_segments
from zeco.operators.segment import Exchange, HeadExchange, Inputs, Operator
from zeco.operators.single_device import SingleDevice

CallT = ParamSpec("CallT")
ResultT = TypeVar("ResultT")

_ALONE = SingleDevice()


def operator_call(function: Callable[CallT, ResultT]) -> Callable[CallT, ResultT]:
    """Decorate a public operator: when it raises on one rank, the ranks that wait for it are told."""

    @functools.wraps(function)
    def call(*args: CallT.args, **kwargs: CallT.kwargs) -> ResultT:
        sp = cast("Exchange | None", kwargs.get("sp"))
        if sp is None:
            return function(*args, **kwargs)
        with Reported(sp):
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
        with Reported(exchange):
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
        _, found = run_segments(operator, exchange, slots, initial, initials, inputs)
        o, finals = joined(found.o, 1), joined(found.finals, 0)
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
