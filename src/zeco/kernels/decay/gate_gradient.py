"""Gradient of the diagonal decays: what is left of the walks' pulls, chunk by chunk."""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.decay.state import find_place
from zeco.kernels.products import INTERPRETED, two_pieces


@triton.jit
def gate_gradient_kernel(
    query_pull_desc,
    query_margin_ptr,
    key_pull_desc,
    key_margin_ptr,
    pairs_pull_ptr,
    strong_ptr,
    crossing_ptr,
    dg_desc,
    table_ptr,
    H,
    heads,
    num_chunks,
    num_segments,
    chunks_per_segment,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradient of the log decays: the weight of all paths that cross each token's decay.

    At a segment's start it is known, from the walk in reverse. From token to token the paths that end
    at the token are taken off and those that begin at it put on: the pulls. Going forwards, everything
    carried is such a weight itself; a sum from the end would cancel where a strong decay cuts the large
    gradient of a final state off. What a group's heads of v take is added up.
    """
    kb, segment, shared, b, h, first, stop = find_place(
        table_ptr, H // GROUP, num_chunks, num_segments, chunks_per_segment, (K + BK - 1) // BK
    )
    ks = kb * BK + tl.arange(0, BK)
    in_k = ks < K
    carried = tl.zeros([BK], tl.float32)
    for member in tl.static_range(GROUP):
        bh = shared * GROUP + member
        crossing_at = crossing_ptr + (bh.to(tl.int64) * num_segments + segment) * K + ks
        carried += tl.load(crossing_at, mask=in_k & (stop > first), other=0.0)
    i = tl.arange(0, C)
    before = tl.where(i[:, None] < i[None, :], 1.0, 0.0)
    # All of a group have the same flags.
    flags_ptr = strong_ptr + shared.to(tl.int64) * GROUP * num_chunks
    flag = tl.load(flags_ptr + first, mask=stop > first, other=0)
    for c in tl.range(first, stop, num_stages=STAGES):
        next_flag = tl.load(flags_ptr + c + 1, mask=c + 1 < stop, other=0)
        pull = tl.zeros([BK, C], tl.float32)
        margin = tl.zeros([BK], tl.float32)
        for member in tl.static_range(GROUP):
            bh = shared * GROUP + member
            place = bh * num_chunks + c
            row = (bh.to(tl.int64) * num_chunks + c) * K
            own = key_pull_desc.load([0, place, kb * BK, 0]).reshape(BK, C).to(tl.float32)
            query = query_pull_desc.load([0, place, kb * BK, 0]).reshape(BK, C).to(tl.float32)
            margin_at = row * 2 + ks * 2
            if not EXACT:
                unit = tl.load(key_margin_ptr + margin_at + 1, mask=in_k, other=0.0)
                query_unit = tl.load(query_margin_ptr + margin_at + 1, mask=in_k, other=0.0)
                own *= unit[:, None]
                query *= query_unit[:, None]
            pull += own - query
            if flag != 0:
                pairs_at = pairs_pull_ptr + row * C + (ks * C)[:, None] + i[None, :]
                pull += tl.load(pairs_at, mask=in_k[:, None], other=0.0)
            # Pairs inside the chunk have both their pulls in it: none is left in its sum.
            margin += tl.load(key_margin_ptr + margin_at, mask=in_k, other=0.0)
            margin -= tl.load(query_margin_ptr + margin_at, mask=in_k, other=0.0)
        # A product with 0/1 in place of a running sum less the token's own pull, which may be large.
        if EXACT or INTERPRETED:
            dg = tl.dot(pull, before, input_precision="tf32x3")
        else:
            high, low = two_pieces(pull, tl.bfloat16)
            dg = tl.dot(low, before.to(tl.bfloat16), tl.dot(high, before.to(tl.bfloat16)))
        dg += carried[:, None]
        dg_desc.store([b, h, c * C, kb * BK], tl.trans(dg).to(dg_desc.dtype).reshape(1, 1, C, BK))
        carried += margin
        flag = next_flag
