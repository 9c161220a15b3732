"""The one autograd function: every operator under every sequence-parallel method.

It saves the inputs and the entering state only. Forward and backward are an `Exchange`'s: it decides
when the segment's passes run around the communication. See `zeco.operators.segment` for the order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeco.core.documents import Pieces, check_cu_seqlens, local_pieces, whole
from zeco.core.errors import ArgumentError
from zeco.core.shapes import state_dtype
from zeco.operators.segment import Exchange, Gradients, Inputs, Operator, Segment

CallT = ParamSpec("CallT")
ResultT = TypeVar("ResultT")


class SingleDevice:
    """The exchange of a sequence that lies whole on one device: there is none."""

    check = False

    def report_failure(self, error: BaseException) -> None:
        """Do nothing: no other rank waits."""

    def is_first(self) -> bool:
        """Return True: the sequence starts here."""
        return True

    def locate(self, num_tokens: int, cu_seqlens: Tensor | None, batch: int) -> Pieces:
        """Return the documents among the tokens, which are the whole sequence."""
        if cu_seqlens is None:
            return whole(num_tokens)
        return local_pieces(check_cu_seqlens(cu_seqlens, num_tokens, batch), 0, num_tokens)

    def forward(
        self, segment: Segment, initial: Tensor, initials: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the pass from the initial state."""
        o, finals = segment.output(initial, initials)
        return o, finals, initial

    def backward(
        self,
        segment: Segment,
        entering: Tensor,
        initials: Tensor | None,
        d_o: Tensor,
        d_finals: Tensor,
    ) -> Gradients:
        """Replay the pass and take its gradients."""
        segment.replay(entering, initials)
        return segment.backward(d_o, d_finals)


class SegmentFunction(torch.autograd.Function):
    """Outputs and finals of an operator call, differentiable in inputs and initial states.

    Autocast is off inside: states and gates keep their own dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        exchange: Exchange,
        pieces: Pieces,
        initial: Tensor,
        initials: Tensor | None,
        *inputs: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the exchange's forward."""
        segment = operator.segment(inputs, pieces)
        with _reported(exchange), torch.autocast(initial.device.type, enabled=False):
            o, finals, entering = exchange.forward(segment, initial, initials)
        ctx.operator, ctx.exchange, ctx.pieces = operator, exchange, pieces
        ctx.save_for_backward(entering, initials, *inputs)
        return o, finals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor, d_finals: Tensor) -> tuple[Any, ...]:
        """Run the exchange's backward."""
        entering, initials, *inputs = ctx.saved_tensors
        exchange: Exchange = ctx.exchange
        segment = ctx.operator.segment(tuple(inputs), ctx.pieces)
        with _reported(exchange), torch.autocast(entering.device.type, enabled=False):
            found = exchange.backward(segment, entering, initials, d_o, d_finals)
        wanted = ctx.needs_input_grad[3] and exchange.is_first()
        return None, None, None, found.entering if wanted else None, found.initials, *found.inputs


@contextmanager
def _reported(exchange: Exchange | None) -> Generator[None]:
    """Tell the other ranks about an error on its way out."""
    try:
        yield
    except Exception as error:
        if exchange is not None:
            exchange.report_failure(error)
        raise


def operator_call(function: Callable[CallT, ResultT]) -> Callable[CallT, ResultT]:
    """Decorate a public operator: when it raises on one rank, the ranks that wait for it are told."""

    @functools.wraps(function)
    def call(*args: CallT.args, **kwargs: CallT.kwargs) -> ResultT:
        with _reported(cast("Exchange | None", kwargs.get("sp"))):
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
        The outputs [B, T, H, V] in the dtype of the first input, and this rank's leaving state
        [B, H, K, V]; with ``cu_seqlens`` [N, H, K, V], zero except in the rows of the documents
        that end on this rank.
    """
    exchange = SingleDevice() if sp is None else sp
    first = inputs[0]
    if first is None:
        raise ArgumentError(f"{operator.name}: {operator.input_names[0]} is required")
    shape = operator.state_shape(inputs)
    pieces = exchange.locate(first.shape[1], cu_seqlens, shape[0])
    dtype = state_dtype(*inputs)
    initial, initials = _initial_states(operator, initial_state, pieces, shape, cu_seqlens, dtype)
    if initial is None:
        initial = first.new_zeros(shape, dtype=dtype)
    o, finals = SegmentFunction.apply(operator, exchange, pieces, initial, initials, *inputs)
    if not output_final_state:
        return o, None
    if cu_seqlens is None:
        return o, finals[-1]
    return o, _scatter_finals(finals, pieces, cu_seqlens)


def _initial_states(
    operator: Operator,
    initial_state: Tensor | None,
    pieces: Pieces,
    shape: tuple[int, int, int, int],
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """Split the user's initial states into the first rank's and those of fresh pieces."""
    if initial_state is None:
        return None, None
    count = shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    expected = (count, *shape[1:])
    if tuple(initial_state.shape) != expected:
        raise ArgumentError(
            f"{operator.name}: initial_state has shape {list(initial_state.shape)}, but must be "
            f"{list(expected)}: one state [H, K, V] for each "
            + ("sequence of the batch" if cu_seqlens is None else "document of cu_seqlens")
        )
    initial_state = initial_state.to(dtype)
    if cu_seqlens is None:
        return initial_state, None
    documents = [pieces.documents[i] for i in pieces.fresh]
    return None, initial_state[documents].unsqueeze(1)


def _scatter_finals(finals: Tensor, pieces: Pieces, cu_seqlens: Tensor) -> Tensor:
    """Put the states of documents that end on this rank into rows [N, H, K, V], zeros elsewhere."""
    ended = [pieces.documents[i] for i in pieces.ended]
    documents = torch.tensor(ended, dtype=torch.long, device=finals.device)
    rows = finals.new_zeros(len(cu_seqlens) - 1, *finals.shape[2:])
    return rows.index_copy(0, documents, finals[list(pieces.ended)].squeeze(1))
