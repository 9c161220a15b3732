"""The parts between mixers: the gated MLP and the residual block."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from zeco.layers import Mixer, MixerState
from zeco.sequence_parallel import SequenceParallel


class SwiGLU(nn.Module):
    """A gated MLP: ``(silu(W_g x) ⊙ W_u x) W_o``.

    Args:
        width: D.
        hidden: channels inside.

    Source: Shazeer, arXiv:2002.05202, equation 6.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, D]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.out(F.silu(gate) * up)


def swiglu_hidden(width: int, ratio: float) -> int:
    """Return the hidden width whose three matrices are as large as two of ``ratio * width``.

    >>> swiglu_hidden(256, 4.0)
    688
    """
    return 8 * -(-round(2 * ratio * width / 3) // 8)


class Block(nn.Module):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``.

    Args:
        mixer: the token mixer.
        hidden: hidden width of the MLP.
        norm_eps: of the norms.
    """

    def __init__(self, mixer: Mixer, hidden: int, *, norm_eps: float) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(mixer.width, eps=norm_eps)
        self.mixer = mixer
        self.mlp_norm = nn.RMSNorm(mixer.width, eps=norm_eps)
        self.mlp = SwiGLU(mixer.width, hidden)

    def forward(
        self,
        x: Tensor,
        *,
        sp: SequenceParallel | None,
        cu_seqlens: Tensor | None,
        position_ids: Tensor | None,
        bidirectional: bool,
        state: MixerState | None,
        output_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        """Return [B, T, D] and the mixer's leaving state; the keywords are those of `Mixer`."""
        y, leaving = self.mixer(
            self.mixer_norm(x),
            sp=sp,
            cu_seqlens=cu_seqlens,
            position_ids=position_ids,
            bidirectional=bidirectional,
            state=state,
            output_state=output_state,
        )
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), leaving
