"""Retention (RetNet): a fixed decay a head."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from zeco.core.captures import is_capturing
from zeco.core.shapes import state_dtype
from zeco.operators.arguments import documented
from zeco.operators.decay.call import expand_log_decay, retnet_log_decay, run_decay
from zeco.operators.function import operator_call
from zeco.operators.segment import Exchange


@documented
@operator_call
def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    bidirectional: bool = False,
    sp: Exchange | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attend to a state that each head forgets at its own fixed rate.

        S_t = γ_h S_{t-1} + k_t v_tᵀ        o_t = scale · S_tᵀ q_t          γ_h = exp(log_decay_h)

    Args:
        q: queries [B, T, Hk, K].
        k: keys [B, T, Hk, K].
        v: values [B, T, H, V], H a multiple of Hk.
        log_decay: natural logarithm of each head's decay, [H] or [Hk], <= 0; by default
            log(1 - 2^(-5-h)) for key head h = 0, 1, …
        <common>

    Source: Sun et al., RetNet, arXiv:2307.08621, equations 5 and 6 (decays: equation 8). Rotary
    positions and the group norm are the layer's.
    """
    if log_decay is None:
        heads = q.shape[2] if q.ndim == 4 else 1
        # What is made during a capture holds nothing before the graph is replayed.
        make = _published_log_decay
        make = make.__wrapped__ if is_capturing(q.device) else make
        log_decay = make(heads, state_dtype(q, k, v), q.device)
    return run_decay(
        "retention",
        "scalar",
        q,
        k,
        v,
        expand_log_decay("retention", log_decay, q, v, sp),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        bidirectional=bidirectional,
        sp=sp,
        backend=backend,
    )


@lru_cache(maxsize=64)
def _published_log_decay(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return RetNet's decays, kept from call to call: to make them takes longer than to use them."""
    with torch.inference_mode(False):
        return retnet_log_decay(heads, device=device).to(dtype)
