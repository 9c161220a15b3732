"""Gated linear attention: one data-dependent decay a key channel."""

from __future__ import annotations

from torch import Tensor

from zeco.operators.arguments import documented
from zeco.operators.decay.call import run_decay
from zeco.operators.function import operator_call
from zeco.operators.segment import Exchange


@documented
@operator_call
def gla(
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
    """Attend to a state whose key channels every token decays one by one.

        S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ         o_t = scale · S_tᵀ q_t

    Args:
        q: queries [B, T, Hk, K].
        k: keys [B, T, Hk, K].
        v: values [B, T, H, V], H a multiple of Hk.
        g: natural logarithm of the decays, [B, T, H, K] or [B, T, Hk, K], <= 0.
        <common>

    Source: Yang et al., arXiv:2312.06635, equation 3.

    >>> import torch
    >>> one = torch.ones(1, 3, 1, 1)
    >>> gla(one, one, one, one * -2.0**0.5)[0].shape
    torch.Size([1, 3, 1, 1])
    """
    return run_decay(
        "gla",
        "diagonal",
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
