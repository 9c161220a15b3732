"""Passes of wide keys: one program a chunk and block of channels, its state read and not carried.

A state [K, V] with K above 128 is more than a program carries in registers, and what it carries in
shared memory it must move in every chunk. Here states were written by
`zeco.kernels.chunkwise.states`, so that nothing is carried: plain products, in steps over the channels
they sum over, and chunks of 128 tokens, which make the states fewer. Rows are tokens, columns channels.

By channel (``strong_ptr``) rows come scaled, from `zeco.kernels.chunkwise.rows`; else weights are put on
pairs and rows as in `zeco.kernels.scalar.walk`. ``GROUP`` heads of values share a head of queries, keys
and decays by channel.
"""
# ruff: noqa: SIM108  (a conditional expression would compile both sides)
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.decay.gate_sums import power
from zeco.kernels.decay.row_scales import scale_rows
from zeco.kernels.decay.state import find_place
from zeco.kernels.products import keep_pairs, own_pairs, pair_mask, reciprocal
from zeco.kernels.scalar.sums import chunk_skips, chunk_weights, pair_weights


@triton.jit
def chunkwise_output_kernel(
    x_desc,
    z_desc,
    y_desc,
    sums_ptr,
    strong_ptr,
    kept_desc,
    o_desc,
    own_ptr,
    log2_scale,
    H,
    heads,
    num_chunks,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    SKIP: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Outputs o, or with REVERSE dv; x, z, y are q, k, v forwards and k, q, dO in reverse.

    If there is room for them it leaves each token's own product z·x, unscaled, [B·H, N, C].
    """
    vb, c, bh, b, h, _, _ = find_place(None, H, num_chunks, num_chunks, 1, (V + BV - 1) // BV)
    t = c * C
    i = tl.arange(0, C)
    place = bh.to(tl.int64) * num_chunks + c
    o = tl.zeros([C, BV], tl.float32)
    pairs = tl.zeros([C, C], tl.float32)
    for kk in tl.range(0, K, BK, num_stages=STAGES):
        x = x_desc.load([b, h // GROUP, t, kk]).reshape(C, BK)
        z = z_desc.load([b, h // GROUP, t, kk]).reshape(C, BK)
        state = kept_desc.load([c, bh, kk, vb * BV]).reshape(BK, BV)
        pairs = tl.dot(x, tl.trans(z), pairs)
        o = tl.dot(x, state, o)
    y = y_desc.load([b, h, t, vb * BV]).reshape(C, BV)
    # Rows are a pair's later token forwards, as columns are in walks.
    mask = pair_mask(C, 0, not REVERSE, False)
    if strong_ptr is not None:
        pairs = keep_pairs(pairs, mask, tl.load(strong_ptr + place), y, False)
    else:
        at = place * C
        size = tl.cast(heads, tl.int64) * num_chunks * C
        high, low, _, _, steps, row_weight, _ = chunk_weights(
            sums_ptr, at, size, log2_scale, C, False, STEP, REVERSE
        )
        if own_ptr is not None and vb == 0:
            tl.store(own_ptr + at + i, own_pairs(pairs, i))
        pairs *= pair_weights(high, low, steps, log2_scale, not REVERSE, False)
        if SKIP:
            skips = chunk_skips(sums_ptr, at, size, C, False, STEP)
            pairs += tl.where(i[:, None] == i[None, :], skips[:, None], 0.0)
        pairs = keep_pairs(pairs, mask, None, y, False)
        o *= row_weight[:, None]
    o = tl.dot(pairs, y, o)
    o_desc.store([b, h, t, vb * BV], o.to(o_desc.dtype).reshape(1, 1, C, BV))


@triton.jit
def chunkwise_gradient_kernel(
    x_desc,
    y_desc,
    z_desc,
    a_desc,
    sums_ptr,
    scales_desc,
    total_ptr,
    strong_ptr,
    kept_desc,
    grad_desc,
    pull_ptr,
    pulls_desc,
    unit_ptr,
    own_ptr,
    log2_scale,
    H,
    heads,
    num_chunks,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    FORM: tl.constexpr,
    LIMIT: tl.constexpr,
    REVERSE: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradient dq, or with REVERSE dk; x, y, z, a are dO, v, k, q forwards and v, dO, q, k in reverse.

    What the gates' gradient is made of, if it is wanted, are the pulls a∘(its gradient), a token's own
    pair left out: by channel each one, in a unit of its chunk's channel, and these units [B·H, N, K];
    else their sums [blocks, B·H, N, C]. If there is room for them it leaves each token's own product
    y·x, unscaled, [B·H, N, C].
    """
    kb, c, bh, b, h, _, _ = find_place(None, H, num_chunks, num_chunks, 1, (K + BK - 1) // BK)
    t = c * C
    i = tl.arange(0, C)
    place = bh.to(tl.int64) * num_chunks + c
    grad = tl.zeros([C, BK], tl.float32)
    pairs = tl.zeros([C, C], tl.float32)
    for vv in tl.range(0, V, BV, num_stages=STAGES):
        x = x_desc.load([b, h, t, vv]).reshape(C, BV)
        y = y_desc.load([b, h, t, vv]).reshape(C, BV)
        state = kept_desc.load([c, bh, kb * BK, vv]).reshape(BK, BV)
        pairs = tl.dot(x, tl.trans(y), pairs)
        grad = tl.dot(x, tl.trans(state), grad)
    z = z_desc.load([b, h // GROUP, t, kb * BK]).reshape(C, BK)
    if strong_ptr is not None:
        flag = tl.load(strong_ptr + place)
        own = own_pairs(pairs, i)
        own = tl.where(flag == 0, own, 0.0)
        pairs = keep_pairs(pairs, pair_mask(C, 1, not REVERSE, False), flag, z, False)
        grad = tl.dot(pairs, z, grad)
        ks = kb * BK + tl.arange(0, BK)
        in_k = ks < K
        a = a_desc.load([b, h // GROUP, t, kb * BK]).reshape(C, BK)
        pull = a.to(tl.float32) * grad
        unit = tl.maximum(tl.max(tl.abs(pull), 0), 1e-30) * (1.0 / 32768.0)
        tl.store(unit_ptr + place * K + ks, unit, mask=in_k)
        pull *= reciprocal(unit)[None, :]
        pulls_desc.store([b, h, t, kb * BK], pull.to(pulls_desc.dtype).reshape(1, 1, C, BK))
        grad += own[:, None] * z.to(tl.float32)
        # Sums of gates come out channels first.
        TURN: tl.constexpr = FORM != 3
        if TURN:
            a = tl.trans(a)
        _, _, rising, falling = scale_rows(
            a, a, scales_desc, b, h // GROUP, t, kb * BK, total_ptr + place * K, ks, in_k, SCALE, C, BK,
            FORM, LIMIT, not TURN,
        )  # fmt: skip
        if REVERSE:
            weight = falling
        else:
            weight = rising
        if TURN:
            weight = tl.trans(weight)
        grad *= weight
    else:
        # Pulls are without a token's own pair: it crosses no decay, and may be far above those that do.
        NEAREST: tl.constexpr = 0 if pull_ptr is None else 1
        mask = pair_mask(C, NEAREST, not REVERSE, False)
        at = place * C
        size = tl.cast(heads, tl.int64) * num_chunks * C
        high, low, _, _, steps, row_weight, _ = chunk_weights(
            sums_ptr, at, size, log2_scale, C, False, STEP, REVERSE
        )
        if pull_ptr is not None:
            own = own_pairs(pairs, i)
            if own_ptr is not None and kb == 0:
                tl.store(own_ptr + at + i, own)
        pairs *= pair_weights(high, low, steps, log2_scale, not REVERSE, False)
        pairs = keep_pairs(pairs, mask, None, z, False)
        grad *= row_weight[:, None]
        grad = tl.dot(pairs, z, grad)
        if pull_ptr is not None:
            a = a_desc.load([b, h // GROUP, t, kb * BK]).reshape(C, BK)
            pull = tl.sum(a.to(tl.float32) * grad, 1)
            tl.store(pull_ptr + kb.to(tl.int64) * size + at + i, pull)
            grad += z.to(tl.float32) * (own * power(log2_scale + steps))[:, None]
    grad_desc.store([b, h, t, kb * BK], grad.to(grad_desc.dtype).reshape(1, 1, C, BK))


@triton.jit
def chunkwise_gate_gradient_kernel(
    query_pulls_ptr,
    query_unit_ptr,
    key_pulls_ptr,
    key_unit_ptr,
    pairs_pull_ptr,
    strong_ptr,
    crossing_ptr,
    dg_ptr,
    T,
    H,
    heads,
    num_chunks,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Gradient of the decays by channel, as `zeco.kernels.decay.gate_gradient` has it, chunk by chunk.

    What crosses a chunk's start is known and comes in PARTS, to be added.
    """
    kb, c, shared, b, h, _, _ = find_place(
        None, H // GROUP, num_chunks, num_chunks, 1, (K + BK - 1) // BK
    )
    ks = kb * BK + tl.arange(0, BK)
    in_k = ks < K
    i = tl.arange(0, C)
    t = c * C + i
    inside = (t < T)[:, None] & in_k[None, :]
    # Shared heads lie as these do: [B, T, H / GROUP, K].
    row = (b.to(tl.int64) * T + t[:, None]) * (H // GROUP) + h
    carried = tl.zeros([BK], tl.float32)
    pull = tl.zeros([C, BK], tl.float32)
    for member in tl.static_range(GROUP):
        at = (row * GROUP + member) * K + ks[None, :]
        own = tl.load(key_pulls_ptr + at, mask=inside, other=0.0)
        query = tl.load(query_pulls_ptr + at, mask=inside, other=0.0)
        place = (shared * GROUP + member).to(tl.int64) * num_chunks + c
        unit = tl.load(key_unit_ptr + place * K + ks, mask=in_k, other=0.0)
        query_unit = tl.load(query_unit_ptr + place * K + ks, mask=in_k, other=0.0)
        for part in tl.static_range(PARTS):
            part_at = (tl.cast(part * heads, tl.int64) * num_chunks + place) * K
            carried += tl.load(crossing_ptr + part_at + ks, mask=in_k, other=0.0)
        pull += own.to(tl.float32) * unit[None, :] - query.to(tl.float32) * query_unit[None, :]
        if tl.load(strong_ptr + place) != 0:
            pairs_at = pairs_pull_ptr + place * K * C + (ks * C)[None, :] + i[:, None]
            pull += tl.load(pairs_at, mask=in_k[None, :], other=0.0)
    dg = tl.cumsum(pull, 0) - pull + carried[None, :]
    tl.store(dg_ptr + row * K + ks[None, :], dg.to(dg_ptr.dtype.element_ty), mask=inside)
