"""Cutting batches into this rank's part and putting tensors together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeco.collectives.all_to_all import gather_sizes
from zeco.collectives.transport import Message, Transport, wait_all
from zeco.core.errors import ArgumentError
from zeco.core.partition import shard_bounds
from zeco.sequence_parallel.context import SequenceParallel

IGNORE_INDEX = -100


def shift_labels(labels: Tensor, *, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Return, for every position, the label of the next one; nothing follows the last.

    Args:
        labels: [B, L], the whole sequence.
        ignore_index: what the last position gets.

    >>> shift_labels(torch.tensor([[5, 6, 7]]))
    tensor([[   6,    7, -100]])
    """
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)


def shard_batch(batch: Mapping[str, Any], sp: SequenceParallel) -> dict[str, Any]:
    """Cut a batch of whole sequences into this rank's part.

    Every rank passes the same batch. Labels are shifted over the whole sequence *before* the cut, so
    that the last token of a rank still learns to predict the first of the next. Nothing is padded or
    dropped: lengths that the ranks don't divide give uneven shards.

    Args:
        batch: ``"input_ids"`` [B, L] or ``"inputs_embeds"`` [B, L, D]; optionally ``"labels"`` [B, L],
            ``"position_ids"`` [B, L] (made from 0 to L - 1 if missing), ``"cu_seqlens"`` (left global),
            and whatever else: tensors whose second dim is L are cut along it, the rest is passed on.
        sp: the ranks that share each sequence.

    Returns:
        The batch's part, with ``"shift_labels"`` beside ``"labels"`` where there were labels. With
        ``cu_seqlens`` a document's last token has no label, and positions made start at 0 in each
        document.

    Raises:
        ArgumentError: no tokens, a tensor of another length, or shard sizes that don't sum to L.

    >>> import zeco
    >>> part = zeco.shard_batch({"input_ids": torch.arange(4)[None]}, zeco.SequenceParallel())
    >>> part["position_ids"]
    tensor([[0, 1, 2, 3]])
    """
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise ArgumentError(
            "shard_batch: the batch needs a tensor 'input_ids' [B, L] or 'inputs_embeds' [B, L, D]; "
            f"it has {sorted(batch)}"
        )
    L = tokens.shape[1]
    spans = sp.spans(L)
    whole = dict(batch)
    for name in ("labels", "position_ids", "shift_labels"):
        given = whole.get(name)
        if isinstance(given, Tensor) and given.shape[-1] != L:
            raise ArgumentError(
                f"shard_batch: {name} has shape {list(given.shape)}, but the tokens have length {L}"
            )
    document_starts = _document_starts(whole.get("cu_seqlens"), L)
    if whole.get("labels") is not None and "shift_labels" not in whole:
        shifted = shift_labels(whole["labels"])
        if document_starts is not None:
            ends = document_starts[1:] - 1
            shifted[:, ends[ends >= 0].to(shifted.device)] = IGNORE_INDEX
        whole["shift_labels"] = shifted
    if whole.get("position_ids") is None:
        positions = torch.arange(L, device=tokens.device)
        if document_starts is not None:
            lengths = torch.diff(document_starts, append=document_starts.new_tensor([L]))
            positions = positions - torch.repeat_interleave(document_starts, lengths).to(
                positions.device
            )
        whole["position_ids"] = positions.expand(tokens.shape[0], L)
    return {name: _cut(name, value, L, spans) for name, value in whole.items()}


def _document_starts(cu_seqlens: Tensor | None, length: int) -> Tensor | None:
    if cu_seqlens is None:
        return None
    if int(cu_seqlens[-1]) != length:
        raise ArgumentError(
            f"shard_batch: cu_seqlens ends at {int(cu_seqlens[-1])}, but the tokens have length "
            f"{length}; give the boundaries of the whole batch"
        )
    return cu_seqlens[:-1].long().cpu()


Spans = tuple[tuple[int, int], ...]


def _cut(name: str, value: Any, length: int, spans: Spans) -> Any:
    if name == "cu_seqlens" or not isinstance(value, Tensor):
        return value
    if name == "position_ids":  # also [3, B, L], as multimodal models have it
        return _pick(value, -1, spans)
    if value.ndim < 2 or value.shape[1] != length:
        return value
    return _pick(value, 1, spans)


def _pick(x: Tensor, dim: int, spans: Spans) -> Tensor:
    """Take spans of tokens along a dim, side by side."""
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in spans], dim)


class _UnshardFunction(torch.autograd.Function):
    """Forward: every rank gets all parts. Backward: every rank gets the sum of its part's gradients.

    The gradient is summed over the ranks that hold the whole tensor. A loss that each of them computes
    from it counts once a rank, as torch's own all-gather has it.
    """

    @staticmethod
    def forward(ctx: Any, transport: Transport, sizes: tuple[int, ...], x: Tensor) -> Tensor:
        ctx.transport, ctx.sizes = transport, sizes
        x = x.contiguous()
        parts = [
            x if rank == transport.rank else x.new_empty(x.shape[0], size, *x.shape[2:])
            for rank, size in enumerate(sizes)
        ]
        tag = transport.next_tags()
        others = [rank for rank in range(transport.size) if rank != transport.rank]
        sends = [Message(x, rank, tag) for rank in others]
        receives = [Message(parts[rank], rank, tag) for rank in others]
        wait_all(transport.exchange(sends, receives, "unshard"))
        return torch.cat(parts, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_whole: Tensor) -> tuple[Any, ...]:
        start, stop = shard_bounds(ctx.sizes, ctx.transport.rank)
        return None, None, ctx.transport.all_reduce(d_whole)[:, start:stop]


def unshard(x: Tensor, sp: SequenceParallel) -> Tensor:
    """Put the ranks' parts of a tensor together; every rank gets the whole.

    Args:
        x: this rank's part [B, T, ...]; T may differ between ranks.
        sp: the ranks that share the sequence.

    Returns:
        [B, L, ...]. Differentiable: a part's gradient is the sum of what all ranks send to it.
    """
    if x.ndim < 2:
        raise ArgumentError(f"unshard: x has shape {list(x.shape)}, but must be [B, T, ...]")
    transport = sp.transport
    if transport.size == 1:
        return x
    sizes = gather_sizes(x.shape[1], transport, x.device)
    by_rank = _UnshardFunction.apply(transport, sizes, x)
    if sp.layout == "contiguous":
        return by_rank
    spans = [span for rank in range(sp.size) for span in sp.spans(sum(sizes), rank)]
    parts = by_rank.split([stop - start for start, stop in spans], 1)
    order = sorted(range(len(spans)), key=lambda i: (spans[i], i))
    return torch.cat([parts[i] for i in order], 1)


class _FromRankFunction(torch.autograd.Function):
    """Forward: every rank gets one rank's tensor. Backward: that rank gets the summed gradient."""

    @staticmethod
    def forward(ctx: Any, transport: Transport, source: int, x: Tensor) -> Tensor:
        ctx.transport, ctx.source = transport, source
        tag = transport.next_tags()
        if transport.rank == source:
            x = x.contiguous()
            others = [peer for peer in range(transport.size) if peer != source]
            sends = [Message(x, peer, tag) for peer in others]
            wait_all(transport.exchange(sends, [], "final state"))
            return x.clone()
        found = x.new_empty(x.shape)
        wait_all(transport.exchange([], [Message(found, source, tag)], "final state"))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_final: Tensor) -> tuple[Any, ...]:
        total = ctx.transport.all_reduce(d_final)
        mine = ctx.transport.rank == ctx.source
        return None, None, total if mine else torch.zeros_like(total)


class _SumFunction(torch.autograd.Function):
    """Forward: every rank gets the sum. Backward: every rank gets the summed gradient."""

    @staticmethod
    def forward(ctx: Any, transport: Transport, x: Tensor) -> Tensor:
        ctx.transport = transport
        return transport.all_reduce(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Any, ...]:
        return None, ctx.transport.all_reduce(d_sum)


def gather_final_state(
    state: Tensor, sp: SequenceParallel, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Give every rank the state with which the sequence ends.

    Args:
        state: an operator's ``final_state`` on this rank, [B, H, K, V]; with ``cu_seqlens`` [N, H, K,
            V], whose rows are zero on the ranks where their document doesn't end.
        sp: the ranks that share the sequence.
        cu_seqlens: the global document boundaries that the operator was given.

    Returns:
        The state at the end of the sequence, or of every document. Differentiable; gradients of all
        ranks are summed.
    """
    if sp.size == 1:
        return state
    if cu_seqlens is not None:
        if state.shape[0] != len(cu_seqlens) - 1:
            raise ArgumentError(
                f"gather_final_state: state has {state.shape[0]} rows, but cu_seqlens names "
                f"{len(cu_seqlens) - 1} documents"
            )
        return _SumFunction.apply(sp.transport, state)
    last_slot = sp.num_slots - 1
    source = next(rank for rank in range(sp.size) if last_slot in sp.slots_of(rank))
    return _FromRankFunction.apply(sp.transport, source, state)
