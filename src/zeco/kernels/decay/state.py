"""State pass and segment scan of the diagonal decay family, for both directions of time.

A rank's chunks are cut into segments, one program each, so that all multiprocessors are busy. The
state pass gives each segment's affine map; the segment scan composes the maps, one level below the
scan over ranks.

Packed documents: a segment lies within one piece, and in front of each piece that starts afresh lies
a *break*, a segment without chunks at which the scan forgets its state and takes the piece's own
start in place (backwards in time: the gradient of the state after the piece before).
"""
# ruff: noqa: SIM108  (a conditional expression would compile both sides)
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.decay.gate_sums import (
    LN2,
    after_each,
    power,
    read_gates,
    sum_gates,
    total_gates,
    until_each,
)
from zeco.kernels.decay.row_scales import half_decay, pack, scale_exponent
from zeco.kernels.products import add_product


@triton.jit
def find_place(
    table_ptr,
    H,
    num_chunks,
    num_segments,
    chunks_per_segment,
    BLOCKS: tl.constexpr,
):
    """Return where this program works: (block, segment, b·H + h, b, h, first chunk, last + 1).

    Programs are counted block by block of channels, then by segment, then by head. Segments are of
    ``chunks_per_segment``, or, if there is a table, as its first row says.
    """
    pid = tl.program_id(0)
    block = pid % BLOCKS
    segment = (pid // BLOCKS) % num_segments
    bh = pid // (BLOCKS * num_segments)
    if table_ptr is None:
        first = segment * chunks_per_segment
        stop = tl.minimum(first + chunks_per_segment, num_chunks)
    else:
        first = tl.load(table_ptr + segment)
        stop = tl.load(table_ptr + segment + 1)
    return block, segment, bh, bh // H, bh % H, first, stop


@triton.jit
def state_fwd_kernel(
    x_desc,
    y_desc,
    g_desc,
    scales_desc,
    update_ptr,
    decay_ptr,
    total_ptr,
    ratio_ptr,
    strong_ptr,
    table_ptr,
    scale,
    H,
    num_chunks,
    num_segments,
    chunks_per_segment,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
    LIMIT: tl.constexpr,
    ADJOINT: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum ``x yᵀ`` over a segment's tokens, decayed to its end (ADJOINT: to its start).

    x, y are k, v, or q, dO for the adjoint. Walked from the end that the decay is relative to, so that
    the sum is never rescaled. ``GROUP`` heads of v share one of q, k and g. On the way it leaves each
    chunk's total, the ratio that the walking
    passes scale states by after a chunk, whether any channel is strong, and (PACKED) what rows are
    scaled by.
    """
    K_BLOCKS: tl.constexpr = (K + BK - 1) // BK
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    block, segment, bh, b, h, first, stop = find_place(
        table_ptr, H, num_chunks, num_segments, chunks_per_segment, K_BLOCKS * V_BLOCKS
    )
    kb, vb = block // V_BLOCKS, block % V_BLOCKS
    rows = kb * BK + tl.arange(0, BK)
    in_k = rows < K

    if ADJOINT:
        weights = until_each(C)
    else:
        weights = after_each(C)
    state = tl.zeros([BK, BV], tl.float32)
    passed = tl.zeros([BK], tl.float32)
    neighbour = tl.full([BK], 1.0, tl.float32)
    for step in tl.range(0, stop - first, num_stages=STAGES):
        if ADJOINT:
            c = first + step
        else:
            c = stop - 1 - step
        g = read_gates(g_desc, b, h // GROUP, c * C, kb * BK, C, BK, FORM)
        x = tl.trans(x_desc.load([b, h // GROUP, c * C, kb * BK]).reshape(C, BK))
        y = y_desc.load([b, h, c * C, vb * BV]).reshape(C, BV)
        sums = sum_gates(g, weights, FORM)
        scaled = (x.to(tl.float32) * power(sums + passed[:, None])).to(y.dtype)
        state = add_product(state, scaled, y, EXACT)
        total = total_gates(g, C, FORM)
        passed += total
        at = (bh.to(tl.int64) * num_chunks + c) * K + rows
        half = half_decay(total, LIMIT)
        if V_BLOCKS == 1 or vb == 0:
            if PACKED and (GROUP == 1 or h % GROUP == 0):
                if ADJOINT:
                    middle = sums - 0.5 * total[:, None]
                else:
                    middle = 0.5 * total[:, None] - sums
                scales = pack(power(scale_exponent(middle, total, LIMIT)))
                at_desc = [b, h // GROUP, c * C, kb * BK]
                scales_desc.store(at_desc, tl.trans(scales).reshape(1, 1, C, BK))
            tl.store(total_ptr + at, total, mask=in_k)
            # The ratio after a chunk belongs to it and its successor; the last of a segment has none.
            if ADJOINT:
                tl.store(ratio_ptr + at - K, half * neighbour, mask=in_k & (step > 0))
            else:
                tl.store(ratio_ptr + at, half * neighbour, mask=in_k)
            any_strong = tl.max(tl.where(in_k & ((total < LIMIT) | (total != total)), 1, 0), 0)
            # With several blocks of channels the flags start at zero and any block may raise one.
            raised = (any_strong == 1) | (K_BLOCKS == 1)
            tl.store(strong_ptr + bh.to(tl.int64) * num_chunks + c, any_strong, mask=raised)
        neighbour = half
    if ADJOINT and (V_BLOCKS == 1 or vb == 0):
        at = (bh.to(tl.int64) * num_chunks + stop - 1) * K + rows
        tl.store(ratio_ptr + at, neighbour, mask=in_k & (stop > first))

    place = bh.to(tl.int64) * num_segments + segment
    cols = vb * BV + tl.arange(0, BV)
    inside = in_k[:, None] & (cols < V)[None, :]
    tl.store(
        update_ptr + (place * K + rows[:, None]) * V + cols[None, :], state * scale, mask=inside
    )
    if vb == 0:
        tl.store(decay_ptr + place * K + rows, passed, mask=in_k)


@triton.jit
def segment_scan_kernel(
    update_ptr,
    decay_ptr,
    state_ptr,
    passed_ptr,
    log_decay_ptr,
    table_ptr,
    start_ptr,
    first_start,
    heads,
    num_segments,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    ADJOINT: tl.constexpr,
):
    """Compose the segments' maps from a zero start.

    Writes the state [S+1, B·H, K, V] at every boundary between segments and the base-2 log decay
    [S+1, B·H, K] from the start to there; boundary s is before segment s. ADJOINT runs from the end.
    The last boundary reached holds the rank's own map; its log decay is also left as a natural one.

    At break n of the table's second row the state becomes row n + first_start of the starts
    [n, B·H, K, V], or zero where there is no such row, and the log decay becomes -inf.
    """
    pid = tl.program_id(0)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    K_BLOCKS: tl.constexpr = (K + BK - 1) // BK
    vb = pid % V_BLOCKS
    kb = (pid // V_BLOCKS) % K_BLOCKS
    bh = (pid // (V_BLOCKS * K_BLOCKS)).to(tl.int64)
    rows = kb * BK + tl.arange(0, BK)
    cols = vb * BV + tl.arange(0, BV)
    in_k = rows < K
    inside = in_k[:, None] & (cols < V)[None, :]
    within = rows[:, None] * V + cols[None, :]

    state = tl.zeros([BK, BV], tl.float32)
    passed = tl.zeros([BK], tl.float32)
    for step in tl.range(0, num_segments + 1, num_stages=6):
        if ADJOINT:
            boundary = num_segments - step
            segment = boundary - 1
        else:
            boundary = step
            segment = boundary
        at = tl.cast(boundary, tl.int64) * heads + bh
        tl.store(state_ptr + at * K * V + within, state, mask=inside)
        if vb == 0:
            tl.store(passed_ptr + at * K + rows, passed, mask=in_k)
        more = step < num_segments
        place = bh * num_segments + segment
        decay = tl.load(decay_ptr + place * K + rows, mask=in_k & more, other=0.0)
        update = tl.load(update_ptr + place * K * V + within, mask=inside & more, other=0.0)
        following = state * tl.exp2(decay)[:, None] + update
        passed += decay
        if table_ptr is None:
            state = following
        else:
            row = tl.load(table_ptr + num_segments + 1 + segment, mask=more, other=-1)
            breaks = row >= 0
            start = tl.zeros([BK, BV], tl.float32)
            if start_ptr is not None:
                row += first_start
                start_at = (row.to(tl.int64) * heads + bh) * K * V + within
                start = tl.load(start_ptr + start_at, mask=inside & breaks & (row >= 0), other=0.0)
            state = tl.where(breaks, start, following)
            passed = tl.where(breaks, float("-inf"), passed)
    if vb == 0:
        tl.store(log_decay_ptr + bh * K + rows, passed * LN2, mask=in_k)


@triton.jit
def entering_state(
    state_ptr,
    passed_ptr,
    entering_ptr,
    bh,
    boundary,
    heads,
    rows,
    cols,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    """Return the state at a segment boundary with the rank's entering state, if any, injected.

    [rows, cols], rows along K and cols along V; transposed unless ROWS_FIRST.
    """
    at = tl.cast(boundary, tl.int64) * heads + bh
    passed = tl.load(passed_ptr + at * K + rows, mask=rows < K, other=0.0)
    if ROWS_FIRST:
        within = rows[:, None] * V + cols[None, :]
        inside = (rows < K)[:, None] & (cols < V)[None, :]
        passed = passed[:, None]
    else:
        within = rows[None, :] * V + cols[:, None]
        inside = (rows < K)[None, :] & (cols < V)[:, None]
        passed = passed[None, :]
    state = tl.load(state_ptr + at * K * V + within, mask=inside, other=0.0)
    if entering_ptr is not None:
        # Past a break nothing of it is read: not even a NaN gets from one document to another.
        seen = inside & (passed != float("-inf"))
        entering = tl.load(entering_ptr + bh.to(tl.int64) * K * V + within, mask=seen, other=0.0)
        state += tl.exp2(passed) * entering
    return state


@triton.jit
def store_leaving(
    edge_ptr,
    state_ptr,
    passed_ptr,
    entering_ptr,
    bh,
    segment,
    heads,
    num_segments,
    rows,
    cols,
    K: tl.constexpr,
    V: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Store what leaves the rank [B·H, K, V], if this is its last segment, or in reverse its first.

    It comes from the map itself and not from the walk, so that neighbours agree on it to the bit.
    """
    if REVERSE:
        edge = 0
        at_edge = segment == 0
    else:
        edge = num_segments
        at_edge = segment == num_segments - 1
    if at_edge:
        leaving = entering_state(
            state_ptr, passed_ptr, entering_ptr, bh, edge, heads, rows, cols, K, V, False
        )
        within = bh.to(tl.int64) * K * V + rows[None, :] * V + cols[:, None]
        inside = (rows < K)[None, :] & (cols < V)[:, None]
        tl.store(edge_ptr + within, leaving, mask=inside)
