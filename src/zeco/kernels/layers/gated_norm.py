"""The norm of heads' outputs times their gate: forward and backward, one launch each.

    x̂ = o · rsqrt(mean(o²) + eps),    y = x̂ ⊙ w ⊙ φ(r)        φ(r) = r or r · sigmoid(r)

o, r, y [N, V] with channels side by side, w [V]; arithmetic in fp32. Nothing but o and r is kept:
backward makes the rest again. No autograd.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeco.kernels.launch import launch

BLOCK = 4096  # numbers that a program of 4 warps holds of each tensor
RUN = 8  # blocks of rows that a program of the backward pass sums dw over


@triton.jit
def load_block(ptr, rows, channels, mask, V):
    """Load [ROWS, BV] in fp32, zeros outside."""
    return tl.load(ptr + rows[:, None] * V + channels[None, :], mask, 0.0).to(tl.float32)


@triton.jit
def norm_fwd_kernel(
    o_ptr,
    r_ptr,
    w_ptr,
    y_ptr,
    N,
    eps,
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Write a block of rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, BV)
    mask = (rows < N)[:, None] & (channels < V)[None, :]
    o = load_block(o_ptr, rows, channels, mask, V)
    r = load_block(r_ptr, rows, channels, mask, V)
    w = tl.load(w_ptr + channels, channels < V, 0.0).to(tl.float32)
    gate = r * tl.sigmoid(r) if SILU else r
    y = o * tl.rsqrt(tl.sum(o * o, 1) / V + eps)[:, None] * w[None, :] * gate
    places = rows[:, None] * V + channels[None, :]
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def norm_bwd_kernel(
    o_ptr,
    r_ptr,
    w_ptr,
    dy_ptr,
    do_ptr,
    dr_ptr,
    partial_ptr,
    N,
    eps,
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    SILU: tl.constexpr,
):
    """Write do and dr of a run of blocks of rows, and the run's part of dw."""
    pid = tl.program_id(0)
    channels = tl.arange(0, BV)
    w = tl.load(w_ptr + channels, channels < V, 0.0).to(tl.float32)
    dw = tl.zeros([ROWS, BV], tl.float32)
    for i in range(RUN):
        rows = (pid.to(tl.int64) * RUN + i) * ROWS + tl.arange(0, ROWS)
        mask = (rows < N)[:, None] & (channels < V)[None, :]
        o = load_block(o_ptr, rows, channels, mask, V)
        r = load_block(r_ptr, rows, channels, mask, V)
        dy = load_block(dy_ptr, rows, channels, mask, V)
        scale = tl.rsqrt(tl.sum(o * o, 1) / V + eps)[:, None]
        x = o * scale
        if SILU:
            s = tl.sigmoid(r)
            gate = r * s
            slope = s * (1 + r * (1 - s))
        else:
            gate = r
            slope = tl.full([ROWS, BV], 1.0, tl.float32)
        dr = dy * x * w[None, :] * slope
        dn = dy * gate
        dw += dn * x
        dx = dn * w[None, :]
        do = scale * (dx - x * (tl.sum(dx * x, 1) / V)[:, None])
        places = rows[:, None] * V + channels[None, :]
        tl.store(do_ptr + places, do.to(do_ptr.dtype.element_ty), mask)
        tl.store(dr_ptr + places, dr.to(dr_ptr.dtype.element_ty), mask)
    tl.store(partial_ptr + pid * V + channels, tl.sum(dw, 0), channels < V)


def _sizes(V: int) -> tuple[int, int]:
    """Return channels and rows of a block."""
    width = 1 << (V - 1).bit_length()
    return width, max(1, BLOCK // width)


def norm_fwd(o: Tensor, r: Tensor, w: Tensor, *, eps: float, silu: bool) -> Tensor:
    """Return y [N, V] in the wider dtype of o and r, both contiguous."""
    N, V = o.shape
    width, rows = _sizes(V)
    y = torch.empty(N, V, dtype=torch.promote_types(o.dtype, r.dtype), device=o.device)
    launch(
        norm_fwd_kernel, -(-N // rows), o, r, w, y, N, eps,
        num_warps=4, V=V, BV=width, ROWS=rows, SILU=silu,
    )  # fmt: skip
    return y


def norm_bwd(
    o: Tensor, r: Tensor, w: Tensor, dy: Tensor, *, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of o, r and w; all of o, r and dy are contiguous."""
    N, V = o.shape
    width, rows = _sizes(V)
    rows = max(1, rows // 2)  # more tensors are held than forwards
    do, dr = torch.empty_like(o), torch.empty_like(r)
    programs = -(-N // (rows * RUN))
    parts = torch.empty(programs, V, dtype=torch.float32, device=o.device)
    launch(
        norm_bwd_kernel, programs, o, r, w, dy, do, dr, parts, N, eps,
        num_warps=4, V=V, BV=width, ROWS=rows, RUN=RUN, SILU=silu,
    )  # fmt: skip
    return do, dr, parts.sum(0).to(w.dtype)
