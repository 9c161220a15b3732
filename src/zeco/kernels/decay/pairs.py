"""Pairs of tokens inside chunks with a strong channel, by bisection: right for any decay.

Level l cuts a chunk into blocks of 2^(l+1) tokens and makes the pairs across each block's middle: rows
of q in its later half are scaled by the decay since the middle, rows of k in its earlier half by the
decay up to it. Every exponent is a sum of log decays, hence <= 0. A token is in one half only, so one
matrix x holds the rows of both kinds, and x xᵀ the level's pairs, mirrored.

Few chunks may be flagged, or all: as many programs as run at once share the chunks of all heads out
among them, and each looks at its flags many at a time. ``GROUP`` heads of v share one of q, k and g.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeco.kernels.decay.gate_sums import LOG2E, read_gates
from zeco.kernels.products import (
    INTERPRETED,
    add_product,
    opaque,
    own_pairs,
    product,
    two_pieces,
)

_FLAGS = tl.constexpr(16)  # flags read at a time


@lru_cache(maxsize=16)
def level_weights(C: int, form: int, device: torch.device) -> Tensor:
    """Return the 0/1 matrices that sum the gates between each token and its block's middle.

    [levels + 1, C, C]: the kernels' loops make the rows of one level more than there are.

    Args:
        C: tokens a chunk.
        form: form of the gates; see `zeco.kernels.decay.gate_sums.read_gates`.
        device: where they are kept.
    """
    i = torch.arange(C)
    level = torch.arange(C.bit_length())[:, None]
    later, start = (i >> level) & 1 == 1, i >> level << level
    first = torch.where(later, start, i + 1)[:, :, None]
    last = torch.where(later, i, start + (1 << level) - 1)[:, :, None]
    dtype = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16}[form]
    return ((first <= i) & (i <= last)).to(dtype).to(device)


@triton.jit
def _any_flagged(strong_ptr, first, chunks):
    """Return whether any of this program's next chunks is flagged."""
    mine = first + tl.arange(0, _FLAGS) * tl.num_programs(0)
    return tl.max(tl.load(strong_ptr + mine, mask=mine < chunks, other=0), 0) != 0


@triton.jit
def _scale_rows(q, k, exponents, level, C: tl.constexpr):
    """Return (the decays [C, BK] between each token and its block's middle, the rows x)."""
    later = ((tl.arange(0, C) >> level) & 1) == 1
    decay = tl.exp2(exponents)
    x = (tl.where(later[:, None], q, k).to(tl.float32) * decay).to(q.dtype)
    # Else the compiler would give up on converting two numbers at a time.
    return decay, opaque(x)


@triton.jit
def _first_rows(q, k, g, C: tl.constexpr, FORM: tl.constexpr):
    """Return those of level 0, where a block's middle lies between its two tokens."""
    later = (tl.arange(0, C) & 1) == 1
    if FORM == 1:
        g = g.to(tl.float32) * LOG2E
    return _scale_rows(q, k, tl.where(later[:, None], g, 0.0), 0, C)


@triton.jit
def _rows(q, k, g, weights_ptr, level, C: tl.constexpr, FORM: tl.constexpr):
    """Return those of any level."""
    i = tl.arange(0, C)
    weights = tl.load(weights_ptr + (level * C + i[:, None]) * C + i[None, :])
    if FORM == 0:
        sums = tl.dot(weights, g, input_precision="tf32x3")
    elif FORM == 1:
        sums = tl.dot(weights, g) * LOG2E
    else:
        high, low = two_pieces(g, tl.float16)
        sums = tl.dot(weights, low, tl.dot(weights, high))
    return _scale_rows(q, k, sums, level, C)


@triton.jit
def _made(level, C: tl.constexpr):
    """Return which pairs [C, C] a level makes, mirrored."""
    half = tl.arange(0, C) >> level
    return (half ^ 1)[:, None] == half[None, :]


@triton.jit
def _pick(pairs, level, EXACT: tl.constexpr, C: tl.constexpr):
    """Return pairs [C, C], zero where a level doesn't make them."""
    if EXACT or INTERPRETED:
        picked = tl.where(_made(level, C), pairs, 0.0).to(pairs.dtype)
    else:
        # Two numbers at a time: the compiler would pack the comparisons into bits and unpack them.
        half = tl.arange(0, C) >> level
        picked = tl.inline_asm_elementwise(
            """
            {
            .reg .pred p, q;
            .reg .b16 x, y;
            mov.b32 {x, y}, $1;
            setp.eq.s32 p, $2, $4;
            setp.eq.s32 q, $3, $5;
            selp.b16 x, x, 0, p;
            selp.b16 y, y, 0, q;
            mov.b32 $0, {x, y};
            }
            """,
            "=r,r,r,r,r,r",
            [
                pairs,
                tl.broadcast_to((half ^ 1)[:, None], C, C),
                tl.broadcast_to(half[None, :], C, C),
            ],
            dtype=pairs.dtype,
            is_pure=True,
            pack=2,
        )
    return picked


@triton.jit
def _finish(scores, own, scale, SIDE: tl.constexpr, C: tl.constexpr):
    """Return scaled scores [C, C] of rows with columns before (SIDE 1) or after (-1), and their own."""
    i = tl.arange(0, C)
    apart = SIDE * (i[:, None] - i[None, :])
    return tl.where(apart == 0, own[:, None], tl.where(apart > 0, scores, 0.0)) * scale


@triton.jit
def strong_pairs_fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    g_desc,
    o_desc,
    strong_ptr,
    weights_ptr,
    scale,
    H,
    num_chunks,
    chunks,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Add to o what tokens of flagged chunks get from tokens of their own chunk."""
    programs = tl.num_programs(0)
    for first in tl.range(tl.program_id(0), chunks, programs * _FLAGS):
        if _any_flagged(strong_ptr, first, chunks):
            for chunk in tl.range(first, tl.minimum(first + programs * _FLAGS, chunks), programs):
                if tl.load(strong_ptr + chunk) != 0:
                    bh = chunk // num_chunks
                    b, h = bh // H, bh % H
                    t = (chunk % num_chunks) * C
                    own = tl.zeros([C], tl.float32)
                    scores = tl.zeros([C, C], tl.float32)
                    for kk in tl.range(0, K, BK):
                        g = tl.trans(read_gates(g_desc, b, h // GROUP, t, kk, C, BK, FORM))
                        q = q_desc.load([b, h // GROUP, t, kk]).reshape(C, BK)
                        k = k_desc.load([b, h // GROUP, t, kk]).reshape(C, BK)
                        own += tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
                        _, x = _first_rows(q, k, g, C, FORM)
                        # Pipelined: a level's weights are fetched during the one before.
                        for level in tl.range(LEVELS, num_stages=2):
                            found = product(x, tl.trans(x), EXACT)
                            scores += tl.where(_made(level, C), found, 0.0)
                            _, x = _rows(q, k, g, weights_ptr, level + 1, C, FORM)
                    scores = _finish(scores, own, scale, 1, C)
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
    weights_ptr,
    scale,
    H,
    num_chunks,
    chunks,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    FORM: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Add to dq, dk, dv what pairs of tokens inside flagged chunks contribute; write their pulls."""
    programs = tl.num_programs(0)
    i = tl.arange(0, C)
    for first in tl.range(tl.program_id(0), chunks, programs * _FLAGS):
        if _any_flagged(strong_ptr, first, chunks):
            for chunk in tl.range(first, tl.minimum(first + programs * _FLAGS, chunks), programs):
                if tl.load(strong_ptr + chunk) != 0:
                    bh = chunk // num_chunks
                    b, h = bh // H, bh % H
                    t = (chunk % num_chunks) * C
                    pairs = tl.zeros([C, C], tl.float32)
                    for vv in tl.range(0, V, BV):
                        v = v_desc.load([b, h, t, vv]).reshape(C, BV)
                        do = do_desc.load([b, h, t, vv]).reshape(C, BV)
                        pairs = add_product(pairs, do, tl.trans(v), EXACT)
                    pairs *= scale
                    same = own_pairs(pairs, i)
                    # Mirrored, so that both tokens of a pair take the same rounded number; negative
                    # in later halves, as is the pull on queries.
                    pairs = pairs.to(q_desc.dtype)
                    pairs = tl.where(i[:, None] > i[None, :], -pairs, tl.trans(pairs))
                    own = tl.zeros([C], tl.float32)
                    scores = tl.zeros([C, C], tl.float32)
                    for kk in tl.range(0, K, BK):
                        g = tl.trans(read_gates(g_desc, b, h // GROUP, t, kk, C, BK, FORM))
                        q = q_desc.load([b, h // GROUP, t, kk]).reshape(C, BK)
                        k = k_desc.load([b, h // GROUP, t, kk]).reshape(C, BK)
                        own += tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
                        dq = same[:, None] * k.to(tl.float32)
                        dk = same[:, None] * q.to(tl.float32)
                        pull = tl.zeros([C, BK], tl.float32)
                        decay, x = _first_rows(q, k, g, C, FORM)
                        for level in tl.range(LEVELS):
                            found = product(x, tl.trans(x), EXACT)
                            scores += tl.where(_made(level, C), found, 0.0)
                            to_x = product(_pick(pairs, level, EXACT, C), x, EXACT)
                            # From the same rounded rows, so that a pair's two pulls cancel.
                            pull += x.to(tl.float32) * to_x
                            to_x *= decay
                            later = ((i >> level) & 1) == 1
                            dq += tl.where(later, -1.0, 0.0)[:, None] * to_x
                            dk += tl.where(later, 0.0, 1.0)[:, None] * to_x
                            decay, x = _rows(q, k, g, weights_ptr, level + 1, C, FORM)
                        ks = kk + tl.arange(0, BK)
                        pull_at = pull_ptr + (tl.cast(chunk, tl.int64) * K + ks)[None, :] * C
                        pull_at += i[:, None]
                        tl.store(pull_at, pull, mask=(ks < K)[None, :])
                        dq += dq_desc.load([b, h, t, kk]).reshape(C, BK).to(tl.float32)
                        dk += dk_desc.load([b, h, t, kk]).reshape(C, BK).to(tl.float32)
                        dq_desc.store([b, h, t, kk], dq.to(dq_desc.dtype).reshape(1, 1, C, BK))
                        dk_desc.store([b, h, t, kk], dk.to(dk_desc.dtype).reshape(1, 1, C, BK))
                    scores = _finish(scores, own, scale, -1, C).to(v_desc.dtype)
                    for vv in tl.range(0, V, BV):
                        do = do_desc.load([b, h, t, vv]).reshape(C, BV)
                        dv = dv_desc.load([b, h, t, vv]).reshape(C, BV).to(tl.float32)
                        dv = add_product(dv, scores, do, EXACT)
                        dv_desc.store([b, h, t, vv], dv.to(dv_desc.dtype).reshape(1, 1, C, BV))
