"""Kimi Delta Attention: one decay a key channel before the delta rule."""

from __future__ import annotations

from torch import Tensor

from zeco.operators.arguments import documented
from zeco.operators.delta.call import run_delta_rule
from zeco.operators.function import operator_call
from zeco.operators.segment import Exchange


@documented
@operator_call
def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    bidirectional: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    sp: Exchange | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attend to a state whose key channels decay one by one before it follows the delta rule.

        S_t = (I - β_t k_t k_tᵀ) diag(exp(g_t)) S_{t-1} + β_t k_t v_tᵀ        o_t = scale · S_tᵀ q_t

    Args:
        q: queries [B, T, Hk, K].
        k: keys [B, T, Hk, K], of length one or less for a state that stays bounded.
        v: values [B, T, H, V], H a multiple of Hk.
        g: natural logarithm of the decays, [B, T, H, K] or [B, T, Hk, K], <= 0.
        beta: how much of the old value is replaced, [B, T, H] or [B, T, Hk], in 0..1, or in 0..2
            to let eigenvalues of the transition be negative.
        use_qk_l2norm_in_kernel: whether q and k are scaled to length one first.
        <common>

    Source: Kimi Team, arXiv:2510.26692, equation 1.

    >>> import torch
    >>> key, one = torch.ones(1, 3, 1, 1), torch.ones(1, 3, 1)
    >>> kda(key, key, key, -key, one)[0].shape
    torch.Size([1, 3, 1, 1])
    """
    return run_delta_rule(
        "kda",
        q,
        k,
        v,
        g,
        beta,
        gate_layout="H K",
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        bidirectional=bidirectional,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        sp=sp,
        backend=backend,
    )
