"""Simple gated linear attention: one data-dependent decay a head."""

from __future__ import annotations

from torch import Tensor

from zeco.operators.arguments import documented
from zeco.operators.decay.call import run_decay
from zeco.operators.function import operator_call
from zeco.operators.segment import Exchange


@documented
@operator_call
def simple_gla(
    q: Tensor,
    k: Tensor,
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
    """Attend to a state that every token decays as a whole, head by head.

        S_t = exp(g_t) S_{t-1} + k_t v_tᵀ   o_t = scale · S_tᵀ q_t

    Args:
        q: queries [B, T, Hk, K].
        k: keys [B, T, Hk, K].
        v: values [B, T, H, V], H a multiple of Hk.
        g: natural logarithm of the decays, [B, T, H] or [B, T, Hk], <= 0.
        <common>

    Source: the scalar-gated form of GLA, Yang et al., arXiv:2312.06635, table 1; the recurrence
    of Mamba-2 (arXiv:2405.21060) without its discretisation.
    """
    return run_decay(
        "simple_gla",
        "scalar",
        q,
        k,
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
