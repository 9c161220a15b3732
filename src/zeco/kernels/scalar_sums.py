"""Sums of one gate a head inside each chunk, made once and read by all passes."""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.gate_sums import FLOOR, LOG2E


@triton.jit
def scalar_sums_kernel(
    g_ptr,
    sums_ptr,
    g_stride_b,
    g_stride_t,
    g_stride_h,
    T,
    H,
    num_chunks,
    runs,
    heads,
    C: tl.constexpr,
    RUN: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Sum the gates of each chunk up to each token, in base 2: sums [PARTS, B·H, N, C].

    In two parts, for fp32, the first are multiples of 2^-10, whose sums are exact: differences don't
    cancel then, whatever strong decay lies before.
    """
    pid = tl.program_id(0)
    bh = pid // runs
    chunks = (pid % runs) * RUN + tl.arange(0, RUN)
    i = tl.arange(0, C)
    t = chunks[:, None] * C + i[None, :]
    start = g_ptr + (bh // H).to(tl.int64) * g_stride_b + (bh % H) * g_stride_h
    g = tl.load(start + t.to(tl.int64) * g_stride_t, mask=t < T, other=0.0).to(tl.float32) * LOG2E
    # A comparison that NaN fails: it must come out again.
    g = tl.where(g < FLOOR, FLOOR, g)
    high = tl.floor(g * 1024.0) * (1.0 / 1024.0)
    low = tl.cumsum(g - high, 1)
    high = tl.cumsum(high, 1)
    at = (bh.to(tl.int64) * num_chunks + chunks)[:, None] * C + i[None, :]
    inside = (chunks < num_chunks)[:, None]
    if PARTS == 1:
        tl.store(sums_ptr + at, high + low, mask=inside)
    else:
        tl.store(sums_ptr + at, high, mask=inside)
        tl.store(sums_ptr + heads.to(tl.int64) * num_chunks * C + at, low, mask=inside)


@triton.jit
def chunk_until(sums_ptr, at, size, C: tl.constexpr, EXACT: tl.constexpr):
    """Return a chunk's sums up to each token [C] in two parts, the second zero unless EXACT.

    Small loads, made anew wherever a tensor of another layout needs them.
    """
    i = tl.arange(0, C)
    low = tl.zeros([C], tl.float32)
    if sums_ptr is None:
        high = low
    else:
        high = tl.load(sums_ptr + at + i)
        if EXACT:
            low = tl.load(sums_ptr + size + at + i)
    return high, low


@triton.jit
def chunk_total(sums_ptr, at, size, C: tl.constexpr, EXACT: tl.constexpr):
    """Return a chunk's total in two parts."""
    low = tl.full([], 0.0, tl.float32)
    if sums_ptr is None:
        high = low
    else:
        high = tl.load(sums_ptr + at + C - 1)
        if EXACT:
            low = tl.load(sums_ptr + size + at + C - 1)
    return high, low
