"""The time mixing of RWKV-6 (Finch)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeco.core.shapes import state_dtype
from zeco.layers.gates import LowRank
from zeco.layers.mixer import Call, Mixer, head_dim
from zeco.layers.norms import HeadLayerNorm
from zeco.operators.rwkv6 import rwkv6

_BRANCHES = 5  # r, w, k, v and the gate


class RWKV6(Mixer):
    """Linear attention with a decay a key channel, a bonus for the current token, and a token shift.

    Each of r, w, k, v and the gate sees its own data-dependent blend of a token and the one before,

        d_t = x_{t-1} - x_t     x̂_t = x_t + d_t ⊙ μ_x
        blend_t = x_t + d_t ⊙ (μ + W₂ tanh(W₁ x̂_t))

    and the rest is

        decay_t = exp(-exp(b + W₄ tanh(W₃ blend_t)))        y_t = (norm(o_t) ⊙ silu(gate_t)) W_o

    Args:
        width: D.
        num_heads: H.
        blend_rank: rank of W₂ W₁, for each of the five.
        decay_rank: rank of W₄ W₃.
        norm_eps: of the heads' norm.

    Source: Peng et al., arXiv:2404.05892, equations 11 to 20. Initial values of μ, b and the bonus
    are ramps over the channels (see `initialize`), the same in every layer, where the paper's code
    bends them with depth.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        blend_rank: int = 32,
        decay_rank: int = 64,
        norm_eps: float = 64e-5,
    ) -> None:
        super().__init__(width)
        K = head_dim("RWKV6", "width", width, num_heads)
        self.heads_shape = (num_heads, K)
        # One dim each, since optimizers decay weights by their number of dims.
        self.shift_blend = nn.Parameter(torch.empty(width))
        self.blends = nn.Parameter(torch.empty(_BRANCHES * width))
        self.bonus = nn.Parameter(torch.empty(width))
        self.blend_down = nn.Linear(width, _BRANCHES * blend_rank, bias=False)
        self.blend_up = nn.ModuleList(
            nn.Linear(blend_rank, width, bias=False) for _ in range(_BRANCHES)
        )
        self.decay = LowRank(width, decay_rank, width, activation=nn.Tanh(), bias=True)
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.norm = HeadLayerNorm(num_heads, K, eps=norm_eps)
        self.out = nn.Linear(width, width, bias=False)
        self.initialize(None)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None) -> None:
        """Set blends to ramps from 1 to 0, decay biases from -6 to -1, and the bonus to 1/2.

        Channels so remember from about 400 tokens down to 3.
        """
        ramp = torch.linspace(1, 0, self.width)
        self.shift_blend.copy_(ramp)
        self.blends.copy_(ramp.repeat(_BRANCHES))
        self.decay.bias.copy_(torch.linspace(-6, -1, self.width))
        self.bonus.fill_(0.5)
        self.norm.initialize()

    def mix(self, x: Tensor, call: Call) -> Tensor:
        difference = call.look_back(x, 1).back(1) - x
        hidden = torch.tanh(self.blend_down(x + difference * self.shift_blend))
        r, w, k, v, gate = (
            x + difference * (blend + up(part))
            for blend, up, part in zip(
                self.blends.chunk(_BRANCHES),
                self.blend_up,
                hidden.chunk(_BRANCHES, -1),
                strict=True,
            )
        )
        logits = self.decay(w)
        log_decay = -logits.to(state_dtype(logits)).exp()
        gate = F.silu(self.gate(gate))
        r, k, v, log_decay = (
            y.unflatten(-1, self.heads_shape)
            for y in (self.receptance(r), self.key(k), self.value(v), log_decay)
        )
        bonus = self.bonus.view(self.heads_shape)
        o, final = rwkv6(r, k, v, log_decay, bonus, scale=1.0, **call.operator_keywords)
        call.keep(final)
        return self.out(self.norm(o).flatten(2) * gate)
