"""The Mamba-2 layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeco.core.errors import ArgumentError
from zeco.layers.deferred import Deferred
from zeco.layers.gates import DiscretizedDecay
from zeco.layers.mixer import Call, HeadProjections, Mixer, head_dim
from zeco.operators.ssd import ssd


class Mamba2(Mixer):
    """A state-space layer with one data-dependent decay a head.

        S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_tᵀ       o_t = S_tᵀ C_t + D x_t
        y_t = norm(o_t ⊙ silu(z_t)) W_o

    Args:
        width: channels of a token.
        num_heads: H; each of ``expand * width / H`` channels.
        expand: channels of x as a multiple of the width.
        state_dim: K, the size of B and C.
        num_groups: groups of heads that share B and C.
        conv_width: kernel width of the short convolution on x, B and C, which end in a SiLU; 0
            for none.
        norm_eps: of the norm over all channels.

    Source: Dao and Gu, arXiv:2405.21060, section 7. Difference: the published convolution has a
    bias.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        expand: float = 2.0,
        state_dim: int = 128,
        num_groups: int = 1,
        conv_width: int = 4,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(width)
        V = head_dim("Mamba2", "width * expand", width * expand, num_heads)
        if num_groups < 1 or num_heads % num_groups:
            raise ArgumentError(
                f"Mamba2: num_groups is {num_groups}, but must divide num_heads = {num_heads}"
            )
        if state_dim < 1:
            raise ArgumentError(f"Mamba2: state_dim is {state_dim}, but must be at least 1")
        group = (num_groups, state_dim)
        self.heads = HeadProjections(
            width, (group, group, (num_heads, V)), conv_width=conv_width, activation="silu"
        )
        self.step = nn.Linear(width, num_heads, bias=False)
        self.decay = DiscretizedDecay(num_heads)
        self.skip = nn.Parameter(torch.ones(num_heads))
        self.gate = nn.Linear(width, num_heads * V, bias=False)
        self.norm = nn.RMSNorm(num_heads * V, eps=norm_eps)
        self.out = nn.Linear(num_heads * V, width, bias=False)

    def initialize(self, generator: torch.Generator | None) -> None:
        """Draw decays and steps (see `DiscretizedDecay`); the skip weights D are 1."""
        self.decay.initialize(generator)
        nn.init.ones_(self.skip)

    def mix(self, x: Tensor, call: Call) -> Tensor:
        steps = Deferred(lambda: self.decay.steps(self.step(x)), x.device)
        B, C, values = self.heads(x, call, steps.run)
        dt = steps.result()
        gate = call.later(lambda: F.silu(self.gate(x)), x.device)
        o, final = ssd(values, dt, self.decay.rates(), B, C, self.skip, **call.operator_keywords)
        call.keep(final)
        return self.out(self.norm(o.flatten(2) * gate.result()))
