"""The RMS norm of heads' outputs times their gate, which layers put behind operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from zeco.operators.backends import choose_backend

_MAX_WIDTH = 4096
"""The widest head that the kernels take: a row must lie in one block."""


class _GatedNormFunction(torch.autograd.Function):
    """The gated norm on Triton kernels; of all that is computed, only outputs and gates are kept."""

    @staticmethod
    def forward(
        ctx: Any, o: Tensor, gate: Tensor, weight: Tensor, eps: float, silu: bool
    ) -> Tensor:
        from zeco.kernels.layers.gated_norm import norm_fwd

        shape = o.shape
        o, gate = (x.reshape(-1, shape[-1]).contiguous() for x in (o, gate))
        ctx.save_for_backward(o, gate, weight)
        ctx.eps, ctx.silu = eps, silu
        return norm_fwd(o, gate, weight, eps=eps, silu=silu).view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        from zeco.kernels.layers.gated_norm import norm_bwd

        o, gate, weight = ctx.saved_tensors
        rows = d_y.reshape(o.shape).contiguous()
        d_o, d_gate, d_weight = norm_bwd(o, gate, weight, rows, eps=ctx.eps, silu=ctx.silu)
        return d_o.view(d_y.shape), d_gate.view(d_y.shape), d_weight, None, None


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, *, eps: float, silu: bool) -> Tensor:
    """Return ``o / sqrt(mean(o²) + eps) ⊙ w ⊙ φ(r)``, the mean over the last dim.

    On CUDA it is a kernel forwards and one backwards, which keeps outputs and gates only.

    Args:
        o: [..., V].
        gate: r, of that shape.
        weight: w [V].
        eps: added to the mean square.
        silu: whether φ is the SiLU; else it is the identity.
    """
    # There are no kernels for double precision, nor for rows longer than a block.
    wide = torch.float64 in (o.dtype, gate.dtype, weight.dtype)
    narrow = not wide and o.numel() > 0 and o.shape[-1] <= _MAX_WIDTH
    offered = ("torch", "triton") if narrow else ("torch",)
    if choose_backend("gated_rms_norm", "auto", o.device, offered) == "triton":
        return _GatedNormFunction.apply(o, gate, weight, eps, silu)
    return F.rms_norm(o, weight.shape, weight, eps) * (F.silu(gate) if silu else gate)
