"""Norms of the heads' outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeco.layers.convolution import Activation
from zeco.operators.gated_norm import gated_rms_norm


class GatedRMSNorm(nn.Module):
    """Normalise every head's output by its root mean square and gate it: ``RMSNorm(o) ⊙ φ(r)``.

    Args:
        head_dim: V; its weights are shared by the heads.
        eps: added to the mean square.
        activation: φ: ``"silu"``, or ``"none"`` for gates that are activated already.
    """

    def __init__(
        self, head_dim: int, *, eps: float = 1e-5, activation: Activation = "silu"
    ) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(head_dim, eps=eps)
        self.eps = eps
        self.activation = activation

    def forward(self, o: Tensor, gate: Tensor) -> Tensor:
        """Return [B, T, H, V] from outputs and gate logits of that shape."""
        silu = self.activation == "silu"
        return gated_rms_norm(o, gate, self.norm.weight, eps=self.eps, silu=silu)


class HeadLayerNorm(nn.Module):
    """Layer norm of every head by itself, with weights and biases for each: RWKV's group norm.

    Args:
        num_heads: H.
        head_dim: V.
        eps: added to the variance.
    """

    def __init__(self, num_heads: int, head_dim: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.shape = (num_heads, head_dim)
        self.weight = nn.Parameter(torch.ones(num_heads * head_dim))
        self.bias = nn.Parameter(torch.zeros(num_heads * head_dim))

    def forward(self, o: Tensor) -> Tensor:
        """Return [B, T, H, V]."""
        o = F.layer_norm(o, self.shape[1:], eps=self.eps)
        return o * self.weight.view(self.shape) + self.bias.view(self.shape)

    def initialize(self) -> None:
        """Set the weights to 1 and the biases to 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
