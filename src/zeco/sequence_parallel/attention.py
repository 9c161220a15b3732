"""Softmax attention for hybrids: this rank's tokens in and out, whatever the split of the sequence.

Two exchanges, since softmax needs every key and has no state to pass on:

| exchange | what crosses the network | needs |
| --- | --- | --- |
| `heads` | queries, keys, values, outputs: tokens for heads and back | heads divide by ranks |
| `gather` | keys and values, to the ranks whose queries may see them | nothing |

Inside, `torch.nn.functional.scaled_dot_product_attention` runs on each document's run of queries.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from zeco.collectives.all_to_all import gather_numbers
from zeco.collectives.single import SingleTransport
from zeco.collectives.transport import Transport
from zeco.core.documents import check_cu_seqlens
from zeco.core.errors import ArgumentError, UnsupportedError, unknown_name
from zeco.core.partition import shard_bounds
from zeco.core.shapes import check_floating, check_same_device, check_shapes
from zeco.operators.arguments import check_heads
from zeco.operators.function import operator_call
from zeco.sequence_parallel.context import SequenceParallel
from zeco.sequence_parallel.methods.ulysses import Ulysses
from zeco.sequence_parallel.scores import Queries, Sight, attend, queries_in
from zeco.sequence_parallel.tokens import Spans, fetch_tokens, merge_spans

EXCHANGES = ("auto", "heads", "gather")


class PastKeys(NamedTuple):
    """Keys and values of the tokens before a call, for prefill in pieces and decoding.

    Attributes:
        k: [N, S, Hkv, D], one row a sequence of the batch or a packed document.
        v: [N, S, Hkv, V].
        lengths: how many of the S tokens of each row count, the first ones; int64 [N].
    """

    k: Tensor
    v: Tensor
    lengths: Tensor


@operator_call
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    past: PastKeys | None = None,
    sp: SequenceParallel | None = None,
    exchange: str = "auto",
) -> Tensor:
    """Attend by softmax to the tokens of the same document.

        o_t = Σ_j softmax_j(scale · q_t · k_j) v_j

    over all j ≤ t, or with ``causal=False`` over all j. Differentiable in q, k, v and ``past``. Any
    layout and shards serve, empty ones too.

    Args:
        q: this rank's queries [B, T, Hq, D].
        k: keys [B, T, Hkv, D]; head h of q reads head h // (Hq / Hkv).
        v: values [B, T, Hkv, V].
        causal: whether a token sees none that come after it.
        scale: factor of the products; D**-0.5 by default.
        window: see tokens less than so many away only (so a causal token sees ``window`` tokens,
            itself included); None for no limit.
        cu_seqlens: boundaries [N+1] of packed documents, int32 or int64, 0 first, the total length
            last, counted over all ranks; needs B = 1.
        past: what comes before the sequence, or before each document, the same on every rank, which
            is a copy that sends nothing; a rank's gradient of it is its own queries' share.
        sp: the sequence-parallel context when the sequence is split over ranks, else None.
        exchange: ``"heads"``, all-to-all; ``"gather"``, which brings every rank the keys and values
            that its queries can see (of a causal contiguous sequence half of them, with documents or
            a window fewer); ``"auto"``: heads if both counts of heads divide by the ranks, which
            balances the work, else gather. Balance the latter with layout "zigzag".

    Returns:
        This rank's outputs [B, T, Hq, V].

    Raises:
        ArgumentError: a shape, dtype, device, value or name that doesn't fit, or ranks whose pasts
            differ in length.
        UnsupportedError: exchange "heads" with heads that don't divide by the ranks.

    Source: Vaswani et al., arXiv:1706.03762, equation 1; by heads: Ulysses, arXiv:2309.14509.

    >>> one = torch.ones(1, 2, 1, 1)
    >>> attention(one, one, torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)).flatten().tolist()
    [1.0, 2.0]
    """
    sizes = check_shapes(
        "attention",
        {"q": (q, "B T H D"), "k": (k, "B T G D"), "v": (v, "B T G V")},
    )
    check_floating("attention", {"q": q, "k": k, "v": v})
    check_same_device("attention", {"q": q, "k": k, "v": v})
    check_heads("attention", sizes["H"], k=sizes["G"])
    if window is not None and window < 1:
        raise ArgumentError(f"attention: window={window}, but must be at least 1, or None")
    rows = sizes["B"] if cu_seqlens is None else len(cu_seqlens) - 1
    if past is not None:
        _check_past(past, rows, causal=causal, k=k, v=v)
    factor = sizes["D"] ** -0.5 if scale is None else float(scale)
    sight = Sight(causal, window, factor)
    transport = SingleTransport() if sp is None else sp.transport
    by_heads = _choose(exchange, transport, sizes["H"], sizes["G"])
    spans = _all_spans(q, sp, 0 if past is None else past.k.shape[1])
    documents = _documents(spans, cu_seqlens, sizes["B"])
    if transport.size == 1:
        everything = ((0, documents[-1]),)
        return _attend_rows(q, k, v, queries_in(everything, documents), everything, past, sight)
    if by_heads:
        return _by_heads(q, k, v, transport, spans, documents, past, sight)
    queries = [queries_in(own, documents) for own in spans]
    wanted = [merge_spans([sight.keys_of(run) for run in runs]) for runs in queries]
    k, v = fetch_tokens([k, v], spans, wanted, transport)
    rank = transport.rank
    return _attend_rows(q, k, v, queries[rank], wanted[rank], past, sight)


def extend_past(
    past: PastKeys | None,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    sp: SequenceParallel | None = None,
) -> PastKeys:
    """Return the past of the tokens that come after this call's.

    Args:
        past: what came before, or None.
        k: this rank's keys [B, T, Hkv, D].
        v: this rank's values [B, T, Hkv, V].
        window: that of the attention; older tokens than it reaches are left out.
        cu_seqlens: global boundaries of packed documents, or None.
        sp: the sequence-parallel context, or None.

    Returns:
        The keys and values of the whole sequence (all ranks hold them, for there is no state of
        fixed size to pass on); with ``cu_seqlens`` one row a document, zero (and of length 0) on the
        ranks where it doesn't end, so that `zeco.gather_final_state` of each gives every rank all.
    """
    transport = SingleTransport() if sp is None else sp.transport
    B = k.shape[0]
    spans = _all_spans(k, sp, 0 if past is None else past.k.shape[1])
    documents = _documents(spans, cu_seqlens, B)
    if transport.size > 1:
        everything = [merge_spans([(0, documents[-1])])] * transport.size
        k, v = fetch_tokens([k, v], spans, everything, transport)
    if cu_seqlens is None:
        new = [(k[i], v[i]) for i in range(B)]
    else:
        sizes = [stop - start for start, stop in pairwise(documents)]
        new = list(zip(k[0].split(sizes), v[0].split(sizes), strict=True))
    keep = None if window is None else window - 1
    rows: list[tuple[Tensor, Tensor]] = []
    old_lengths = [0] * len(new) if past is None else past.lengths.tolist()
    for i, (row_k, row_v) in enumerate(new):
        if past is not None:
            n = old_lengths[i]
            row_k = torch.cat([past.k[i, :n].to(k.dtype), row_k])
            row_v = torch.cat([past.v[i, :n].to(v.dtype), row_v])
        first = 0 if keep is None else max(0, len(row_k) - keep)
        rows.append((row_k[first:], row_v[first:]))
    lengths = torch.tensor([len(row_k) for row_k, _ in rows], device=k.device)
    padded_k = torch.nn.utils.rnn.pad_sequence([row_k for row_k, _ in rows], batch_first=True)
    padded_v = torch.nn.utils.rnn.pad_sequence([row_v for _, row_v in rows], batch_first=True)
    if cu_seqlens is not None and sp is not None and sp.size > 1:
        slots = sp.locate(_count(spans[sp.rank]), cu_seqlens, B)
        ended = [pieces.documents[i] for pieces in slots for i in pieces.ended]
        mine = torch.zeros_like(lengths)
        mine[ended] = 1
        lengths = lengths * mine
        padded_k = padded_k * mine[:, None, None, None].to(k.dtype)
        padded_v = padded_v * mine[:, None, None, None].to(v.dtype)
    return PastKeys(padded_k, padded_v, lengths)


def _attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: list[Queries],
    wanted: Spans,
    past: PastKeys | None,
    sight: Sight,
) -> Tensor:
    """Attend; rows of a batch whose pasts differ in length go one by one."""
    if past is None:
        return attend(q, k, v, queries, wanted, None, sight)
    lengths = past.lengths.tolist()
    packed = len(lengths) != q.shape[0] or len(lengths) == 1
    if packed:
        rows = [(past.k[i, None, :n], past.v[i, None, :n]) for i, n in enumerate(lengths)]
        return attend(q, k, v, queries, wanted, rows, sight)
    if len(set(lengths)) == 1:
        n = lengths[0]
        return attend(q, k, v, queries, wanted, [(past.k[:, :n], past.v[:, :n])], sight)
    parts = [
        attend(
            q[i, None], k[i, None], v[i, None], queries, wanted,
            [(past.k[i, None, :n], past.v[i, None, :n])], sight,
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip
    return torch.cat(parts)


def _by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transport: Transport,
    spans: list[Spans],
    documents: list[int],
    past: PastKeys | None,
    sight: Sight,
) -> Tensor:
    """Swap tokens for heads, attend to the whole sequence, and swap back."""
    swap = Ulysses(transport, spans)
    (q, k, v), _ = swap.to_heads([q, k, v], q.new_zeros(0, q.shape[2]))
    if past is not None:
        share = slice(transport.rank * k.shape[2], (transport.rank + 1) * k.shape[2])
        past = PastKeys(past.k[:, :, share], past.v[:, :, share], past.lengths)
    everything = ((0, documents[-1]),)
    o = _attend_rows(q, k, v, queries_in(everything, documents), everything, past, sight)
    return swap.to_tokens(o, o.new_zeros(0, o.shape[2]))[0]


def _choose(exchange: str, transport: Transport, num_heads: int, num_kv_heads: int) -> bool:
    """Return whether tokens are swapped for heads."""
    if exchange not in EXCHANGES:
        raise ArgumentError("attention: " + unknown_name("exchange", exchange, EXCHANGES))
    divide = num_heads % transport.size == 0 and num_kv_heads % transport.size == 0
    if exchange == "heads" and not divide:
        raise UnsupportedError(
            f"attention: exchange='heads' needs heads that divide by the {transport.size} ranks, "
            f"got {num_heads} of q and {num_kv_heads} of k and v; use exchange='gather' or 'auto'"
        )
    return divide and exchange != "gather"


def _all_spans(x: Tensor, sp: SequenceParallel | None, num_past: int) -> list[Spans]:
    """Return where every rank's tokens lie; ask all ranks, and compare the lengths of their pasts."""
    T = x.shape[1]
    if sp is None or sp.size == 1:
        return [((0, T),)]
    found = gather_numbers([T, num_past], sp.transport, x.device)
    pasts = [past for _, past in found]
    if len(set(pasts)) > 1:
        raise ArgumentError(
            f"attention: the ranks have {pasts} tokens of the past, but must all have the same; "
            "give every rank the state that gather_final_state or gather_states returns"
        )
    sizes = [size for size, _ in found]
    if sp.layout == "contiguous" and sp.shard_sizes is None:
        return [(shard_bounds(sizes, rank),) for rank in range(sp.size)]
    spans = [sp.spans(sum(sizes), rank) for rank in range(sp.size)]
    expected = [_count(own) for own in spans]
    if sizes != expected:
        raise ArgumentError(
            f"attention: the ranks hold {sizes} tokens, but layout {sp.layout!r} with shard_sizes="
            f"{sp.shard_sizes} gives them {expected}; cut batches with zeco.shard_batch"
        )
    return spans


def _documents(spans: list[Spans], cu_seqlens: Tensor | None, batch: int) -> list[int]:
    total = sum(_count(own) for own in spans)
    if cu_seqlens is None:
        return [0, total]
    return list(check_cu_seqlens(cu_seqlens, total, batch))


def _count(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def _check_past(past: PastKeys, rows: int, *, causal: bool, k: Tensor, v: Tensor) -> None:
    if not causal:
        raise ArgumentError(
            "attention: past was given with causal=False, but tokens that came before could not "
            "have seen these; pass the whole sequence at once"
        )
    check_shapes(
        "attention",
        {
            "past.k": (past.k, "N S G D"),
            "past.v": (past.v, "N S G V"),
            "past.lengths": (past.lengths, "N"),
        },
        N=rows,
        G=k.shape[2],
        D=k.shape[3],
        V=v.shape[3],
    )
