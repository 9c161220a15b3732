"""Log decays from logits: forward and backward, one launch each.

    g = log sigmoid(x) / τ,    dx = dg · sigmoid(-x) / τ = dg · (1 - exp(τ g)) / τ

Contiguous tensors of one size; g and dg in fp32. Backward needs g alone, which whoever uses it keeps
anyway. No autograd.
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
    # No exponential of a positive number; where 1 + e would round e off, the logarithm's series.
    e = tl.exp(-tl.abs(x))
    series = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * (0.25 - e * 0.2))))
    tail = tl.where(e < 0.06, series, tl.log(1.0 + e))
    tl.store(g_ptr + places, (tl.minimum(x, 0.0) - tail) * factor, places < size)


@triton.jit
def log_gate_bwd_kernel(g_ptr, dg_ptr, dx_ptr, size, normalizer, BLOCK: tl.constexpr):
    """Write a block of the logits' gradient."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(g_ptr + places, places < size, 0.0) * normalizer
    # 1 - exp(y), where its digits would cancel by the series.
    slope = tl.where(y > -0.03, -y * (1.0 + y * (0.5 + y * (1.0 / 6.0))), 1.0 - tl.exp(y))
    dx = tl.load(dg_ptr + places, places < size, 0.0) * slope / normalizer
    tl.store(dx_ptr + places, dx.to(dx_ptr.dtype.element_ty), places < size)


def log_gate_fwd(x: Tensor, *, normalizer: float) -> Tensor:
    """Return g in fp32, shaped as x."""
    g = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    size, blocks = x.numel(), -(-x.numel() // BLOCK)
    launch(log_gate_fwd_kernel, blocks, x, g, size, 1.0 / normalizer, num_warps=8, BLOCK=BLOCK)
    return g


def log_gate_bwd(g: Tensor, dg: Tensor, dtype: torch.dtype, *, normalizer: float) -> Tensor:
    """Return dx in a dtype."""
    dx = torch.empty(g.shape, dtype=dtype, device=g.device)
    size, blocks = g.numel(), -(-g.numel() // BLOCK)
    launch(
        log_gate_bwd_kernel, blocks, g, dg, dx, size, float(normalizer), num_warps=8, BLOCK=BLOCK
    )
    return dx
