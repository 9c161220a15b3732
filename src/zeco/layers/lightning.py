"""The lightning attention layer of MiniMax-01."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zeco.core.errors import ArgumentError
from zeco.layers.mixer import Call, HeadProjections, Mixer, head_dim
from zeco.operators.lightning_attention import lightning_attention


class LightningAttention(Mixer):
    """Linear attention whose heads forget at fixed rates, slower the higher the layer.

        S_t = λ_h S_{t-1} + k_t v_tᵀ        λ_h = exp(-2^(-8(h+1)/H) (1 - depth))
        y_t = (sigmoid(W_g x_t) ⊙ norm(o_t)) W_o        q, k and v end in a SiLU

    Args:
        width: D.
        num_heads: H.
        depth: 0 for the first layer of a model, 1 for the last, which hardly forgets.
        conv_width: kernel width of a short convolution on q, k and v; 0 for none.
        norm_eps: of the norm over all channels.

    Source: MiniMax, arXiv:2501.08313, section 2.2.1, and Qin et al., arXiv:2401.04658. Difference:
    the optional convolution.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        depth: float = 0.0,
        conv_width: int = 0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(width)
        if not 0 <= depth <= 1:
            raise ArgumentError(f"LightningAttention: depth is {depth}, but must be from 0 to 1")
        K = head_dim("LightningAttention", "width", width, num_heads)
        self.num_heads = num_heads
        # The last layer still forgets a little, as published.
        self.rate = 1 - depth + 1e-5
        self.heads = HeadProjections(
            width, ((num_heads, K),) * 3, conv_width=conv_width, activation="silu"
        )
        self.gate = nn.Linear(width, width, bias=False)
        self.norm = nn.RMSNorm(width, eps=norm_eps)
        self.out = nn.Linear(width, width, bias=False)

    def mix(self, x: Tensor, call: Call) -> Tensor:
        q, k, v = self.heads(x, call)
        heads = torch.arange(1, self.num_heads + 1, dtype=torch.float64, device=x.device)
        log_decay = -torch.exp2(-8 * heads / self.num_heads) * self.rate
        if x.dtype != torch.float64:
            log_decay = log_decay.float()
        gate = call.later(lambda: self.gate(x).sigmoid(), x.device)
        # The norm takes out any scale, so the published formula has none.
        o, final = lightning_attention(
            q, k, v, log_decay=log_decay, scale=1.0, **call.operator_keywords
        )
        call.keep(final)
        return self.out(gate.result() * self.norm(o.flatten(2)))
