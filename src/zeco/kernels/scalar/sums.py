"""Numbers of each token that all passes read: sums of its head's gates inside its chunk, its weights."""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.decay.gate_sums import FLOOR, LOG2E, power

# Base-2 logarithm of the smallest step: a token whose step is zero has one that counts for nothing, but
# leaves in its gradients what the step's own is made of.
LEAST_STEP = tl.constexpr(-100.0)


@triton.jit
def token_at(ptr, b, h, t, stride_b, stride_t, stride_h):
    """Return where one head's numbers of tokens t lie in a tensor [B, T, H]; b and t are 64-bit."""
    return ptr + b * stride_b + h * stride_h + t * stride_t


@triton.jit
def scalar_sums_kernel(
    g_ptr,
    step_ptr,
    skip_ptr,
    sums_ptr,
    g_stride_b,
    g_stride_t,
    g_stride_h,
    step_stride_b,
    step_stride_t,
    step_stride_h,
    skip_stride_b,
    skip_stride_t,
    skip_stride_h,
    T,
    H,
    num_chunks,
    runs,
    heads,
    C: tl.constexpr,
    RUN: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Sum the gates of each chunk up to each token, in base 2: sums [PARTS, B·H, N, C].

    In two parts, for fp32, the first are multiples of 2^-10, whose sums are exact: differences don't
    cancel then, whatever strong decay lies before. Behind them lie the steps' base-2 logarithms, and
    the skips. A program takes a RUN of chunks of HEADS heads, which mostly lie side by side.
    """
    pid = tl.program_id(0)
    groups = (H + HEADS - 1) // HEADS
    chunks = (pid % runs) * RUN + tl.arange(0, RUN)[:, None, None]
    i = tl.arange(0, C)[None, :, None]
    h = (pid // runs % groups) * HEADS + tl.arange(0, HEADS)[None, None, :]
    t = (chunks * C + i).to(tl.int64)
    b = (pid // runs // groups).to(tl.int64)
    there = (t < T) & (h < H)
    g_at = token_at(g_ptr, b, h, t, g_stride_b, g_stride_t, g_stride_h)
    g = tl.load(g_at, mask=there, other=0.0).to(tl.float32) * LOG2E
    # A comparison that NaN fails: it must come out again.
    g = tl.where(g < FLOOR, FLOOR, g)
    high = tl.floor(g * 1024.0) * (1.0 / 1024.0)
    low = tl.cumsum(g - high, 1)
    high = tl.cumsum(high, 1)
    at = ((b * H + h) * num_chunks + chunks) * C + i
    size = heads.to(tl.int64) * num_chunks * C
    inside = (chunks < num_chunks) & (h < H)
    if PARTS == 1:
        tl.store(sums_ptr + at, high + low, mask=inside)
    else:
        tl.store(sums_ptr + at, high, mask=inside)
        tl.store(sums_ptr + size + at, low, mask=inside)
    if step_ptr is not None:
        step_at = token_at(step_ptr, b, h, t, step_stride_b, step_stride_t, step_stride_h)
        step = tl.log2(tl.load(step_at, mask=there, other=0.0).to(tl.float32))
        step = tl.maximum(step, LEAST_STEP, propagate_nan=tl.PropagateNan.ALL)
        tl.store(sums_ptr + PARTS * size + at, step, mask=inside)
    if skip_ptr is not None:
        skip_at = token_at(skip_ptr, b, h, t, skip_stride_b, skip_stride_t, skip_stride_h)
        skip = tl.load(skip_at, mask=there, other=0.0)
        place: tl.constexpr = PARTS if step_ptr is None else PARTS + 1
        tl.store(sums_ptr + place * size + at, skip.to(tl.float32), mask=inside)


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


@triton.jit
def chunk_steps(sums_ptr, at, size, C: tl.constexpr, EXACT: tl.constexpr, STEP: tl.constexpr):
    """Return the base-2 logarithms of a chunk's steps [C], zeros without steps."""
    if STEP:
        PARTS: tl.constexpr = 2 if EXACT else 1
        steps = tl.load(sums_ptr + PARTS * size + at + tl.arange(0, C))
    else:
        steps = tl.zeros([C], tl.float32)
    return steps


@triton.jit
def chunk_skips(sums_ptr, at, size, C: tl.constexpr, EXACT: tl.constexpr, STEP: tl.constexpr):
    """Return a chunk's skips [C], which must be there."""
    PARTS: tl.constexpr = (2 if EXACT else 1) + (1 if STEP else 0)
    return tl.load(sums_ptr + PARTS * size + at + tl.arange(0, C))


@triton.jit
def chunk_weights(
    sums_ptr,
    at,
    size,
    log2_scale,
    C: tl.constexpr,
    EXACT: tl.constexpr,
    STEP: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Return a chunk's numbers and what its rows are weighted by.

    (sums up to each token [C] and the total, both in two parts, steps [C], weights of the rows that read
    the state [C], weights of the rows that it is made of [C]). Queries' weights have the scale in them,
    unless it is None.
    """
    high, low = chunk_until(sums_ptr, at, size, C, EXACT)
    total_high, total_low = chunk_total(sums_ptr, at, size, C, EXACT)
    steps = chunk_steps(sums_ptr, at, size, C, EXACT, STEP)
    until = high
    after = total_high - high
    if EXACT:
        until += low
        after += total_low - low
    until = power(until)
    after = power(after + steps)
    if log2_scale is not None:
        until *= tl.exp2(log2_scale)
    if REVERSE:
        reading = after
        added = until
    else:
        reading = until
        added = after
    return high, low, total_high, total_low, steps, reading, added


@triton.jit
def pair_weights(high, low, steps, log2_scale, REVERSE: tl.constexpr, EXACT: tl.constexpr):
    """Return weights [C, C], later tokens in columns forwards and in rows in reverse.

    Where the other token is the later one they are anything, to be dropped with the pairs.
    """
    if EXACT:
        exponent = (high[None, :] - high[:, None]) + (low[None, :] - low[:, None])
        if REVERSE:
            exponent = steps[None, :] - exponent
        else:
            exponent += steps[:, None]
        weights = tl.exp2(exponent + log2_scale)
    else:
        raised = high + log2_scale
        earlier = high - steps
        if REVERSE:
            weights = power(raised[:, None] - earlier[None, :])
        else:
            weights = power(raised[None, :] - earlier[:, None])
    return weights
