"""HGRN2: gated linear attention whose keys are what the gates forget."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco.operators.arguments import documented
from zeco.operators.decay.call import run_decay
from zeco.operators.function import operator_call
from zeco.operators.segment import Exchange


@documented
@operator_call
def hgrn2(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    bidirectional: bool = False,
    sp: Exchange | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attend to a state that takes in, channel by channel, as much as it forgets.

        S_t = diag(f_t) S_{t-1} + (1 - f_t) v_tᵀ        o_t = scale · S_tᵀ q_t      f_t = exp(g_t)

    Args:
        q: queries [B, T, Hk, K].
        k: keys in place of 1 - exp(g), [B, T, Hk, K]; None for these.
        v: values [B, T, H, V], H a multiple of Hk.
        g: natural logarithm of the forget gates, [B, T, H, K] or [B, T, Hk, K], <= 0.
        <common>

    Source: Qin et al., HGRN2, arXiv:2404.07904, equation 4 (q is its output gate, v its input).
    1 - exp(g) is computed in the dtype of the gates, as -expm1(g) where they are near 0.
    """
    return run_decay(
        "hgrn2",
        "diagonal",
        q,
        _complement(g) if k is None else k,
        v,
        g,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        bidirectional=bidirectional,
        sp=sp,
        backend=backend,
    )


def _complement(g: Tensor) -> Tensor:
    """Return 1 - exp(g), itself and its derivative exact to rounding.

    expm1 is exact near 0, but its derivative is computed as expm1(g) + 1, which loses every digit of
    exp(g) where that is small.
    """
    near = g > -0.5
    return torch.where(near, -torch.expm1(g.clamp(min=-0.5)), 1 - torch.exp(g))
