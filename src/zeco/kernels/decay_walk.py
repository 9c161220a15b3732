"""Output pass and gradient passes: programs that walk a segment with one state in registers.

Nothing is written for a chunk but its results. Products are transposed, channels by tokens, so that
the state and the tokens' rows enter the matrix units from registers. A chunk with a strong channel
(see `zeco.kernels.gate_sums`) gets here only what its state gives; its pairs are added by
`zeco.kernels.decay_pairs`.
"""
# ruff: noqa: SIM108  (a conditional expression would compile both sides)
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.decay_state import entering_state, find_place
from zeco.kernels.gate_sums import (
    add_product,
    anchored,
    half_decay,
    product,
    read_gates,
    rounded,
)


@triton.jit
def output_walk_kernel(
    x_desc,
    z_desc,
    y_desc,
    g_desc,
    o_desc,
    total_ptr,
    ratio_ptr,
    strong_ptr,
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
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
    LIMIT: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
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

    i = tl.arange(0, C)
    if REVERSE:
        boundary = segment + 1
        start = stop - 1
        seen = i[:, None] >= i[None, :]
    else:
        boundary = segment
        start = first
        seen = i[:, None] <= i[None, :]
    state = entering_state(
        state_ptr, passed_ptr, entering_ptr, bh, boundary, heads, ks, vs, K, V, False
    )
    total = tl.load(
        total_ptr + (chunk_rows + start) * K + ks, mask=in_k & (stop > first), other=0.0
    )
    state *= half_decay(total, LIMIT)[None, :]
    for step in tl.range(0, stop - first, num_stages=STAGES):
        if REVERSE:
            c = stop - 1 - step
        else:
            c = first + step
        t = c * C
        at = (chunk_rows + c) * K + ks
        g = read_gates(g_desc, b, h, t, 0, C, BK, FORM)
        x = tl.trans(x_desc.load([b, h, t, 0]).reshape(C, BK)).to(tl.float32)
        z = tl.trans(z_desc.load([b, h, t, 0]).reshape(C, BK)).to(tl.float32)
        y = tl.trans(y_desc.load([b, h, t, vb * BV]).reshape(C, BV))
        flag = tl.load(strong_ptr + chunk_rows + c)
        total = tl.load(total_ptr + at, mask=in_k, other=0.0)
        until, after = anchored(g, total, C, FORM, LIMIT)
        if REVERSE:
            rows = (x * tl.exp2(after)).to(y.dtype)
            columns = (z * tl.exp2(until + log2_scale)).to(y.dtype)
        else:
            rows = (x * tl.exp2(until + log2_scale)).to(y.dtype)
            columns = (z * tl.exp2(after)).to(y.dtype)
        # In this order the pairs are masked while the two products after theirs are made.
        held = state.to(y.dtype)
        pairs = product(tl.trans(columns), rows, EXACT)
        o = product(held, rows, EXACT)
        state = add_product(state, y, tl.trans(columns), EXACT)
        pairs = tl.where(seen & (flag == 0), pairs, 0.0).to(y.dtype)
        o = add_product(o, y, pairs, EXACT)
        o_desc.store([b, h, t, vb * BV], tl.trans(o).to(o_desc.dtype).reshape(1, 1, C, BV))
        if REVERSE:
            ratio_at = at - K
            more = c > first
        else:
            ratio_at = at
            more = c >= first
        ratio = tl.load(ratio_ptr + ratio_at, mask=in_k & more, other=0.0)
        state *= ratio[None, :]
    # What leaves the rank comes from the map itself, so that neighbours agree on it to the bit.
    if REVERSE:
        edge = 0
        at_edge = segment == 0
    else:
        edge = num_segments
        at_edge = segment == num_segments - 1
    if at_edge:
        leaving = entering_state(
            state_ptr, passed_ptr, entering_ptr, bh, edge, heads, ks, vs, K, V, False
        )
        within = bh.to(tl.int64) * K * V + ks[None, :] * V + vs[:, None]
        tl.store(edge_ptr + within, leaving, mask=in_k[None, :] & (vs < V)[:, None])


@triton.jit
def gradient_walk_kernel(
    x_desc,
    y_desc,
    z_desc,
    a_ptr,
    g_desc,
    grad_desc,
    pull_ptr,
    total_ptr,
    strong_ptr,
    state_ptr,
    passed_ptr,
    entering_ptr,
    table_ptr,
    log2_scale,
    a_stride_b,
    a_stride_t,
    a_stride_h,
    T,
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
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
    LIMIT: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Gradient dq, or with REVERSE dk, by the same walk backwards in time.

    ``dq_i = exp2(b_i) ∘ (Σ_{j<=i} (dO_i·v_j) k̂_j + S dO_i)`` and ``S += k̂ᵀ v``: x, y, z, a are dO, v,
    k, q forwards and v, dO, q, k in reverse. The pull a∘(its gradient) [B·H, N, K, C] is what the
    gates' gradient is made of.
    """
    kb, segment, bh, b, h, first, stop = find_place(
        table_ptr, H, num_chunks, num_segments, chunks_per_segment, (K + BK - 1) // BK
    )
    ks = kb * BK + tl.arange(0, BK)
    vs = tl.arange(0, BV)
    in_k = ks < K
    chunk_rows = bh.to(tl.int64) * num_chunks

    i = tl.arange(0, C)
    if REVERSE:
        boundary = segment + 1
        start = stop - 1
        seen = i[:, None] >= i[None, :]
    else:
        boundary = segment
        start = first
        seen = i[:, None] <= i[None, :]
    a_start = a_ptr + b.to(tl.int64) * a_stride_b + h.to(tl.int64) * a_stride_h
    state = entering_state(
        state_ptr, passed_ptr, entering_ptr, bh, boundary, heads, ks, vs, K, V, True
    )
    total = tl.load(
        total_ptr + (chunk_rows + start) * K + ks, mask=in_k & (stop > first), other=0.0
    )
    state *= half_decay(total, LIMIT)[:, None]
    first_t = start * C + i
    valid = ((stop > first) & (first_t < T))[:, None] & in_k[None, :]
    a = tl.load(a_start + first_t[:, None] * a_stride_t + ks[None, :], mask=valid, other=0.0)
    flag = tl.load(strong_ptr + chunk_rows + start, mask=stop > first, other=0)
    # The launch's num_stages pipelines the loads that feed products; tl.range's would take the others
    # too, for which there is no room. Those are made early in the iteration or in the one before.
    for step in tl.range(0, stop - first):
        if REVERSE:
            c = stop - 1 - step
            following = c - 1
        else:
            c = first + step
            following = c + 1
        t = c * C
        at = (chunk_rows + c) * K + ks
        more = (following >= first) & (following < stop)
        next_at = (chunk_rows + following) * K + ks
        next_total = tl.load(total_ptr + next_at, mask=in_k & more, other=0.0)
        next_flag = tl.load(strong_ptr + chunk_rows + following, mask=more, other=0)
        g = read_gates(g_desc, b, h, t, kb * BK, C, BK, FORM)
        z = tl.trans(z_desc.load([b, h, t, kb * BK]).reshape(C, BK))
        x = tl.trans(x_desc.load([b, h, t, 0]).reshape(C, BV))
        y = y_desc.load([b, h, t, 0]).reshape(C, BV)
        until, after = anchored(g, total, C, FORM, LIMIT)
        if REVERSE:
            outer = tl.exp2(after)
            columns = (z.to(tl.float32) * tl.exp2(until + log2_scale)).to(y.dtype)
        else:
            outer = tl.exp2(until + log2_scale)
            columns = (z.to(tl.float32) * tl.exp2(after)).to(y.dtype)
        pairs = product(y, x, EXACT)
        pairs = tl.where(seen & (flag == 0), pairs, 0.0).to(y.dtype)
        grad = product(state.to(y.dtype), x, EXACT)
        grad = add_product(grad, columns, pairs, EXACT)
        # Rounded as in the other walk's columns, a pair's two pulls are equal and cancel, and so do
        # those of a token with itself.
        pull = rounded(tl.trans(a).to(tl.float32) * outer, y) * grad
        tl.store(pull_ptr + (at * C)[:, None] + i[None, :], pull, mask=in_k[:, None])
        # The next chunk's, here where registers are free again.
        next_t = following * C + i
        valid = (more & (next_t < T))[:, None] & in_k[None, :]
        a = tl.load(a_start + next_t[:, None] * a_stride_t + ks[None, :], mask=valid, other=0.0)
        grad *= outer
        grad_desc.store([b, h, t, kb * BK], tl.trans(grad).to(grad_desc.dtype).reshape(1, 1, C, BK))
        state = add_product(state, columns, y, EXACT)
        state *= (half_decay(total, LIMIT) * half_decay(next_total, LIMIT))[:, None]
        total = next_total
        flag = next_flag


@triton.jit
def gate_gradient_kernel(
    query_pull_ptr,
    key_pull_ptr,
    dg_desc,
    state_ptr,
    passed_ptr,
    entering_ptr,
    adjoint_ptr,
    adjoint_passed_ptr,
    leaving_ptr,
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
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradient of the log decays: the weight of all paths that cross each token's decay.

    At a segment's start that is the sum over V of (state ∘ its gradient). From token to token the
    paths that end at the token are taken off and those that begin at it put on: the pulls. Going
    forwards, everything carried is such a weight itself; a sum from the end would cancel where a
    strong decay cuts the large gradient of a final state off.
    """
    kb, segment, bh, b, h, first, stop = find_place(
        table_ptr, H, num_chunks, num_segments, chunks_per_segment, (K + BK - 1) // BK
    )
    ks = kb * BK + tl.arange(0, BK)
    carried = tl.zeros([BK], tl.float32)
    for v in tl.range(0, V, BV):
        vs = v + tl.arange(0, BV)
        state = entering_state(
            state_ptr, passed_ptr, entering_ptr, bh, segment, heads, ks, vs, K, V, True
        )
        adjoint = entering_state(
            adjoint_ptr, adjoint_passed_ptr, leaving_ptr, bh, segment, heads, ks, vs, K, V, True
        )
        carried += tl.sum(state * adjoint, 1)
    i = tl.arange(0, C)
    before = tl.where(i[:, None] < i[None, :], 1.0, 0.0)
    ones = tl.full([C, 16], 1.0, tl.float32)
    for c in tl.range(first, stop, num_stages=STAGES):
        at = (bh.to(tl.int64) * num_chunks + c) * K + ks
        pull_at = (at * C)[:, None] + i[None, :]
        pull = tl.load(key_pull_ptr + pull_at, mask=(ks < K)[:, None], other=0.0)
        pull -= tl.load(query_pull_ptr + pull_at, mask=(ks < K)[:, None], other=0.0)
        # A product with 0/1 in place of a running sum less the token's own pull, which may be large.
        if EXACT:
            dg = tl.dot(pull, before, input_precision="tf32x3")
            total = tl.dot(pull, ones, input_precision="tf32x3")
        else:
            high = pull.to(tl.bfloat16)
            low = (pull - high.to(tl.float32)).to(tl.bfloat16)
            dg = tl.dot(low, before.to(tl.bfloat16), tl.dot(high, before.to(tl.bfloat16)))
            total = tl.dot(low, ones.to(tl.bfloat16), tl.dot(high, ones.to(tl.bfloat16)))
        dg += carried[:, None]
        dg_desc.store([b, h, c * C, kb * BK], tl.trans(dg).to(dg_desc.dtype).reshape(1, 1, C, BK))
        carried += tl.max(total, 1)
