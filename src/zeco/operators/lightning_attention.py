"""Lightning attention (TransNormerLLM, MiniMax): a fixed decay a head, given by the caller."""

from __future__ import annotations

from torch import Tensor

from zeco.operators.arguments import documented
from zeco.operators.decay.call import expand_log_decay, run_decay
from zeco.operators.function import operator_call
from zeco.operators.segment import Exchange


@documented
@operator_call
def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    bidirectional: bool = False,
    sp: Exchange | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attend to a state that each head forgets at a fixed rate, which depends on head and layer.

        S_t = λ_h S_{t-1} + k_t v_tᵀ        o_t = scale · S_tᵀ q_t          λ_h = exp(log_decay_h)

    Args:
        q: queries [B, T, Hk, K].
        k: keys [B, T, Hk, K].
        v: values [B, T, H, V], H a multiple of Hk.
        log_decay: natural logarithm of each head's decay, [H] or [Hk], <= 0.
        <common>

    Source: Qin et al., Lightning Attention-2, arXiv:2401.04658, equations 3 and 4. The published
    slopes are positive and their exponent is negated; here the sign is in ``log_decay``.
    """
    return run_decay(
        "lightning_attention",
        "scalar",
        q,
        k,
        v,
        expand_log_decay("lightning_attention", log_decay, q, v, sp),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        bidirectional=bidirectional,
        sp=sp,
        backend=backend,
    )
