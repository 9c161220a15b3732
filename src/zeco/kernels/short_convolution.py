"""Short depthwise convolutions over rows, activation included: one launch forwards, two backwards.

    z[t] = Σ_i w[:, i] x[t + i] + b,    y[t] = z[t] or z[t] · sigmoid(z[t])        i from 0 to W-1

x [B, R, D] with channels side by side, w [D, W], b [D], y [B, R-W+1, D]; arithmetic in fp32. Nothing
but x is kept: backward makes z again. No autograd.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeco.kernels.launch import launch

ROWS, CHANNELS = 64, 128
WARPS = 8
# The weights' gradient: a warp's block, and blocks of rows that it sums over.
COLUMN_ROWS, COLUMN_CHANNELS = 8, 256
RUN = 16


@triton.jit
def load_rows(x_ptr, first, rows, channels, num_rows, D, stride_r):
    """Load rows first + rows of a sequence at x_ptr in fp32 [ROWS, CHANNELS], zeros outside of it."""
    at = first + rows
    mask = ((at >= 0) & (at < num_rows))[:, None] & (channels < D)[None, :]
    start_ptr = x_ptr + tl.cast(first, tl.int64) * stride_r
    # Within a block 32 bits do.
    return tl.load(start_ptr + (rows[:, None] * stride_r + channels[None, :]), mask, 0.0).to(
        tl.float32
    )


@triton.jit
def store_rows(y_ptr, y, first, rows, channels, num_rows, D):
    """Store [ROWS, CHANNELS] as rows first + rows of a contiguous sequence at y_ptr."""
    mask = (first + rows < num_rows)[:, None] & (channels < D)[None, :]
    start_ptr = y_ptr + tl.cast(first, tl.int64) * D
    places = rows[:, None] * D + channels[None, :]
    tl.store(start_ptr + places, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def convolve(x_ptr, w_ptr, b_ptr, first, rows, channels, R, D, stride_r, W: tl.constexpr):
    """Return z [ROWS, CHANNELS] of rows first + rows."""
    inside = channels < D
    w = tl.load(w_ptr + channels * W, inside, 0.0).to(tl.float32)
    z = w[None, :] * load_rows(x_ptr, first, rows, channels, R, D, stride_r)
    for i in tl.static_range(1, W):
        w = tl.load(w_ptr + channels * W + i, inside, 0.0).to(tl.float32)
        z += w[None, :] * load_rows(x_ptr, first + i, rows, channels, R, D, stride_r)
    if b_ptr is not None:
        z += tl.load(b_ptr + channels, inside, 0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def find_block(row_blocks, channel_blocks, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Return where this program works: (block of rows, sequence, first row, its channels)."""
    pid = tl.program_id(0)
    block = pid // channel_blocks
    channels = (pid % channel_blocks) * CHANNELS + tl.arange(0, CHANNELS)
    return block, tl.cast(block // row_blocks, tl.int64), block % row_blocks * ROWS, channels


@triton.jit
def convolution_fwd_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    R,
    D,
    row_blocks,
    channel_blocks,
    stride_b,
    stride_r,
    W: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write the outputs of one block of rows and channels."""
    _, batch, first, channels = find_block(row_blocks, channel_blocks, ROWS, CHANNELS)
    rows = tl.arange(0, ROWS)
    x_ptr += batch * stride_b
    z = convolve(x_ptr, w_ptr, b_ptr, first, rows, channels, R, D, stride_r, W)
    if SILU:
        z = z * tl.sigmoid(z)
    T = R - W + 1
    store_rows(y_ptr + batch * T * D, z, first, rows, channels, T, D)


@triton.jit
def weight_bwd_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    dy_ptr,
    dz_ptr,
    partial_ptr,
    R,
    D,
    runs,
    channel_blocks,
    stride_b,
    stride_r,
    dy_stride_b,
    dy_stride_r,
    W: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    RUN: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Write the part of dw and db of a run of rows, which lies in [B runs, W + 1, D], db last.

    With the activation also dz, which differs from dy then. One warp holds whole columns, so that
    sums over rows need no other thread.
    """
    run, batch, start, channels = find_block(runs, channel_blocks, ROWS * RUN, CHANNELS)
    rows = tl.arange(0, ROWS)
    taps = tl.arange(0, TAPS)[:, None]
    T = R - W + 1
    x_ptr += batch * stride_b
    dw = tl.zeros([TAPS, CHANNELS], tl.float32)
    for n in range(RUN):
        first = start + n * ROWS
        dz = load_rows(dy_ptr + batch * dy_stride_b, first, rows, channels, T, D, dy_stride_r)
        if SILU:
            z = convolve(x_ptr, w_ptr, b_ptr, first, rows, channels, R, D, stride_r, W)
            s = tl.sigmoid(z)
            dz *= s * (1 + z * (1 - s))
            store_rows(dz_ptr + batch * T * D, dz, first, rows, channels, T, D)
        for i in tl.static_range(W):
            x = load_rows(x_ptr, first + i, rows, channels, R, D, stride_r)
            dw += tl.where(taps == i, tl.sum(dz * x, 0)[None, :], 0.0)
        dw += tl.where(taps == W, tl.sum(dz, 0)[None, :], 0.0)
    part_ptr = partial_ptr + tl.cast(run, tl.int64) * (W + 1) * D
    tl.store(part_ptr + taps * D + channels[None, :], dw, (taps <= W) & (channels < D)[None, :])


@triton.jit
def rows_bwd_kernel(
    w_ptr,
    dz_ptr,
    dx_ptr,
    R,
    D,
    row_blocks,
    channel_blocks,
    stride_b,
    stride_r,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write dx of one block of rows and channels: row r of x went into z[r - i] with w[:, i]."""
    _, batch, first, channels = find_block(row_blocks, channel_blocks, ROWS, CHANNELS)
    rows = tl.arange(0, ROWS)
    dz_ptr += batch * stride_b
    dx = tl.zeros([ROWS, CHANNELS], tl.float32)
    for i in tl.static_range(W):
        w = tl.load(w_ptr + channels * W + i, channels < D, 0.0).to(tl.float32)
        dx += w[None, :] * load_rows(dz_ptr, first - i, rows, channels, R - W + 1, D, stride_r)
    store_rows(dx_ptr + batch * R * D, dx, first, rows, channels, R, D)


def convolution_fwd(x: Tensor, w: Tensor, b: Tensor | None, *, silu: bool) -> Tensor:
    """Return y [B, R-W+1, D], at least one row, in x's dtype."""
    B, R, D = x.shape
    W = w.shape[1]
    y = torch.empty(B, R - W + 1, D, dtype=x.dtype, device=x.device)
    row_blocks, channel_blocks = -(-y.shape[1] // ROWS), -(-D // CHANNELS)
    launch(
        convolution_fwd_kernel, B * row_blocks * channel_blocks,
        x, w, b, y, R, D, row_blocks, channel_blocks, x.stride(0), x.stride(1),
        num_warps=WARPS, W=W, SILU=silu, ROWS=ROWS, CHANNELS=CHANNELS,
    )  # fmt: skip
    return y


def convolution_bwd(
    x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor, *, silu: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, w and b; dy has channels side by side.

    Between the two launches the gradient of z is kept in x's dtype, as torch keeps it between two
    functions.
    """
    B, R, D = x.shape
    W = w.shape[1]
    T = R - W + 1
    dx = torch.empty(B, R, D, dtype=x.dtype, device=x.device)
    dz = torch.empty(B, T, D, dtype=x.dtype, device=x.device) if silu else dy
    runs, channel_blocks = -(-T // (COLUMN_ROWS * RUN)), -(-D // COLUMN_CHANNELS)
    parts = torch.empty(B * runs, W + 1, D, dtype=torch.float32, device=x.device)
    launch(
        weight_bwd_kernel, B * runs * channel_blocks,
        x, w, b, dy, dz, parts, R, D, runs, channel_blocks, x.stride(0), x.stride(1),
        dy.stride(0), dy.stride(1),
        num_warps=1, W=W, SILU=silu, ROWS=COLUMN_ROWS, CHANNELS=COLUMN_CHANNELS, RUN=RUN,
        TAPS=1 << W.bit_length(),
    )  # fmt: skip
    blocks, channel_blocks = -(-R // ROWS), -(-D // CHANNELS)
    launch(
        rows_bwd_kernel, B * blocks * channel_blocks,
        w, dz, dx, R, D, blocks, channel_blocks, dz.stride(0), dz.stride(1),
        num_warps=WARPS, W=W, ROWS=ROWS, CHANNELS=CHANNELS,
    )  # fmt: skip
    total = parts.sum(0)
    return dx, total[:W].mT.to(w.dtype), None if b is None else total[W].to(b.dtype)
