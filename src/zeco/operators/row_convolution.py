"""A short depthwise convolution over rows with its activation, which layers put before operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from zeco.operators.backends import choose_backend


class _ConvolutionFunction(torch.autograd.Function):
    """The convolution on Triton kernels; of all that is computed, only the rows are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        before: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        sizes: tuple[int, ...],
    ) -> tuple[Tensor, ...]:
        from zeco.kernels.layers.short_convolution import convolution_fwd

        before, x = (_side_by_side(rows) for rows in (before, x))
        weight = weight.contiguous()
        ctx.save_for_backward(before, x, weight, bias)
        ctx.silu = silu
        return convolution_fwd(before, x, weight, bias, silu=silu).split(sizes, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_y: Tensor) -> tuple[Tensor | None, ...]:
        from zeco.kernels.layers.short_convolution import convolution_bwd

        before, x, weight, bias = ctx.saved_tensors
        d_y = tuple(_side_by_side(d) for d in d_y)
        return *convolution_bwd(before, x, weight, bias, d_y, silu=ctx.silu), None, None


def _side_by_side(x: Tensor) -> Tensor:
    """Return rows [B, R, D] whose channels lie side by side."""
    return x if x.stride(2) == 1 else x.contiguous()


def convolve_rows(
    before: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    silu: bool,
    sizes: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    """Return ``y[t] = φ(Σ_i w[:, i] r[t + i] + b)`` of rows r: those before x, then x.

    On CUDA it is a kernel forwards and one backwards for each part, which keeps the rows only.

    Args:
        before: the rows before the first of x, [B, W - 1, D].
        x: [B, T, D].
        weight: w [D, W].
        bias: b [D], or None.
        silu: whether φ is the SiLU; else it is the identity.
        sizes: channels of each part of y that comes back; None for all in one. The gradients of parts
            needn't be copied together.

    Returns:
        The parts, [B, T, size] each.
    """
    sizes = (x.shape[2],) if sizes is None else tuple(sizes)
    # There are no kernels for double precision.
    wide = torch.float64 in (x.dtype, weight.dtype)
    offered = ("torch",) if wide or x.numel() == 0 else ("torch", "triton")
    if choose_backend("convolve_rows", "auto", x.device, offered) == "triton":
        return _ConvolutionFunction.apply(before, x, weight, bias, silu, sizes)
    rows = torch.cat([before, x], 1).mT
    if x.shape[1] == 0:
        # torch refuses fewer rows than the kernel has. The graph is still needed: for the halo's
        # backward pass, which other ranks wait for, and zero gradients.
        rows = F.pad(rows, (0, 1))
    y = F.conv1d(rows, weight[:, None], bias, groups=weight.shape[0])[..., : x.shape[1]].mT
    return (F.silu(y) if silu else y).split(sizes, 2)
