"""The multi-scale retention layer of RetNet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zeco.core.errors import ArgumentError
from zeco.layers.mixer import Call, HeadProjections, Mixer, head_dim
from zeco.layers.norms import GatedRMSNorm
from zeco.layers.rotary import rotate
from zeco.operators.retention import retention


class MultiScaleRetention(Mixer):
    """Retention with rotary positions, heads that forget at fixed rates, and a swish gate.

        S_t = γ_h S_{t-1} + k_t v_tᵀ        γ_h = 1 - 2^(-5-h)
        y_t = (norm(o_t) ⊙ silu(W_G x_t)) W_O

    Args:
        width: D.
        num_heads: H.
        expand_v: total value dim as a multiple of D.
        rotary_base: see `zeco.layers.rotary.rotate`.
        conv_width: kernel width of a short convolution on q, k and v; 0 for none.
        norm_eps: of the heads' norm.

    Source: Sun et al., RetNet, arXiv:2307.08621, equations 5 to 8. Positions are xPos with its
    decay left to γ, which is a rotation. Differences: an RMS norm a head with weights in place of
    the group norm; the optional convolution.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        expand_v: float = 2.0,
        rotary_base: float = 10_000.0,
        conv_width: int = 0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(width)
        K = head_dim("MultiScaleRetention", "width", width, num_heads)
        V = head_dim("MultiScaleRetention", "width * expand_v", width * expand_v, num_heads)
        if K % 2:
            raise ArgumentError(
                f"MultiScaleRetention: width / num_heads = {K} must be even for rotary positions; "
                f"use a width that is a multiple of {2 * num_heads}"
            )
        self.rotary_base = rotary_base
        self.heads = HeadProjections(
            width, ((num_heads, K), (num_heads, K), (num_heads, V)), conv_width=conv_width
        )
        self.gate = nn.Linear(width, num_heads * V, bias=False)
        self.norm = GatedRMSNorm(V, eps=norm_eps)
        self.out = nn.Linear(num_heads * V, width, bias=False)

    def mix(self, x: Tensor, call: Call) -> Tensor:
        q, k, v = self.heads(x, call)
        both = rotate(torch.cat([q, k], 2), call.position_ids(x), base=self.rotary_base)
        q, k = both.chunk(2, 2)
        gate = call.later(lambda: self.gate(x), x.device)
        o, final = retention(q, k, v, **call.operator_keywords)
        call.keep(final)
        return self.out(self.norm(o, gate.result().view_as(o)).flatten(2))
