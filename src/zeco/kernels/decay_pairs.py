"""Pairs of tokens inside chunks with a strong channel, by bisection: right for any decay.

At each level, rows in the later half of a block are scaled by the decay since the split and rows in
the earlier half by the decay up to it. Every exponent is a sum of log decays, hence <= 0; the scaled
rows of both halves come from one product of the gates with a 0/1 matrix.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.gate_sums import add_product, product, read_gates, sum_gates


@triton.jit
def _halves(level, C: tl.constexpr):
    """Return (weights [C, C] for `sum_gates`, which pairs (row i, column j) this level makes)."""
    i = tl.arange(0, C)
    split = ((i >> (level + 1)) << (level + 1)) + (1 << level)
    later = ((i >> level) & 1) == 1
    n = i[:, None]
    since = (n >= split[None, :]) & (n <= i[None, :])
    upto = (n > i[None, :]) & (n < split[None, :])
    weights = tl.where(tl.where(later[None, :], since, upto), 1.0, 0.0)
    block = i >> (level + 1)
    made = (block[:, None] == block[None, :]) & later[:, None] & (later[None, :] == 0)
    return weights, made


@triton.jit
def _own_scores(q, k, C: tl.constexpr):
    """Return the products of each row [C, K] of q with that of k, on the diagonal of [C, C]."""
    i = tl.arange(0, C)
    diagonal = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    return tl.where(i[:, None] == i[None, :], diagonal[:, None], 0.0)


@triton.jit
def _scores(
    q_desc,
    k_desc,
    g_desc,
    b,
    h,
    t,
    scale,
    K: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Return ``scale · (q_i ∘ exp2(b_i - b_j))·k_j`` [C, C] for j <= i, 0 elsewhere."""
    scores = tl.zeros([C, C], tl.float32)
    for kk in tl.range(0, K, BK):
        g = read_gates(g_desc, b, h, t, kk, C, BK, FORM)
        q = q_desc.load([b, h, t, kk]).reshape(C, BK)
        k = k_desc.load([b, h, t, kk]).reshape(C, BK)
        scores += _own_scores(q, k, C)
        for level in tl.range(LEVELS):
            weights, made = _halves(level, C)
            decay = tl.exp2(tl.trans(sum_gates(g, weights, FORM)))
            q_scaled = (q.to(tl.float32) * decay).to(q.dtype)
            k_scaled = (k.to(tl.float32) * decay).to(q.dtype)
            scores += tl.where(made, product(q_scaled, tl.trans(k_scaled), EXACT), 0.0)
    return scores * scale


@triton.jit
def strong_pairs_fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    g_desc,
    o_desc,
    strong_ptr,
    scale,
    H,
    num_chunks,
    runs,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    RUN: tl.constexpr,
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Add to o what tokens of flagged chunks get from tokens of their own chunk."""
    pid = tl.program_id(0)
    bh = pid // runs
    b, h = bh // H, bh % H
    first = (pid % runs) * RUN
    for c in tl.range(first, tl.minimum(first + RUN, num_chunks)):
        if tl.load(strong_ptr + bh.to(tl.int64) * num_chunks + c) != 0:
            t = c * C
            scores = _scores(q_desc, k_desc, g_desc, b, h, t, scale, K, C, LEVELS, BK, FORM, EXACT)
            for vv in tl.range(0, V, BV):
                v = v_desc.load([b, h, t, vv]).reshape(C, BV)
                o = o_desc.load([b, h, t, vv]).reshape(C, BV).to(tl.float32)
                o = add_product(o, scores.to(v.dtype), v, EXACT)
                o_desc.store([b, h, t, vv], o.to(o_desc.dtype).reshape(1, 1, C, BV))


@triton.jit
def strong_pairs_bwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    g_desc,
    do_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    pull_ptr,
    strong_ptr,
    scale,
    H,
    num_chunks,
    runs,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    RUN: tl.constexpr,
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Add to dq, dk, dv and the keys' pull what pairs of tokens inside flagged chunks contribute."""
    pid = tl.program_id(0)
    bh = pid // runs
    b, h = bh // H, bh % H
    first = (pid % runs) * RUN
    i = tl.arange(0, C)
    for c in tl.range(first, tl.minimum(first + RUN, num_chunks)):
        if tl.load(strong_ptr + bh.to(tl.int64) * num_chunks + c) != 0:
            t = c * C
            pairs = tl.zeros([C, C], tl.float32)
            for vv in tl.range(0, V, BV):
                v = v_desc.load([b, h, t, vv]).reshape(C, BV)
                do = do_desc.load([b, h, t, vv]).reshape(C, BV)
                pairs = add_product(pairs, do, tl.trans(v), EXACT)
            pairs *= scale
            scores = tl.zeros([C, C], tl.float32)
            for kk in tl.range(0, K, BK):
                g = read_gates(g_desc, b, h, t, kk, C, BK, FORM)
                q = q_desc.load([b, h, t, kk]).reshape(C, BK)
                k = k_desc.load([b, h, t, kk]).reshape(C, BK)
                scores += _own_scores(q, k, C)
                dq = tl.zeros([C, BK], tl.float32)
                dk = tl.zeros([C, BK], tl.float32)
                pull = tl.zeros([C, BK], tl.float32)
                for level in tl.range(LEVELS):
                    weights, made = _halves(level, C)
                    decay = tl.exp2(tl.trans(sum_gates(g, weights, FORM)))
                    level_pairs = tl.where(made, pairs, 0.0).to(q.dtype)
                    q_scaled = (q.to(tl.float32) * decay).to(q.dtype)
                    k_scaled = (k.to(tl.float32) * decay).to(q.dtype)
                    scores += tl.where(made, product(q_scaled, tl.trans(k_scaled), EXACT), 0.0)
                    to_q = product(level_pairs, k_scaled, EXACT)
                    to_k = product(tl.trans(level_pairs), q_scaled, EXACT)
                    dq += decay * to_q
                    dk += decay * to_k
                    # From the same rounded factors, so that a pair's two pulls cancel.
                    pull += k_scaled.to(tl.float32) * to_k - q_scaled.to(tl.float32) * to_q
                q, k = q.to(tl.float32), k.to(tl.float32)
                ks = kk + tl.arange(0, BK)
                pull_at = pull_ptr + ((bh.to(tl.int64) * num_chunks + c) * K + ks)[None, :] * C
                pull_at += i[:, None]
                inside = (ks < K)[None, :]
                pull += tl.load(pull_at, mask=inside, other=0.0)
                tl.store(pull_at, pull, mask=inside)
                same = tl.sum(tl.where(i[:, None] == i[None, :], pairs, 0.0), 1)
                dq += same[:, None] * k + dq_desc.load([b, h, t, kk]).reshape(C, BK).to(tl.float32)
                dk += same[:, None] * q + dk_desc.load([b, h, t, kk]).reshape(C, BK).to(tl.float32)
                dq_desc.store([b, h, t, kk], dq.to(dq_desc.dtype).reshape(1, 1, C, BK))
                dk_desc.store([b, h, t, kk], dk.to(dk_desc.dtype).reshape(1, 1, C, BK))
            scores = (scores * scale).to(v_desc.dtype)
            for vv in tl.range(0, V, BV):
                do = do_desc.load([b, h, t, vv]).reshape(C, BV)
                dv = dv_desc.load([b, h, t, vv]).reshape(C, BV).to(tl.float32)
                dv = add_product(dv, tl.trans(scores), do, EXACT)
                dv_desc.store([b, h, t, vv], dv.to(dv_desc.dtype).reshape(1, 1, C, BV))
