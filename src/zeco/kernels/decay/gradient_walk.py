"""Gradient passes of queries, keys and gates: walks as in `zeco.kernels.decay.walk`."""
# ruff: noqa: SIM108  (a conditional expression would compile both sides)
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.decay.row_scales import half_decay, scale_rows
from zeco.kernels.decay.state import entering_state, find_place
from zeco.kernels.products import (
    add_product,
    arranged_as,
    keep_pairs,
    opaque,
    pair_mask,
    product,
    reciprocal,
    two_pieces,
)


@triton.jit
def _gradient_rows(
    z_desc,
    a_desc,
    scales_desc,
    b,
    h,
    c,
    total_ptr,
    kb,
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
    """Return (z as products take it, a scaled in its dtype, what gradients are scaled by) [BK, C]."""
    t = c * C
    shared = h // GROUP
    z = tl.trans(z_desc.load([b, shared, t, kb * BK]).reshape(C, BK))
    a = tl.trans(a_desc.load([b, shared, t, kb * BK]).reshape(C, BK))
    # The rows' own numbers are rounded as in the other walk's columns: so a pair's two pulls are equal
    # and cancel, and so do those of a token with itself.
    if REVERSE:
        q, k = z, a
    else:
        q, k = a, z
    q, k, rising, falling = scale_rows(
        q, k, scales_desc, b, shared, t, kb * BK, total_ptr, ks, in_k, SCALE, C, BK, FORM, LIMIT, False
    )  # fmt: skip
    if REVERSE:
        found = q, k, falling
    else:
        found = k, q, rising
    return found


@triton.jit
def gradient_walk_kernel(
    x_desc,
    y_desc,
    z_desc,
    a_desc,
    scales_desc,
    grad_desc,
    pull_ptr,
    margin_ptr,
    crossing_ptr,
    total_ptr,
    ratio_ptr,
    strong_ptr,
    state_ptr,
    passed_ptr,
    entering_ptr,
    other_ptr,
    other_passed_ptr,
    other_entering_ptr,
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
    PIECES: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Gradient dq, or with REVERSE dk, by the same walk backwards in time.

    ``dq_i = exp2(b_i) ∘ (Σ_{j<=i} (dO_i·v_j) k̂_j + S dO_i)`` and ``S += k̂ᵀ v``: x, y, z, a are dO, v,
    k, q forwards and v, dO, q, k in reverse. The pull a∘(its gradient) [B·H, N, K, C], in a unit of its
    row, and of each row the sum and that unit [B·H, N, K, 2] are what the gates' gradient is made of.
    So is the weight of all paths that cross a segment's start, the sum over V of (state ∘ its gradient)
    [B·H, S, K], which the walk in reverse leaves, with the other walk's states.

    What one walk rounds the other doesn't see, so with two ``PIECES`` the state enters its product in
    two; and the gradient at a segment's start is what this walk ends with, made of the same rounded rows
    as the pulls are, so that these take off what they should. With one it is that of the state pass.
    """
    kb, segment, bh, b, h, first, stop = find_place(
        table_ptr, H, num_chunks, num_segments, chunks_per_segment, (K + BK - 1) // BK
    )
    ks = kb * BK + tl.arange(0, BK)
    vs = tl.arange(0, BV)
    in_k = ks < K
    chunk_rows = bh.to(tl.int64) * num_chunks

    i = tl.arange(0, C)
    mask = pair_mask(C, 0, REVERSE, EXACT)
    if REVERSE:
        boundary = segment + 1
        start = stop - 1
    else:
        boundary = segment
        start = first
    state = entering_state(
        state_ptr, passed_ptr, entering_ptr, bh, boundary, heads, ks, vs, K, V, True
    )
    total = tl.load(
        total_ptr + (chunk_rows + start) * K + ks, mask=in_k & (stop > first), other=0.0
    )
    ratio = half_decay(total, LIMIT)
    near = tl.minimum(tl.maximum(start, 0), num_chunks - 1)
    columns, own, outer = _gradient_rows(
        z_desc, a_desc, scales_desc, b, h, near, total_ptr + (chunk_rows + near) * K, kb, ks, in_k,
        SCALE, C, BK, GROUP, FORM, LIMIT, REVERSE,
    )  # fmt: skip
    flag = tl.load(strong_ptr + chunk_rows + start, mask=stop > first, other=0)
    for step in tl.range(0, stop - first, num_stages=STAGES):
        if REVERSE:
            c = stop - 1 - step
            following = c - 1
        else:
            c = first + step
            following = c + 1
        t = c * C
        more = (following >= first) & (following < stop)
        row = (chunk_rows + c) * K
        if REVERSE:
            next_ratio = tl.load(ratio_ptr + (row - K) + ks, mask=in_k & more, other=0.0)
        else:
            next_ratio = tl.load(ratio_ptr + row + ks, mask=in_k & more, other=0.0)
        next_flag = tl.load(strong_ptr + chunk_rows + following, mask=more, other=0)
        x = tl.trans(x_desc.load([b, h, t, 0]).reshape(C, BV))
        y = y_desc.load([b, h, t, 0]).reshape(C, BV)
        state *= ratio[:, None]
        # The state's first: its pieces and the pairs together are more than registers hold.
        if PIECES == 1:
            grad = product(state.to(y.dtype), x, EXACT)
        else:
            piece, rest = two_pieces(state, y.dtype)
            grad = add_product(product(piece, x, EXACT), rest, x, EXACT)
        pairs = keep_pairs(product(y, x, EXACT), mask, flag, y, EXACT)
        # As it comes it would enter products from shared memory, and the last had to be awaited.
        columns = arranged_as(opaque(columns), grad)
        grad = add_product(grad, columns, pairs, EXACT)
        # The last product, which nothing here awaits: it goes on beside what follows.
        state = add_product(state, columns, y, EXACT)
        pull = own.to(tl.float32) * grad
        sums = tl.sum(pull, 1)
        unit = tl.full([BK], 1.0, tl.float32)
        if not EXACT:
            unit = tl.maximum(tl.max(tl.abs(pull), 1), 1e-30) * (1.0 / 32768.0)
            pull *= reciprocal(unit)[:, None]
        margin_at = margin_ptr + row * 2 + ks[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(margin_at, tl.join(sums, unit), mask=in_k[:, None])
        pull_at = pull_ptr + row * C + (ks * C)[:, None] + i[None, :]
        tl.store(pull_at, pull.to(pull_ptr.dtype.element_ty), mask=in_k[:, None])
        grad *= outer
        grad_desc.store([b, h, t, kb * BK], tl.trans(grad).to(grad_desc.dtype).reshape(1, 1, C, BK))
        # Last, so that these loads have had a whole chunk's time.
        near = tl.minimum(tl.maximum(following, 0), num_chunks - 1)
        columns, own, outer = _gradient_rows(
            z_desc, a_desc, scales_desc, b, h, near, total_ptr + (chunk_rows + near) * K, kb, ks, in_k,
            SCALE, C, BK, GROUP, FORM, LIMIT, REVERSE,
        )  # fmt: skip
        ratio = next_ratio
        flag = next_flag
    if REVERSE and stop > first:
        if PIECES == 1:
            state = entering_state(
                state_ptr, passed_ptr, entering_ptr, bh, segment, heads, ks, vs, K, V, True
            )
        else:
            total = tl.load(total_ptr + (chunk_rows + first) * K + ks, mask=in_k, other=0.0)
            state *= half_decay(total, LIMIT)[:, None]
        state *= entering_state(
            other_ptr, other_passed_ptr, other_entering_ptr, bh, segment, heads, ks, vs, K, V, True
        )
        crossing_at = crossing_ptr + (bh.to(tl.int64) * num_segments + segment) * K + ks
        tl.store(crossing_at, tl.sum(state, 1), mask=in_k)
