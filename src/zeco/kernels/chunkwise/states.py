"""States of wide keys: a walk that writes every chunk's state, for passes that take chunks alone."""
# ruff: noqa: SIM108  (a conditional expression would compile both sides)
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.decay.gate_sums import power
from zeco.kernels.decay.row_scales import half_decay
from zeco.kernels.decay.state import entering_state, find_place, store_leaving
from zeco.kernels.scalar.sums import chunk_weights


@triton.jit
def chunkwise_states_kernel(
    x_desc,
    y_desc,
    sums_ptr,
    total_ptr,
    kept_desc,
    other_desc,
    crossing_ptr,
    update_ptr,
    decay_ptr,
    state_ptr,
    passed_ptr,
    entering_ptr,
    edge_ptr,
    table_ptr,
    scale,
    H,
    heads,
    num_chunks,
    num_segments,
    chunks_per_segment,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    LIMIT: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Walk a segment with one block of the state; x, y are k, v forwards and q, dO in reverse.

    Each chunk's state is the one that enters it, seen in the direction of the walk; by channel
    (``total_ptr``), where rows come scaled, relative to the middle of the chunk's decay. Two uses:

    - From the state that enters the segment: it leaves every chunk's state and what leaves the rank;
      with the other direction's states also the weight of all paths that cross each chunk's start,
      [blocks, B·H, N], or by channel the sum over V only, [blocks of V, B·H, N, K].
    - From zero (no ``state_ptr``): it leaves the segment's update and decay.
    """
    K_BLOCKS: tl.constexpr = (K + BK - 1) // BK
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    block, segment, bh, b, h, first, stop = find_place(
        table_ptr, H, num_chunks, num_segments, chunks_per_segment, K_BLOCKS * V_BLOCKS
    )
    kb, vb = block // V_BLOCKS, block % V_BLOCKS
    ks = kb * BK + tl.arange(0, BK)
    vs = vb * BV + tl.arange(0, BV)
    in_k = ks < K
    size = tl.cast(heads, tl.int64) * num_chunks * C
    chunk_rows = bh.to(tl.int64) * num_chunks
    if REVERSE:
        boundary = segment + 1
    else:
        boundary = segment
    if state_ptr is None:
        state = tl.zeros([BK, BV], tl.float32)
    else:
        state = entering_state(
            state_ptr, passed_ptr, entering_ptr, bh, boundary, heads, ks, vs, K, V, True
        )
    passed = tl.zeros([BK], tl.float32)
    for step in tl.range(0, stop - first, num_stages=STAGES):
        if REVERSE:
            c = stop - 1 - step
        else:
            c = first + step
        t = c * C
        x = tl.trans(x_desc.load([b, h // GROUP, t, kb * BK]).reshape(C, BK))
        y = y_desc.load([b, h, t, vb * BV]).reshape(C, BV)
        if total_ptr is not None:
            total = tl.load(total_ptr + (chunk_rows + c) * K + ks, mask=in_k, other=0.0)
            half = half_decay(total, LIMIT)
            passed += total
            state *= half[:, None]
        if kept_desc is not None:
            kept = state.to(kept_desc.dtype).reshape(1, 1, BK, BV)
            kept_desc.store([c, bh, kb * BK, vb * BV], kept)
        if total_ptr is None:
            at = (chunk_rows + c) * C
            _, _, total, _, _, _, weight = chunk_weights(
                sums_ptr, at, size, None, C, False, STEP, REVERSE
            )
            if REVERSE:
                weight *= scale
            passed += total
            state *= power(total)
            x = (x.to(tl.float32) * weight[None, :]).to(y.dtype)
        state = tl.dot(x, y, state)
        if crossing_ptr is not None:
            # By channel both are still relative to the chunk's middle, where their factors cancel.
            other = other_desc.load([c, bh, kb * BK, vb * BV]).reshape(BK, BV)
            crossing = tl.sum(state * other.to(tl.float32), 1)
            if total_ptr is not None:
                part = vb.to(tl.int64) * heads * num_chunks
                tl.store(crossing_ptr + (part + chunk_rows + c) * K + ks, crossing, mask=in_k)
            else:
                part = block.to(tl.int64) * heads * num_chunks
                tl.store(crossing_ptr + part + chunk_rows + c, tl.sum(crossing, 0))
        if total_ptr is not None:
            state *= half[:, None]
    if update_ptr is not None:
        place = bh.to(tl.int64) * num_segments + segment
        inside = in_k[:, None] & (vs < V)[None, :]
        tl.store(update_ptr + (place * K + ks[:, None]) * V + vs[None, :], state, mask=inside)
        if vb == 0:
            tl.store(decay_ptr + place * K + ks, passed, mask=in_k)
    if edge_ptr is not None:
        store_leaving(
            edge_ptr, state_ptr, passed_ptr, entering_ptr, bh, segment, heads, num_segments, ks, vs,
            K, V, REVERSE,
        )  # fmt: skip
