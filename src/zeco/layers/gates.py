"""Parts of gates that several layers share: discretised decays and low-rank maps."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeco.core.shapes import state_dtype


class DiscretizedDecay(nn.Module):
    """A continuous decay sampled at data-dependent steps: ``dt = softplus(x + b)``, ``g = -a dt``.

    The rate a = exp(log_rate) is one number a head, at first uniform in [1, 16]; the bias b is one
    a channel, such that steps are at first log-uniform in [0.001, 0.1].

    Args:
        num_heads: H.
        channels: gate channels of each head; 1 for a scalar gate.

    Source: Gu and Dao, Mamba, arXiv:2312.00752, section 3.6; the ranges of Mamba-2.
    """

    def __init__(self, num_heads: int, channels: int = 1) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.log_rate = nn.Parameter(torch.empty(num_heads))
        self.bias = nn.Parameter(torch.empty(num_heads * channels))
        self.initialize(None)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None) -> None:
        """Draw rates and steps from the ranges above."""
        self.log_rate.uniform_(1, 16, generator=generator).log_()
        low, high = math.log(1e-3), math.log(1e-1)
        steps = torch.empty_like(self.bias).uniform_(low, high, generator=generator).exp()
        # The inverse of softplus.
        self.bias.copy_(steps + torch.log(-torch.expm1(-steps)))

    def rates(self) -> Tensor:
        """Return -a, [H], in fp32 or better."""
        return -self.log_rate.to(state_dtype(self.log_rate)).exp()

    def steps(self, x: Tensor) -> Tensor:
        """Return dt from logits [B, T, H * channels], in fp32 or better."""
        dtype = state_dtype(x)
        return F.softplus(x.to(dtype) + self.bias.to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return log decays [B, T, H, channels] from logits [B, T, H * channels]."""
        return self.rates()[:, None] * self.steps(x).unflatten(-1, (self.num_heads, -1))


class LowRank(nn.Sequential):
    """A map through a few channels, ``W₂ φ(W₁ x) (+ b)``.

    Args:
        width: D of the tokens.
        rank: channels inside.
        out: channels that come out.
        activation: φ; None for none.
        bias: whether b is there.
    """

    def __init__(
        self,
        width: int,
        rank: int,
        out: int,
        *,
        activation: nn.Module | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__(
            nn.Linear(width, rank, bias=False),
            nn.Identity() if activation is None else activation,
            nn.Linear(rank, out, bias=bias),
        )

    @property
    def bias(self) -> nn.Parameter:
        """The parameter b."""
        return self.get_parameter("2.bias")
