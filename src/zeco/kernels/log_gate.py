"""Log decays from logits: forward and backward, one launch each.

    g = log sigmoid(x) / τ,    dx = dg · sigmoid(-x) / τ

Contiguous tensors of one size; g and dg in fp32. Nothing but x is kept. No autograd.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeco.kernels.launch import launch

BLOCK = 4096


@triton.jit
def log_gate_fwd_kernel(x_ptr, g_ptr, size, factor, BLOCK: tl.constexpr):
    """Write a block of log decays."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, places < size, 0.0).to(tl.float32)
    # No exponential of a positive number.
    g = tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))
    tl.store(g_ptr + places, g * factor, places < size)


@triton.jit
def log_gate_bwd_kernel(x_ptr, dg_ptr, dx_ptr, size, factor, BLOCK: tl.constexpr):
    """Write a block of the logits' gradient."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, places < size, 0.0).to(tl.float32)
    dx = tl.load(dg_ptr + places, places < size, 0.0) * tl.sigmoid(-x) * factor
    tl.store(dx_ptr + places, dx.to(dx_ptr.dtype.element_ty), places < size)


def log_gate_fwd(x: Tensor, *, normalizer: float) -> Tensor:
    """Return g in fp32, shaped as x."""
    g = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    blocks = -(-x.numel() // BLOCK)
    launch(log_gate_fwd_kernel, blocks, x, g, x.numel(), 1.0 / normalizer, num_warps=8, BLOCK=BLOCK)
    return g


def log_gate_bwd(x: Tensor, dg: Tensor, *, normalizer: float) -> Tensor:
    """Return dx in x's dtype."""
    dx = torch.empty_like(x)
    blocks = -(-x.numel() // BLOCK)
    launch(
        log_gate_bwd_kernel,
        blocks,
        x,
        dg,
        dx,
        x.numel(),
        1.0 / normalizer,
        num_warps=8,
        BLOCK=BLOCK,
    )
    return dx
