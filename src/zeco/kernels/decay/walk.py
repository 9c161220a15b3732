"""Output pass: programs that walk a segment with one state in registers.

Nothing is written for a chunk but its results. Products are transposed, channels by tokens, so that
the state enters the matrix units from registers. A chunk with a strong channel (see
`zeco.kernels.decay.row_scales`) gets here only what its state gives; its pairs are added by
`zeco.kernels.decay.pairs`.

What bounds a walk, besides its bytes, is one chunk's chain of products, each awaited, so work that
doesn't hang on the state is made a chunk ahead or left to run on into the next. ``GROUP`` heads of v
share one of q, k and the gates.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.decay.row_scales import half_decay, scale_rows
from zeco.kernels.decay.state import entering_state, find_place, store_leaving
from zeco.kernels.products import (
    add_product,
    keep_pairs,
    pair_mask,
    product,
)


@triton.jit
def _scaled_rows(
    x_desc,
    z_desc,
    scales_desc,
    b,
    h,
    c,
    total_ptr,
    ks,
    in_k,
    SCALE: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FORM: tl.constexpr,
    LIMIT: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Return the rows x and z [C, BK] of chunk c as its products take them."""
    t = c * C
    shared = h // GROUP
    x = x_desc.load([b, shared, t, 0]).reshape(C, BK)
    z = z_desc.load([b, shared, t, 0]).reshape(C, BK)
    # Sums of gates come out channels first.
    TURN: tl.constexpr = FORM != 3
    if TURN:
        x, z = tl.trans(x), tl.trans(z)
    if REVERSE:
        x, z = z, x
    rows, columns, _, _ = scale_rows(
        x, z, scales_desc, b, shared, t, 0, total_ptr, ks, in_k, SCALE, C, BK, FORM, LIMIT, not TURN
    )  # fmt: skip
    if REVERSE:
        rows, columns = columns, rows
    if TURN:
        rows, columns = tl.trans(rows), tl.trans(columns)
    return rows, columns


@triton.jit
def output_walk_kernel(
    x_desc,
    z_desc,
    y_desc,
    scales_desc,
    ratio_desc,
    o_desc,
    total_ptr,
    strong_ptr,
    state_ptr,
    passed_ptr,
    entering_ptr,
    edge_ptr,
    table_ptr,
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
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
    LIMIT: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Outputs o, or with REVERSE the gradient dv, by the same walk backwards in time.

    ``o_i = Σ_{j<=i} (x̂_i·ẑ_j) y_j + Sᵀ x̂_i`` and ``S += ẑᵀ y``, with x, z, y = q, k, v forwards and
    k, q, dO in reverse, where i and j change places in time. Also writes the state that leaves the
    rank: the final state, or the gradient of the entering one.
    """
    vb, segment, bh, b, h, first, stop = find_place(
        table_ptr, H, num_chunks, num_segments, chunks_per_segment, (V + BV - 1) // BV
    )
    ks = tl.arange(0, BK)
    vs = vb * BV + tl.arange(0, BV)
    in_k = ks < K
    chunk_rows = bh.to(tl.int64) * num_chunks

    mask = pair_mask(C, 0, REVERSE, EXACT)
    if REVERSE:
        boundary = segment + 1
        start = stop - 1
    else:
        boundary = segment
        start = first
    state = entering_state(
        state_ptr, passed_ptr, entering_ptr, bh, boundary, heads, ks, vs, K, V, False
    )
    total = tl.load(
        total_ptr + (chunk_rows + start) * K + ks, mask=in_k & (stop > first), other=0.0
    )
    state *= half_decay(total, LIMIT)[None, :]
    # A loop's own values enter all products from shared memory; others would be sent through
    # registers into the first, in another order.
    if stop > first:
        row = (chunk_rows + start) * K
        rows, columns = _scaled_rows(
            x_desc, z_desc, scales_desc, b, h, start, total_ptr + row, ks, in_k, SCALE, C, BK, GROUP,
            FORM, LIMIT, REVERSE,
        )  # fmt: skip
        flag = tl.load(strong_ptr + chunk_rows + start)
        for step in tl.range(0, stop - first, num_stages=STAGES):
            # After the last chunk the next one's are read in vain, where there is one.
            if REVERSE:
                c = stop - 1 - step
                following = tl.maximum(c - 1, 0)
                ratio_at = following
            else:
                c = first + step
                following = tl.minimum(c + 1, num_chunks - 1)
                ratio_at = c
            t = c * C
            y = tl.trans(y_desc.load([b, h, t, vb * BV]).reshape(C, BV))
            pairs = product(columns, tl.trans(rows), EXACT)
            o = product(state.to(y.dtype), tl.trans(rows), EXACT)
            state = add_product(state, y, columns, EXACT)
            ratio = ratio_desc.load([b, h, ratio_at, 0]).reshape(BK)
            state *= ratio[None, :]
            pairs = keep_pairs(pairs, mask, flag, y, EXACT)
            o = add_product(o, y, pairs, EXACT)
            o_desc.store([b, h, t, vb * BV], tl.trans(o).to(o_desc.dtype).reshape(1, 1, C, BV))
            # Last, so that these loads have had a whole chunk's time.
            row = (chunk_rows + following) * K
            rows, columns = _scaled_rows(
                x_desc, z_desc, scales_desc, b, h, following, total_ptr + row, ks, in_k, SCALE, C, BK,
                GROUP, FORM, LIMIT, REVERSE,
            )  # fmt: skip
            flag = tl.load(strong_ptr + chunk_rows + following)
    store_leaving(
        edge_ptr, state_ptr, passed_ptr, entering_ptr, bh, segment, heads, num_segments, ks, vs, K, V,
        REVERSE,
    )  # fmt: skip
