"""A short depthwise convolution over rows with its activation, which layers put before operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from zeco.operators.backends import choose_backend


class _ConvolutionFunction(torch.autograd.Function):
    """The convolution on Triton kernels; of all that is computed, only the rows are kept."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        from zeco.kernels.short_convolution import convolution_fwd

        rows = rows if rows.stride(2) == 1 else rows.contiguous()
        weight = weight.contiguous()
        ctx.save_for_backward(rows, weight, bias)
        ctx.silu = silu
        return convolution_fwd(rows, weight, bias, silu=silu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        from zeco.kernels.short_convolution import convolution_bwd

        rows, weight, bias = ctx.saved_tensors
        d_y = d_y if d_y.stride(2) == 1 else d_y.contiguous()
        return *convolution_bwd(rows, weight, bias, d_y, silu=ctx.silu), None


def convolve_rows(rows: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """Return ``y[t] = φ(Σ_i w[:, i] x[t + i] + b)``, [B, R - W + 1, D] (none for fewer than W rows).

    On CUDA it is a kernel forwards and one backwards, which keeps the rows only.

    Args:
        rows: x [B, R, D].
        weight: w [D, W].
        bias: b [D], or None.
        silu: whether φ is the SiLU; else it is the identity.
    """
    W = weight.shape[1]
    count = max(0, rows.shape[1] - (W - 1))
    # There are no kernels for double precision.
    wide = torch.float64 in (rows.dtype, weight.dtype)
    offered = ("torch",) if wide or rows.numel() == 0 or count == 0 else ("torch", "triton")
    if choose_backend("convolve_rows", "auto", rows.device, offered) == "triton":
        return _ConvolutionFunction.apply(rows, weight, bias, silu)
    x = rows.mT
    if count == 0:
        # torch refuses fewer rows than the kernel has. The graph is still needed: for the halo's
        # backward pass, which other ranks wait for, and zero gradients.
        x = F.pad(x, (0, W - rows.shape[1]))
    y = F.conv1d(x, weight[:, None], bias, groups=weight.shape[0])[..., :count].mT
    return F.silu(y) if silu else y
