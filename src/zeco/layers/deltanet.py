"""Layers of the delta rule: DeltaNet, Gated DeltaNet and Kimi Delta Attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zeco.core.shapes import state_dtype
from zeco.layers.deferred import Deferred
from zeco.layers.gates import DiscretizedDecay, LowRank
from zeco.layers.mixer import Call, HeadProjections, Mixer, head_dim
from zeco.layers.norms import GatedRMSNorm
from zeco.operators.delta_rule import delta_rule
from zeco.operators.gated_delta_rule import gated_delta_rule
from zeco.operators.kda import kda


def _writing_strengths(logits: Tensor, largest: float) -> Tensor:
    """Return β = largest * sigmoid(logits), in fp32 or better."""
    return largest * logits.to(state_dtype(logits)).sigmoid()


class DeltaNet(Mixer):
    """Linear attention that replaces what its state holds for a key.

        S_t = (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ     β_t = sigmoid(W_β x_t)
        y_t = norm(o_t) W_o     q, k and v end in a SiLU; q and k have length one

    Args:
        width: D.
        num_heads: H.
        negative_eigenvalues: let β reach 2, so that the state can alternate in sign
            (Grazzi et al., arXiv:2411.12537).
        conv_width: kernel width of the short convolution on q, k and v; 0 for none.
        norm_eps: of the heads' norm.

    Source: Yang et al., arXiv:2406.06484, section 3.3.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        negative_eigenvalues: bool = False,
        conv_width: int = 4,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(width)
        K = head_dim("DeltaNet", "width", width, num_heads)
        self.largest_beta = 2.0 if negative_eigenvalues else 1.0
        self.heads = HeadProjections(
            width, ((num_heads, K),) * 3, conv_width=conv_width, activation="silu"
        )
        self.beta = nn.Linear(width, num_heads, bias=False)
        self.norm = nn.RMSNorm(K, eps=norm_eps)
        self.out = nn.Linear(width, width, bias=False)

    def mix(self, x: Tensor, call: Call) -> Tensor:
        strengths = Deferred(lambda: _writing_strengths(self.beta(x), self.largest_beta), x.device)
        q, k, v = self.heads(x, call, strengths.run)
        beta = strengths.result()
        o, final = delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True, **call.operator_keywords)
        call.keep(final)
        return self.out(self.norm(o).flatten(2))


class GatedDeltaNet(Mixer):
    """The delta rule behind one data-dependent decay a head.

        S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ     α_t = exp(-a softplus(W_α x_t + b))
        y_t = (norm(o_t) ⊙ silu(W_g x_t)) W_o

    Args:
        width: D.
        num_heads: H.
        expand_v: total value dim as a multiple of D.
        negative_eigenvalues: let β reach 2; see `DeltaNet`.
        conv_width: kernel width of the short convolution on q, k and v; 0 for none.
        norm_eps: of the heads' norm.

    Source: Yang et al., arXiv:2412.06464, section 3.4, with keys as wide as the model.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        expand_v: float = 2.0,
        negative_eigenvalues: bool = False,
        conv_width: int = 4,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(width)
        K = head_dim("GatedDeltaNet", "width", width, num_heads)
        V = head_dim("GatedDeltaNet", "width * expand_v", width * expand_v, num_heads)
        self.largest_beta = 2.0 if negative_eigenvalues else 1.0
        self.heads = HeadProjections(
            width,
            ((num_heads, K), (num_heads, K), (num_heads, V)),
            conv_width=conv_width,
            activation="silu",
        )
        self.beta = nn.Linear(width, num_heads, bias=False)
        self.step = nn.Linear(width, num_heads, bias=False)
        self.decay = DiscretizedDecay(num_heads)
        self.gate = nn.Linear(width, num_heads * V, bias=False)
        self.norm = GatedRMSNorm(V, eps=norm_eps)
        self.out = nn.Linear(num_heads * V, width, bias=False)

    def initialize(self, generator: torch.Generator | None) -> None:
        """Draw decays and steps; see `DiscretizedDecay`."""
        self.decay.initialize(generator)

    def mix(self, x: Tensor, call: Call) -> Tensor:
        gates = Deferred(lambda: self._gates(x), x.device)
        q, k, v = self.heads(x, call, gates.run)
        g, beta = gates.result()
        gate = call.later(lambda: self.gate(x), x.device)
        o, final = gated_delta_rule(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=True, **call.operator_keywords
        )
        call.keep(final)
        return self.out(self.norm(o, gate.result().view_as(o)).flatten(2))

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        beta = _writing_strengths(self.beta(x), self.largest_beta)
        return self.decay(self.step(x)).squeeze(-1), beta


class KimiDeltaAttention(Mixer):
    """The delta rule behind one data-dependent decay a key channel.

        S_t = (I - β_t k_t k_tᵀ) diag(α_t) S_{t-1} + β_t k_t v_tᵀ
        α_t = exp(-a softplus(W₂ W₁ x_t + b))       y_t = (norm(o_t) ⊙ sigmoid(W₄ W₃ x_t)) W_o

    Args:
        width: D.
        num_heads: H; gates have rank D / H.
        negative_eigenvalues: let β reach 2; see `DeltaNet`.
        conv_width: kernel width of the short convolution on q, k and v; 0 for none.
        norm_eps: of the heads' norm.

    Source: Kimi Team, arXiv:2510.26692, section 4.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        negative_eigenvalues: bool = False,
        conv_width: int = 4,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(width)
        K = head_dim("KimiDeltaAttention", "width", width, num_heads)
        self.largest_beta = 2.0 if negative_eigenvalues else 1.0
        self.heads = HeadProjections(
            width, ((num_heads, K),) * 3, conv_width=conv_width, activation="silu"
        )
        self.beta = nn.Linear(width, num_heads, bias=False)
        self.step = LowRank(width, K, width)
        self.decay = DiscretizedDecay(num_heads, K)
        self.gate = LowRank(width, K, width, bias=True)
        self.norm = GatedRMSNorm(K, eps=norm_eps, activation="none")
        self.out = nn.Linear(width, width, bias=False)

    def initialize(self, generator: torch.Generator | None) -> None:
        """Draw decays and steps; see `DiscretizedDecay`."""
        self.decay.initialize(generator)

    def mix(self, x: Tensor, call: Call) -> Tensor:
        gates = Deferred(lambda: self._gates(x), x.device)
        q, k, v = self.heads(x, call, gates.run)
        g, beta = gates.result()
        gate = call.later(lambda: self.gate(x).sigmoid(), x.device)
        o, final = kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, **call.operator_keywords)
        call.keep(final)
        return self.out(self.norm(o, gate.result().view_as(o)).flatten(2))

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.decay(self.step(x)), _writing_strengths(self.beta(x), self.largest_beta)
