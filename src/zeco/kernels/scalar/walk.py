"""The walking passes for one decay a head, or none: weights are put on pairs and on whole rows.

With b the cumulative log decay of a chunk and L its total, all in base 2::

    o_i = exp2(b_i) · Sᵀ q_i + Σ_{j<=i} exp2(b_i - b_j) (q_i·k_j) v_j
    S  <- exp2(L) S + Σ_j exp2(L - b_j) k_j v_jᵀ

Every exponent is <= 0 and a weight belongs to a pair, not to a channel: right for any decay, and the
tokens' rows enter the products as they were loaded. A step that a token's key is multiplied with is
part of its weights; a skip, which the token's value is multiplied with and added to its output, of its
pair with itself. ``GROUP`` heads of values share a head of queries and keys. Otherwise as in
`zeco.kernels.decay.walk`: channels by tokens, one state a program, nothing written for a chunk but its
results.
"""
# ruff: noqa: SIM108  (a conditional expression would compile both sides)
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.decay.gate_sums import power
from zeco.kernels.decay.state import entering_state, find_place, store_leaving
from zeco.kernels.products import (
    add_product,
    arranged_as,
    keep_pairs,
    own_pairs,
    pair_mask,
    product,
    two_pieces,
)
from zeco.kernels.scalar.sums import (
    chunk_skips,
    chunk_steps,
    chunk_total,
    chunk_until,
    chunk_weights,
    pair_weights,
)


@triton.jit
def scalar_state_fwd_kernel(
    x_desc,
    y_desc,
    sums_ptr,
    update_ptr,
    decay_ptr,
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
    EXACT: tl.constexpr,
    STEP: tl.constexpr,
    ADJOINT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum ``x yᵀ`` over a segment's tokens as `zeco.kernels.decay.state.state_fwd_kernel` does.

    Weights are put on whichever of the two has fewer channels, which comes first in the product: there
    it enters from registers, and the other as it lies in shared memory.
    """
    TURNED: tl.constexpr = BV < BK
    ROWS: tl.constexpr = BV if TURNED else BK
    COLUMNS: tl.constexpr = BK if TURNED else BV
    K_BLOCKS: tl.constexpr = (K + BK - 1) // BK
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    block, segment, bh, b, h, first, stop = find_place(
        table_ptr, H, num_chunks, num_segments, chunks_per_segment, K_BLOCKS * V_BLOCKS
    )
    kb, vb = block // V_BLOCKS, block % V_BLOCKS
    size = tl.cast(heads, tl.int64) * num_chunks * C
    state = tl.zeros([ROWS, COLUMNS], tl.float32)
    passed = tl.full([], 0.0, tl.float32)
    for step in tl.range(0, stop - first, num_stages=STAGES):
        if ADJOINT:
            c = first + step
        else:
            c = stop - 1 - step
        at = (bh.to(tl.int64) * num_chunks + c) * C
        high, low = chunk_until(sums_ptr, at, size, C, EXACT)
        total_high, total_low = chunk_total(sums_ptr, at, size, C, EXACT)
        x = x_desc.load([b, h // GROUP, c * C, kb * BK]).reshape(C, BK)
        y = y_desc.load([b, h, c * C, vb * BV]).reshape(C, BV)
        if TURNED:
            x, y = y, x
        x = tl.trans(x)
        if ADJOINT:
            exponent = high + low
        else:
            exponent = (total_high - high) + (total_low - low)
            exponent += chunk_steps(sums_ptr, at, size, C, EXACT, STEP)
        weight = power(exponent + passed)
        state = add_product(state, (x.to(tl.float32) * weight[None, :]).to(y.dtype), y, EXACT)
        passed += total_high + total_low
    if TURNED:
        state = tl.trans(state)
    place = bh.to(tl.int64) * num_segments + segment
    rows = kb * BK + tl.arange(0, BK)
    cols = vb * BV + tl.arange(0, BV)
    inside = (rows < K)[:, None] & (cols < V)[None, :]
    tl.store(
        update_ptr + (place * K + rows[:, None]) * V + cols[None, :], state * scale, mask=inside
    )
    if vb == 0:
        tl.store(decay_ptr + place * K + rows, passed + tl.zeros([BK], tl.float32), mask=rows < K)


@triton.jit
def scalar_output_walk_kernel(
    x_desc,
    z_desc,
    y_desc,
    sums_ptr,
    o_desc,
    own_ptr,
    state_ptr,
    passed_ptr,
    entering_ptr,
    edge_ptr,
    table_ptr,
    log2_scale,
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
    EXACT: tl.constexpr,
    STEP: tl.constexpr,
    SKIP: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Outputs o and the state that leaves, or with REVERSE dv and the gradient of the entering one.

    x, z, y are q, k, v forwards and k, q, dO in reverse. If there is room for them it leaves each
    token's own product z·x, unscaled, [B·H, N, C].
    """
    vb, segment, bh, b, h, first, stop = find_place(
        table_ptr, H, num_chunks, num_segments, chunks_per_segment, (V + BV - 1) // BV
    )
    ks = tl.arange(0, BK)
    vs = vb * BV + tl.arange(0, BV)
    size = tl.cast(heads, tl.int64) * num_chunks * C
    i = tl.arange(0, C)
    mask = pair_mask(C, 0, REVERSE, EXACT)
    if REVERSE:
        boundary = segment + 1
    else:
        boundary = segment
    state = entering_state(
        state_ptr, passed_ptr, entering_ptr, bh, boundary, heads, ks, vs, K, V, False
    )
    for step in tl.range(0, stop - first, num_stages=STAGES):
        if REVERSE:
            c = stop - 1 - step
        else:
            c = first + step
        t = c * C
        x = tl.trans(x_desc.load([b, h // GROUP, t, 0]).reshape(C, BK))
        z = z_desc.load([b, h // GROUP, t, 0]).reshape(C, BK)
        y = tl.trans(y_desc.load([b, h, t, vb * BV]).reshape(C, BV))
        at = (bh.to(tl.int64) * num_chunks + c) * C
        high, low, total_high, total_low, steps, row_weight, column_weight = chunk_weights(
            sums_ptr, at, size, log2_scale, C, EXACT, STEP, REVERSE
        )
        pairs = product(z, x, EXACT)
        o = product(state.to(y.dtype), x, EXACT)
        if own_ptr is not None and vb == 0:
            tl.store(own_ptr + at + i, own_pairs(pairs, i))
        pairs *= pair_weights(high, low, steps, log2_scale, REVERSE, EXACT)
        if SKIP:
            skips = chunk_skips(sums_ptr, at, size, C, EXACT, STEP)
            pairs += tl.where(i[:, None] == i[None, :], skips[None, :], 0.0)
        pairs = keep_pairs(pairs, mask, None, y, EXACT)
        o = o * row_weight[None, :]
        o = add_product(o, y, pairs, EXACT)
        o_desc.store([b, h, t, vb * BV], tl.trans(o).to(o_desc.dtype).reshape(1, 1, C, BV))
        state *= power(total_high + total_low)
        weighted = (y.to(tl.float32) * column_weight[None, :]).to(y.dtype)
        state = add_product(state, arranged_as(weighted, o), z, EXACT)
    store_leaving(
        edge_ptr, state_ptr, passed_ptr, entering_ptr, bh, segment, heads, num_segments, ks, vs, K, V,
        REVERSE,
    )  # fmt: skip


@triton.jit
def scalar_gradient_walk_kernel(
    x_desc,
    y_desc,
    z_desc,
    a_desc,
    sums_ptr,
    grad_desc,
    pull_ptr,
    own_ptr,
    crossing_ptr,
    state_ptr,
    passed_ptr,
    entering_ptr,
    other_ptr,
    other_passed_ptr,
    other_entering_ptr,
    table_ptr,
    log2_scale,
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
    EXACT: tl.constexpr,
    STEP: tl.constexpr,
    PIECES: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradient dq, or with REVERSE dk, by the same walk backwards in time.

    x, y, z, a are dO, v, k, q forwards and v, dO, q, k in reverse. For the gates' gradient, if it is
    wanted, it leaves the pull Σ_k a·(its gradient) of each token and block of channels, its own pair
    left out, [blocks, B·H, N, C]; if there is room for them also each token's own product y·x,
    unscaled, [B·H, N, C].

    So it does, with the other walk's states, for the weight of all paths that cross each segment's start
    [blocks, B·H, S], as `zeco.kernels.decay.gradient_walk`. With two ``PIECES`` the state
    enters its product, and rows enter the state, in two pieces of 16 bits.
    """
    kb, segment, bh, b, h, first, stop = find_place(
        table_ptr, H, num_chunks, num_segments, chunks_per_segment, (K + BK - 1) // BK
    )
    ks = kb * BK + tl.arange(0, BK)
    vs = tl.arange(0, BV)
    size = tl.cast(heads, tl.int64) * num_chunks * C
    i = tl.arange(0, C)
    # Pulls are without a token's own pair: it crosses no decay, and may be far above those that do.
    NEAREST: tl.constexpr = 0 if pull_ptr is None else 1
    mask = pair_mask(C, NEAREST, REVERSE, EXACT)
    if REVERSE:
        boundary = segment + 1
    else:
        boundary = segment
    state = entering_state(
        state_ptr, passed_ptr, entering_ptr, bh, boundary, heads, ks, vs, K, V, True
    )
    for step in tl.range(0, stop - first, num_stages=STAGES):
        if REVERSE:
            c = stop - 1 - step
        else:
            c = first + step
        t = c * C
        x = tl.trans(x_desc.load([b, h, t, 0]).reshape(C, BV))
        y = y_desc.load([b, h, t, 0]).reshape(C, BV)
        z = tl.trans(z_desc.load([b, h // GROUP, t, kb * BK]).reshape(C, BK))
        at = (bh.to(tl.int64) * num_chunks + c) * C
        high, low, total_high, total_low, steps, row_weight, column_weight = chunk_weights(
            sums_ptr, at, size, log2_scale, C, EXACT, STEP, REVERSE
        )
        pairs = product(y, x, EXACT)
        if pull_ptr is not None:
            own = own_pairs(pairs, i)
            if own_ptr is not None and kb == 0:
                tl.store(own_ptr + at + i, own)
        pairs *= pair_weights(high, low, steps, log2_scale, REVERSE, EXACT)
        pairs = keep_pairs(pairs, mask, None, y, EXACT)
        if PIECES == 1:
            grad = product(state.to(y.dtype), x, EXACT)
        else:
            piece, rest = two_pieces(state, y.dtype)
            grad = add_product(product(piece, x, EXACT), rest, x, EXACT)
        grad *= row_weight[None, :]
        grad = add_product(grad, z, pairs, EXACT)
        if pull_ptr is not None:
            a = tl.trans(a_desc.load([b, h // GROUP, t, kb * BK]).reshape(C, BK))
            pull = tl.sum(a.to(tl.float32) * grad, 0)
            pull_at = (kb.to(tl.int64) * heads + bh) * num_chunks + c
            tl.store(pull_ptr + pull_at * C + i, pull)
            grad += z.to(tl.float32) * (own * power(log2_scale + steps))[None, :]
        grad_desc.store([b, h, t, kb * BK], tl.trans(grad).to(grad_desc.dtype).reshape(1, 1, C, BK))
        state *= power(total_high + total_low)
        weighted = z.to(tl.float32) * column_weight[None, :]
        if PIECES == 1:
            state = add_product(state, arranged_as(weighted.to(y.dtype), grad), y, EXACT)
        else:
            piece, rest = two_pieces(weighted, y.dtype)
            state = add_product(state, arranged_as(piece, grad), y, EXACT)
            state = add_product(state, arranged_as(rest, grad), y, EXACT)
    if crossing_ptr is not None:
        other = entering_state(
            other_ptr, other_passed_ptr, other_entering_ptr, bh, segment, heads, ks, vs, K, V, True
        )
        crossing_at = crossing_ptr + (kb.to(tl.int64) * heads + bh) * num_segments + segment
        tl.store(crossing_at, tl.sum(tl.sum(state * other, 1), 0))
