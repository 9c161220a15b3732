"""The time mixing of RWKV-7 (Goose)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeco.core.shapes import state_dtype
from zeco.layers.gates import LowRank
from zeco.layers.mixer import Call, Mixer, head_dim
from zeco.layers.norms import HeadLayerNorm
from zeco.operators.rwkv7 import rwkv7

_BRANCHES = 6  # r, w, k, v, a and the gate
_LOWEST = -math.exp(-0.5)  # the strongest log decay


class RWKV7(Mixer):
    """A generalised delta rule with vector-valued decay and in-context learning rate, and token shift.

    With blends x + μ ⊙ (x_{t-1} - x_t) for each of r, w, k, v, a and the gate,

        S_t = (diag(w_t) - (a_t ⊙ κ_t) κ_tᵀ) S_{t-1} + k̃_t v_tᵀ
        log w_t = -e^(-1/2) sigmoid(b_w + lora(·))      a_t = sigmoid(b_a + lora(·))
        κ_t = normalise(k_t ⊙ ξ)        k̃_t = k_t ⊙ (1 + (a_t - 1) ⊙ α)
        y_t = ((norm(o_t) + (Σ r_t ⊙ ρ ⊙ k̃_t) v_t) ⊙ gate_t) W_o

    Args:
        width: D.
        num_heads: H.
        rank: of the low-rank maps of w, a and the gate.
        norm_eps: of the heads' norm.

    Source: Peng et al., arXiv:2503.14456, section 4. Differences: no value residual (the paper
    blends the first layer's values into those of later layers); initial values are the same in
    every layer, where the paper's code bends them with depth.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        rank: int = 32,
        norm_eps: float = 64e-5,
    ) -> None:
        super().__init__(width)
        K = head_dim("RWKV7", "width", width, num_heads)
        self.heads_shape = (num_heads, K)
        # One dim each, since optimizers decay weights by their number of dims.
        self.blends = nn.Parameter(torch.empty(_BRANCHES * width))
        self.removal = nn.Parameter(torch.empty(width))
        self.replacement = nn.Parameter(torch.empty(width))
        self.bonus = nn.Parameter(torch.empty(width))
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.decay = LowRank(width, rank, width, activation=nn.Tanh(), bias=True)
        self.rate = LowRank(width, rank, width, bias=True)
        self.gate = LowRank(width, rank, width, activation=nn.Sigmoid())
        self.norm = HeadLayerNorm(num_heads, K, eps=norm_eps)
        self.out = nn.Linear(width, width, bias=False)
        self.initialize(None)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None) -> None:
        """Set blends to ramps from 1 to 0, decay biases from -5 to 1, and the rest to constants.

        Removal keys start as keys, replacement follows the learning rate, and there is no bonus.
        """
        self.blends.copy_(torch.linspace(1, 0, self.width).repeat(_BRANCHES))
        self.decay.bias.copy_(torch.linspace(-5, 1, self.width))
        self.rate.bias.zero_()
        self.removal.fill_(1)
        self.replacement.fill_(1)
        self.bonus.zero_()
        self.norm.initialize()

    def mix(self, x: Tensor, call: Call) -> Tensor:
        difference = call.look_back(x, 1).back(1) - x
        r, w, k, v, a, gate = (x + difference * blend for blend in self.blends.chunk(_BRANCHES))
        gate = self.gate(gate)
        rate = self.rate(a).sigmoid()
        k, v, r = self.key(k), self.value(v), self.receptance(r)
        logits = self.decay(w)
        log_decay = _LOWEST * logits.to(state_dtype(logits)).sigmoid()
        removal = (k * self.removal).unflatten(-1, self.heads_shape)
        removal = F.normalize(removal.to(log_decay.dtype), dim=-1).to(k.dtype)
        k = (k * (1 + (rate - 1) * self.replacement)).to(v.dtype)  # autocast leaves it wider
        r, log_decay, k, v, rate = (
            y.unflatten(-1, self.heads_shape) for y in (r, log_decay, k, v, rate)
        )
        o, final = rwkv7(
            r,
            log_decay,
            k,
            v,
            -removal,
            removal * rate,
            lower_bound=_LOWEST,
            **call.operator_keywords,
        )
        call.keep(final)
        bonus = (r * k * self.bonus.view(self.heads_shape)).sum(-1, keepdim=True) * v
        return self.out((self.norm(o) + bonus).flatten(2) * gate)
