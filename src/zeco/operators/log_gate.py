"""Log decays from a layer's logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from zeco.core.shapes import state_dtype
from zeco.operators.backends import choose_backend


class _LogGateFunction(torch.autograd.Function):
    """Log decays by a Triton kernel; what is kept are they, as operators keep them too."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, normalizer: float) -> Tensor:
        from zeco.kernels.layers.log_gate import log_gate_fwd

        g = log_gate_fwd(logits.contiguous(), normalizer=normalizer)
        ctx.save_for_backward(g)
        ctx.dtype, ctx.normalizer = logits.dtype, normalizer
        return g

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_g: Tensor) -> tuple[Tensor | None, ...]:
        from zeco.kernels.layers.log_gate import log_gate_bwd

        (g,) = ctx.saved_tensors
        return log_gate_bwd(g, d_g.contiguous(), ctx.dtype, normalizer=ctx.normalizer), None


def log_sigmoid_gate(logits: Tensor, *, normalizer: float = 1.0) -> Tensor:
    """Return ``log sigmoid(x) / τ`` in fp32 (fp64 for fp64 logits): log decays, all <= 0.

    Logits in bf16 would otherwise round decays near 1 to no decay at all. On CUDA it is a kernel
    forwards and one backwards, which keeps the decays only.

    Args:
        logits: x, of any shape.
        normalizer: τ; larger forgets slower.

    >>> log_sigmoid_gate(torch.zeros(1, dtype=torch.bfloat16), normalizer=2.0)
    tensor([-0.3466])
    """
    narrow = logits.dtype != torch.float64 and logits.numel() > 0
    offered = ("torch", "triton") if narrow else ("torch",)
    if choose_backend("log_sigmoid_gate", "auto", logits.device, offered) == "triton":
        return _LogGateFunction.apply(logits, normalizer)
    return F.logsigmoid(logits.to(state_dtype(logits))) / normalizer
