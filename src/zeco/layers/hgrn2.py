"""The HGRN2 layer: a gated linear RNN whose state is expanded by outer products."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeco.core.errors import ArgumentError
from zeco.layers.mixer import Call, HeadProjections, Mixer, head_dim
from zeco.operators.hgrn2 import hgrn2
from zeco.operators.log_gate import log_sigmoid_gate


class HGRN2(Mixer):
    """A gated linear RNN: forget gates f, and keys that are what they forget.

        f_t = γ + (1 - γ) sigmoid(W_f x_t)      S_t = diag(f_t) S_{t-1} + (1 - f_t) i_tᵀ
        y_t = norm(S_tᵀ silu(W_q x_t)) W_o

    Args:
        width: D.
        num_heads: H; K = V = D / H, the expansion of the state.
        lower_bound: γ, in [0, 1): forget gates can't be lower, so that upper layers remember for
            longer.
        conv_width: kernel width of a short convolution on q, f and i; 0 for none.
        norm_eps: of the norm over all channels.

    Source: Qin et al., arXiv:2404.07904, equations 4 to 6. Differences: γ is a number, not learned
    over the layers together; the optional convolution.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        lower_bound: float = 0.0,
        conv_width: int = 0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(width)
        if not 0 <= lower_bound < 1:
            raise ArgumentError(
                f"HGRN2: lower_bound is {lower_bound}, but must be at least 0 and below 1"
            )
        K = head_dim("HGRN2", "width", width, num_heads)
        self.lower_bound = lower_bound
        self.heads = HeadProjections(
            width, ((num_heads, K),) * 3, conv_width=conv_width, activation="none"
        )
        self.norm = nn.RMSNorm(width, eps=norm_eps)
        self.out = nn.Linear(width, width, bias=False)

    def mix(self, x: Tensor, call: Call) -> Tensor:
        q, f, i = self.heads(x, call)
        g = log_sigmoid_gate(f)
        if self.lower_bound:
            low = torch.full_like(g, math.log(self.lower_bound))
            g = torch.logaddexp(low, g + math.log1p(-self.lower_bound))
            # The sum of the two may round to just above 1.
            g = g.clamp(max=0)
        o, final = hgrn2(F.silu(q), None, i, g, **call.operator_keywords)
        call.keep(final)
        return self.out(self.norm(o.flatten(2)))
