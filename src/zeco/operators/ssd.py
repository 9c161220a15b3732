"""Structured state-space duality (Mamba-2): a scalar decay from a discretised step."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

from torch import Tensor

from zeco.core.shapes import state_dtype
from zeco.operators.arguments import (
    Signature,
    are_looked_at,
    check_heads,
    check_inputs,
    check_no_nan,
    check_not_positive,
    common_dtype,
    documented,
    signature_of,
)
from zeco.operators.decay.call import run_decay
from zeco.operators.function import operator_call
from zeco.operators.segment import Exchange


@documented
@operator_call
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    bidirectional: bool = False,
    sp: Exchange | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Run the state-space layer of Mamba-2.

        S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_tᵀ       o_t = S_tᵀ C_t + D x_t

    Args:
        x: inputs [B, T, H, V].
        dt: step sizes after softplus, [B, T, H], >= 0; where values aren't looked at, on a GPU, others
            give NaN.
        A: decay rates [H], <= 0.
        B: input projections [B, T, G, K]; each of the G groups serves H / G heads.
        C: output projections [B, T, G, K].
        D: skip weights [H], or None.
        <common without scale>

    Source: Dao and Gu, Mamba-2, arXiv:2405.21060, listing 1 and section 7. States are [K, V]
    here, transposed against the published code; softplus and the bias of dt are the layer's.
    """
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "initial_state": initial_state}
    _check(*map(signature_of, given.values()))
    if sp is not None and sp.check:
        check_no_nan("ssd", given)
    check_not_positive("ssd", "A", A, sp, remedy="pass A = -exp(A_log)")
    if are_looked_at(dt, sp):
        check_not_positive("ssd", "-dt", -dt, sp, remedy="apply softplus to dt first")
    dtype = state_dtype(x, dt, A, B, C)
    step = dt.to(dtype)
    return run_decay(
        "ssd",
        "scalar",
        C,
        B,
        x,
        step * A.to(dtype),
        scale=1.0,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        bidirectional=bidirectional,
        sp=sp,
        backend=backend,
        operands=common_dtype(x, B, C),
        results=x.dtype,
        step=step,
        skip=None if D is None else D.to(dtype).expand(step.shape),
        names=("C", "B", "x", "dt"),
    )


@lru_cache(maxsize=256)
def _check(*signatures: Signature | None) -> None:
    """Check all of a call but values: the same for all calls alike."""
    x, dt, A, B, C, D, initial_state = cast("tuple[Any, ...]", signatures)
    layouts = {
        "x": (x, "B T H V"),
        "dt": (dt, "B T H"),
        "A": (A, "H"),
        "B": (B, "B T G K"),
        "C": (C, "B T G K"),
        "D": (D, "H"),
    }
    sizes = check_inputs("ssd", layouts, initial_state=initial_state, sp=None)
    check_heads("ssd", sizes["H"], B=sizes["G"])
