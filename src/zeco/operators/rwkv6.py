"""RWKV-6: a decay a key channel, and a bonus for the token that is being read."""

from __future__ import annotations

from torch import Tensor

from zeco.core.errors import ArgumentError
from zeco.core.shapes import state_dtype
from zeco.operators.arguments import check_inputs, documented, repeat_heads
from zeco.operators.decay.call import run_decay
from zeco.operators.function import operator_call
from zeco.operators.segment import Exchange


@documented
@operator_call
def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    bidirectional: bool = False,
    sp: Exchange | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Read the state before each token, and the token itself through a bonus.

        o_t = scale · (S_{t-1} + diag(u) k_t v_tᵀ)ᵀ r_t     S_t = diag(exp(w_t)) S_{t-1} + k_t v_tᵀ

    Args:
        r: receptances, the queries [B, T, Hk, K].
        k: keys [B, T, Hk, K].
        v: values [B, T, H, V], H a multiple of Hk.
        w: natural logarithm of the decays, [B, T, H, K] or [B, T, Hk, K], <= 0.
        u: bonus [H, K] or [Hk, K].
        <common>

    Source: Peng et al., Eagle and Finch, arXiv:2404.05892, equation 19. The paper has no scale:
    pass 1.0 for its formula; ``w`` is the logarithm of the paper's decay.
    """
    name = "rwkv6"
    shapes = {"r": (r, "B T Hk K"), "k": (k, "B T Hk K"), "v": (v, "B T H V"), "u": (u, "G K")}
    sizes = check_inputs(name, shapes, initial_state=initial_state, sp=sp)
    if sizes["G"] not in (sizes["H"], sizes["Hk"]):
        raise ArgumentError(
            f"{name}: u has {sizes['G']} heads, but must have the {sizes['H']} of v"
            + ("" if sizes["H"] == sizes["Hk"] else f" or the {sizes['Hk']} of r")
        )
    dtype = state_dtype(r, k, v, w)
    factor = sizes["K"] ** -0.5 if scale is None else float(scale)
    o, state = run_decay(
        name,
        "diagonal",
        r,
        k,
        v,
        w,
        scale=factor,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        bidirectional=bidirectional,
        sp=sp,
        backend=backend,
        strict=True,
        results=dtype,
        names=("r", "k", "v", "w"),
    )
    product = repeat_heads(r.to(dtype) * k.to(dtype), sizes["G"])
    weight = repeat_heads((product * u.to(dtype)).sum(-1, keepdim=True), sizes["H"])
    return (o + factor * weight * v.to(dtype)).to(r.dtype), state
