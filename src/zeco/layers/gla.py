"""The Gated Linear Attention layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zeco.layers.deferred import Deferred
from zeco.layers.mixer import Call, HeadProjections, Mixer, head_dim
from zeco.layers.norms import GatedRMSNorm
from zeco.operators.gla import gla
from zeco.operators.log_gate import log_sigmoid_gate


class GatedLinearAttention(Mixer):
    """Linear attention whose key channels are forgotten at data-dependent rates.

        α_t = sigmoid(W₂ W₁ x_t + b)^(1/τ)      S_t = diag(α_t) S_{t-1} + k_t v_tᵀ
        y_t = (norm(o_t) ⊙ silu(W_r x_t)) W_o

    Args:
        width: D.
        num_heads: H.
        expand_k: total key dim as a share of D.
        expand_v: total value dim as a share of D.
        gate_rank: rank of W₂ W₁.
        gate_normalizer: τ; larger forgets slower.
        conv_width: kernel width of a short convolution on q, k and v; 0 for none.
        norm_eps: of the heads' norm.

    Source: Yang et al., arXiv:2312.06635, section 4.4. Differences: the optional convolution; an
    RMS norm where the paper has a layer norm; W_r has no bias; b starts spread out over the
    channels of a head (see `initialize`), which the paper leaves open.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        gate_rank: int = 16,
        gate_normalizer: float = 16.0,
        conv_width: int = 0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(width)
        K = head_dim("GatedLinearAttention", "width * expand_k", width * expand_k, num_heads)
        V = head_dim("GatedLinearAttention", "width * expand_v", width * expand_v, num_heads)
        self.num_heads = num_heads
        self.gate_normalizer = gate_normalizer
        self.heads = HeadProjections(
            width, ((num_heads, K), (num_heads, K), (num_heads, V)), conv_width=conv_width
        )
        self.decay_down = nn.Linear(width, gate_rank, bias=False)
        self.decay_up = nn.Linear(gate_rank, num_heads * K)
        self.gate = nn.Linear(width, num_heads * V, bias=False)
        self.norm = GatedRMSNorm(V, eps=norm_eps)
        self.out = nn.Linear(num_heads * V, width, bias=False)
        self.initialize(None)

    def initialize(self, generator: torch.Generator | None) -> None:
        """Spread the gates' bias evenly from 0 to 6 over each head's channels.

        With τ = 16 a head then remembers over 23 (16 / ln 2) to some 6,500 tokens from the start.
        """
        bias = self.decay_up.bias
        with torch.no_grad():
            bias.copy_(torch.linspace(0, 6, bias.numel() // self.num_heads).repeat(self.num_heads))

    def mix(self, x: Tensor, call: Call) -> Tensor:
        decays = Deferred(lambda: self._log_decays(x), x.device)
        q, k, v = self.heads(x, call, decays.run)
        gate = call.later(lambda: self.gate(x), x.device)
        o, final = gla(
            q, k, v, decays.result().unflatten(-1, k.shape[2:]), **call.operator_keywords
        )
        call.keep(final)
        return self.out(self.norm(o, gate.result().view_as(o)).flatten(2))

    def _log_decays(self, x: Tensor) -> Tensor:
        logits = self.decay_up(self.decay_down(x))
        return log_sigmoid_gate(logits, normalizer=self.gate_normalizer)
