"""Short depthwise convolutions over rows, activation included: one launch forwards, one backwards.

    z[t] = Σ_i w[:, i] x[t + i] + b,    y[t] = z[t] or z[t] · sigmoid(z[t])        i from 0 to W-1

Rows x [B, W-1+T, D] come as two tensors, those before the tokens, [B, W-1, D], and the tokens' own,
[B, T, D]: so nobody has to copy them together. Channels lie side by side; w [D, W], b [D], y [B, T, D];
arithmetic in fp32. Nothing but x is kept: backward makes z again. No autograd.

A warp walks down a run of rows with its channels' last W rows in registers, so every row is read once;
its sums over rows need no other thread.
"""
# ruff: noqa: RUF005  (Triton knows no unpacking)
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeco.kernels.launch import launch

CHANNELS = 128  # of a warp
# Rows of a step, whose loads are in flight together, and of a run, a multiple of them.
FORWARD_ROWS, FORWARD_RUN = 8, 64
BACKWARD_ROWS, BACKWARD_RUN = 4, 128


@triton.jit
def row_at(before_ptr, x_ptr, row, before_stride, x_stride, REACH: tl.constexpr):
    """Return the address of a row, the first REACH of which lie in a tensor of their own."""
    before = before_ptr + tl.cast(row, tl.int64) * before_stride
    return tl.where(row < REACH, before, x_ptr + tl.cast(row - REACH, tl.int64) * x_stride)


@triton.jit
def load_row(row_ptr, inside, channels, D):
    """Load a row's channels in fp32; zeros outside."""
    return tl.load(row_ptr + channels, inside & (channels < D), 0.0).to(tl.float32)


@triton.jit
def load_taps(w_ptr, b_ptr, channels, D, W: tl.constexpr):
    """Return w[:, 0], ..., w[:, W-1] and b, zeros where it is None."""
    taps = ()
    for i in tl.static_range(W):
        taps = taps + (load_row(w_ptr + i, True, channels * W, D * W),)
    if b_ptr is not None:
        b = load_row(b_ptr, True, channels, D)
    else:
        b = tl.zeros_like(channels).to(tl.float32)
    return taps, b


@triton.jit
def convolve(rows, taps, b, FIRST: tl.constexpr, W: tl.constexpr):
    """Return z of the rows from FIRST on."""
    z = b
    for i in tl.static_range(W):
        z += taps[i] * rows[FIRST + i]
    return z


@triton.jit
def silu_slope(z):
    """Return the derivative of z · sigmoid(z)."""
    s = tl.sigmoid(z)
    return s + z * (s - s * s)


@triton.jit
def find_run(runs, channel_blocks, RUN: tl.constexpr, CHANNELS: tl.constexpr):
    """Return where this program works: (run of rows, sequence, first row, its channels)."""
    pid = tl.program_id(0)
    run = pid // channel_blocks
    channels = (pid % channel_blocks) * CHANNELS + tl.arange(0, CHANNELS)
    return run, tl.cast(run // runs, tl.int64), run % runs * RUN, channels


@triton.jit
def convolution_fwd_kernel(
    before_ptr,
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    T,
    D,
    runs,
    channel_blocks,
    before_stride_b,
    before_stride_r,
    x_stride_b,
    x_stride_r,
    W: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Write the outputs of a run."""
    _, batch, start, channels = find_run(runs, channel_blocks, RUN, CHANNELS)
    REACH: tl.constexpr = W - 1
    before_ptr += batch * before_stride_b
    x_ptr += batch * x_stride_b
    y_ptr += batch * T * D
    taps, b = load_taps(w_ptr, b_ptr, channels, D, W)
    rows = ()
    for i in tl.static_range(REACH):
        at = row_at(before_ptr, x_ptr, start + i, before_stride_r, x_stride_r, REACH)
        rows = rows + (load_row(at, True, channels, D),)
    for first in tl.range(start, tl.minimum(start + RUN, T), ROWS):
        for i in tl.static_range(ROWS):
            # Of the rows that follow a token none lies before the first.
            at = x_ptr + tl.cast(first + i, tl.int64) * x_stride_r
            rows = rows + (load_row(at, first + i < T, channels, D),)
        for i in tl.static_range(ROWS):
            z = convolve(rows, taps, b, i, W)
            if SILU:
                z = z * tl.sigmoid(z)
            y_row_ptr = y_ptr + tl.cast(first + i, tl.int64) * D
            inside = (first + i < T) & (channels < D)
            tl.store(y_row_ptr + channels, z.to(y_ptr.dtype.element_ty), inside)
        rows = rows[ROWS:]


@triton.jit
def convolution_bwd_kernel(
    before_ptr,
    x_ptr,
    w_ptr,
    b_ptr,
    dy_ptr,
    d_before_ptr,
    dx_ptr,
    partial_ptr,
    T,
    D,
    width,
    runs,
    channel_blocks,
    before_stride_b,
    before_stride_r,
    x_stride_b,
    x_stride_r,
    dy_stride_b,
    dy_stride_r,
    W: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Write the gradient of a run of rows, and its part of dw and db, [B runs, W + 1, D], db last.

    Row r went into z[r - i] with w[:, i], so a run makes dz of the REACH rows before it too. What is
    written are D channels of a tensor with ``width`` of them.
    """
    run, batch, start, channels = find_run(runs, channel_blocks, RUN, CHANNELS)
    REACH: tl.constexpr = W - 1
    before_ptr += batch * before_stride_b
    x_ptr += batch * x_stride_b
    dy_ptr += batch * dy_stride_b
    d_before_ptr += batch * REACH * width
    dx_ptr += batch * T * width
    taps, b = load_taps(w_ptr, b_ptr, channels, D, W)
    rows = ()
    for i in tl.static_range(2 * REACH):
        r = start - REACH + i
        at = row_at(before_ptr, x_ptr, r, before_stride_r, x_stride_r, REACH)
        rows = rows + (load_row(at, (r >= 0) & (r < T + REACH), channels, D),)
    dz_rows = ()
    for i in tl.static_range(REACH):
        t = start - REACH + i
        dz = load_row(dy_ptr + tl.cast(t, tl.int64) * dy_stride_r, (t >= 0) & (t < T), channels, D)
        if SILU:
            dz *= silu_slope(convolve(rows, taps, b, i, W))
        dz_rows = dz_rows + (dz,)
    rows = rows[REACH:]
    sums = ()
    for _ in tl.static_range(W + 1):
        sums = sums + (tl.zeros_like(b),)
    for first in tl.range(start, tl.minimum(start + RUN, T + REACH), ROWS):
        for i in tl.static_range(ROWS):
            at = x_ptr + tl.cast(first + i, tl.int64) * x_stride_r
            rows = rows + (load_row(at, first + i < T, channels, D),)
        for i in tl.static_range(ROWS):
            at = dy_ptr + tl.cast(first + i, tl.int64) * dy_stride_r
            dz_rows = dz_rows + (load_row(at, first + i < T, channels, D),)
        done = dz_rows[:REACH]
        for i in tl.static_range(ROWS):
            dz = dz_rows[REACH + i]
            if SILU:
                dz *= silu_slope(convolve(rows, taps, b, i, W))
            done = done + (dz,)
            added = ()
            for j in tl.static_range(W):
                added = added + (sums[j] + dz * rows[i + j],)
            sums = added + (sums[W] + dz,)
            dx = taps[0] * dz
            for j in tl.static_range(1, W):
                dx += taps[j] * done[REACH + i - j]
            at = row_at(d_before_ptr, dx_ptr, first + i, width, width, REACH)
            inside = (first + i < T + REACH) & (channels < D)
            tl.store(at + channels, dx.to(dx_ptr.dtype.element_ty), inside)
        rows = rows[ROWS:]
        dz_rows = done[ROWS:]
    part_ptr = partial_ptr + tl.cast(run, tl.int64) * (W + 1) * width
    for i in tl.static_range(W + 1):
        tl.store(part_ptr + i * width + channels, sums[i], channels < D)


def convolution_fwd(
    before: Tensor, x: Tensor, w: Tensor, b: Tensor | None, *, silu: bool
) -> Tensor:
    """Return y [B, T, D], T at least 1, in x's dtype."""
    B, T, D = x.shape
    y = torch.empty(B, T, D, dtype=x.dtype, device=x.device)
    runs, channel_blocks = -(-T // FORWARD_RUN), -(-D // CHANNELS)
    launch(
        convolution_fwd_kernel, B * runs * channel_blocks,
        before, x, w, b, y, T, D, runs, channel_blocks, before.stride(0), before.stride(1),
        x.stride(0), x.stride(1),
        num_warps=1, W=w.shape[1], SILU=silu, CHANNELS=CHANNELS, ROWS=FORWARD_ROWS,
        RUN=FORWARD_RUN,
    )  # fmt: skip
    return y


def convolution_bwd(
    before: Tensor, x: Tensor, w: Tensor, b: Tensor | None, dy: Sequence[Tensor], *, silu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of the rows before, x, w and b.

    Args:
        before: [B, W-1, D], channels side by side, as everywhere.
        x: [B, T, D].
        w: [D, W].
        b: [D], or None.
        dy: of y's channels, which may lie in several tensors [B, T, ...]: a launch for each.
        silu: whether y is a SiLU.
    """
    B, T, D = x.shape
    W = w.shape[1]
    d_before = torch.empty(B, W - 1, D, dtype=x.dtype, device=x.device)
    dx = torch.empty(B, T, D, dtype=x.dtype, device=x.device)
    runs = -(-(T + W - 1) // BACKWARD_RUN)
    parts = torch.empty(B * runs, W + 1, D, dtype=torch.float32, device=x.device)
    first = 0
    for d in dy:
        count = d.shape[2]
        at = slice(first, first + count)
        first += count
        blocks = -(-count // CHANNELS)
        launch(
            convolution_bwd_kernel, B * runs * blocks,
            before[..., at], x[..., at], w[at], None if b is None else b[at], d,
            d_before[..., at], dx[..., at], parts[..., at], T, count, D, runs, blocks,
            before.stride(0), before.stride(1), x.stride(0), x.stride(1), d.stride(0), d.stride(1),
            num_warps=1, W=W, SILU=silu, CHANNELS=CHANNELS, ROWS=BACKWARD_ROWS, RUN=BACKWARD_RUN,
        )  # fmt: skip
    total = parts.sum(0)
    db = None if b is None else total[W].to(b.dtype)
    return d_before, dx, total[:W].mT.to(w.dtype), db
