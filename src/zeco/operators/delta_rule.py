"""The delta rule: a state that replaces what it held for a key."""

from __future__ import annotations

from torch import Tensor

from zeco.operators.arguments import documented
from zeco.operators.delta.call import run_delta_rule
from zeco.operators.function import operator_call
from zeco.operators.segment import Exchange


@documented
@operator_call
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    """Attend to a state that writes the difference between a value and what it holds for the key.

        S_t = (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ        o_t = scale · S_tᵀ q_t

    Args:
        q: queries [B, T, Hk, K].
        k: keys [B, T, Hk, K], of length one or less for a state that stays bounded.
        v: values [B, T, H, V], H a multiple of Hk.
        beta: how much of the old value is replaced, [B, T, H] or [B, T, Hk], in 0..1, or in 0..2
            to let eigenvalues of the transition be negative.
        use_qk_l2norm_in_kernel: whether q and k are scaled to length one first.
        <common>

    Source: Yang et al., arXiv:2406.06484, section 2.2.

    >>> import torch
    >>> key, one = torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1)
    >>> value = torch.tensor([5.0, 7.0]).view(1, 2, 1, 1)
    >>> delta_rule(key, key, value, one)[0].flatten().tolist()
    [5.0, 7.0]
    """
    return run_delta_rule(
        "delta_rule",
        q,
        k,
        v,
        None,
        beta,
        gate_layout=None,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        bidirectional=bidirectional,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        sp=sp,
        backend=backend,
    )
