"""Linear attention: a state without decay."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco.core.shapes import check_shapes, state_dtype
from zeco.operators.arguments import documented
from zeco.operators.decay.call import run_decay
from zeco.operators.function import operator_call
from zeco.operators.segment import Exchange


@documented
@operator_call
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalize: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    bidirectional: bool = False,
    sp: Exchange | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attend to everything before each token through a sum of outer products.

        S_t = S_{t-1} + k_t v_tᵀ            o_t = scale · S_tᵀ q_t

    With ``normalize`` each output is divided by ``scale · (k_1 + … + k_t)ᵀ q_t``, which q and k
    must keep away from zero (by a positive feature map).

    Args:
        q: queries [B, T, Hk, K].
        k: keys [B, T, Hk, K].
        v: values [B, T, H, V], H a multiple of Hk.
        normalize: divide by the normaliser. It is carried as one more value channel, so states
            (initial and final) are then [B, H, K, V+1], their last column the sum of keys.
        <common>

    Source: Katharopoulos et al., arXiv:2006.16236, equations 16 to 20. Feature maps are applied
    by the caller, and no small constant is added to the normaliser.

    >>> one = torch.ones(1, 3, 1, 1)
    >>> linear_attention(one, one, one)[0].flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    name, dtype = "linear_attention", q.dtype
    if normalize:
        check_shapes(name, {"q": (q, "B T Hk K"), "k": (k, "B T Hk K"), "v": (v, "B T H V")})
        # The quotient is taken before rounding to the inputs' dtype.
        if dtype.is_floating_point:
            q = q.to(state_dtype(q, k, v))
        v = torch.cat([v.to(q.dtype), v.new_ones((*v.shape[:3], 1), dtype=q.dtype)], -1)
    o, state = run_decay(
        name,
        "identity",
        q,
        k,
        v,
        None,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        bidirectional=bidirectional,
        sp=sp,
        backend=backend,
    )
    if normalize:
        o = (o[..., :-1] / o[..., -1:]).to(dtype)
    return o, state
