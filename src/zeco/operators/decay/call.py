"""The way from a public operator of the decay family to its segments."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from zeco.core.errors import ArgumentError
from zeco.core.shapes import state_dtype
from zeco.operators.arguments import (
    Signature,
    check_heads,
    check_inputs,
    check_log_decay,
    check_no_nan,
    common_dtype,
    repeat_heads,
    signature_of,
)
from zeco.operators.backends import choose_backend
from zeco.operators.bidirectional import check_stateless, run_both_directions
from zeco.operators.decay.segment import DecayOperator, Kind
from zeco.operators.decay.triton_rows import why_not_triton
from zeco.operators.function import run_operator
from zeco.operators.segment import Exchange, Inputs

OFFERED = ("torch", "triton")


def run_decay(
    name: str,
    kind: Kind,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    bidirectional: bool,
    sp: Exchange | None,
    backend: str,
    strict: bool = False,
    operands: torch.dtype | None = None,
    results: torch.dtype | None = None,
    step: Tensor | None = None,
    skip: Tensor | None = None,
    names: tuple[str, str, str, str] = ("q", "k", "v", "g"),
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments, give every input the value heads' count, and run the operator.

    Args:
        name: the public operator.
        kind: the kind of decay, which fixes the layout of g.
        q: [B, T, Hk, K].
        k: [B, T, Hk, K].
        v: [B, T, H, V].
        g: [B, T, H or Hk] or [B, T, H or Hk, K]; None for kind "identity".
        scale: factor of the queries, or None for K**-0.5.
        initial_state: see the public operators.
        output_final_state: see the public operators.
        cu_seqlens: see the public operators.
        bidirectional: see the public operators.
        sp: see the public operators.
        backend: see the public operators.
        strict: whether queries read the state before their own token.
        operands: the dtype in which kernels multiply, for inputs that the caller has widened; None
            for that of q, k and v.
        results: the dtype of the outputs, for callers who add to them; None for that of q.
        step: [B, T, H], >= 0, multiplied with the keys; for kind "scalar", as is the next.
        skip: [B, T, H], multiplied with the values and added to the outputs.
        names: what the public operator calls q, k, v and g.
    """
    if scale is not None:
        scale = float(scale)
    options = (name, kind, scale, backend, strict, operands, results, names)
    given = {names[0]: q, names[1]: k, names[2]: v, names[3]: g, "initial_state": initial_state}
    operator = _decide(*options, *map(signature_of, given.values()))
    if sp is not None and sp.check:
        check_no_nan(name, given)
    H = v.shape[2]
    if g is not None:
        check_log_decay(name, names[3], g, sp)
        g = repeat_heads(g, H)
    if operator.backend != "triton" or kind == "diagonal" or bidirectional:
        q, k = repeat_heads(q, H), repeat_heads(k, H)
    inputs = (q, k, v, g)
    added = None
    if step is not None or skip is not None:
        operator, inputs, added = _weigh(operator, inputs, step, skip, bidirectional)
    if bidirectional:
        check_stateless(name, initial_state, output_final_state)
        o, state = _from_both_ends(operator, inputs, cu_seqlens, sp), None
    else:
        o, state = run_operator(
            operator,
            inputs,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            sp=sp,
        )
    if added is not None:
        o = torch.addcmul(o, added.unsqueeze(-1), v)
    return o if results is None else o.to(results), state


@lru_cache(maxsize=256)
def _decide(
    name: str,
    kind: Kind,
    scale: float | None,
    backend: str,
    strict: bool,
    operands: torch.dtype | None,
    results: torch.dtype | None,
    names: tuple[str, str, str, str],
    *signatures: Signature | None,
) -> DecayOperator:
    """Check all of a call but values, and return its operator: the same for all calls alike."""
    q, k, v, g, initial_state = cast("tuple[Any, ...]", signatures)
    layout = "B T G K" if kind == "diagonal" else "B T G"
    sizes = check_inputs(
        name,
        {
            names[0]: (q, "B T Hk K"),
            names[1]: (k, "B T Hk K"),
            names[2]: (v, "B T H V"),
            names[3]: (g, layout),
        },
        initial_state=initial_state,
        sp=None,
    )
    H = sizes["H"]
    check_heads(name, H, **{names[0]: sizes["Hk"]})
    if g is not None and g.shape[2] not in (H, sizes["Hk"]):
        raise ArgumentError(
            f"{name}: {names[3]} has {g.shape[2]} heads, but must have the {H} of "
            f"{names[2]}" + ("" if sizes["Hk"] == H else f" or the {sizes['Hk']} of {names[0]}")
        )
    offered = OFFERED
    if operands is None:
        operands = common_dtype(q, k, v)
    wide = None if g is None or g.dtype != torch.float64 else g.dtype
    if backend == "auto" and why_not_triton(sizes["K"], sizes["V"], operands, wide):
        offered = ("torch",)
    return DecayOperator(
        name,
        kind,
        sizes["K"] ** -0.5 if scale is None else scale,
        backend=choose_backend(name, backend, q.device, offered),
        strict=strict,
        operands=operands,
        results=results,
    )


def _weigh(
    operator: DecayOperator,
    inputs: Inputs,
    step: Tensor | None,
    skip: Tensor | None,
    bidirectional: bool,
) -> tuple[DecayOperator, Inputs, Tensor | None]:
    """Give a call its steps and skips; return also the skips that are left to the caller.

    Kernels weigh tokens on their way, but in fp16, whose small numbers are too coarse for pairs with
    steps in them; elsewhere values are multiplied here.
    """
    q, k, v, g = cast("tuple[Tensor, Tensor, Tensor, Tensor]", inputs)
    if operator.backend == "triton" and operator.operands != torch.float16:
        if bidirectional:
            operator = _with_results(operator, state_dtype(v, g))
        return operator, (q, k, v, g, step, skip), None
    if step is not None:
        v = v * step.unsqueeze(-1)
    return _with_results(operator, state_dtype(v, g)), (q, k, v, g), skip


@lru_cache(maxsize=256)
def _with_results(operator: DecayOperator, dtype: torch.dtype) -> DecayOperator:
    """Return an operator whose outputs are to be added to."""
    return replace(operator, results=dtype)


def _from_both_ends(
    operator: DecayOperator,
    inputs: Inputs,
    cu_seqlens: Tensor | None,
    sp: Exchange | None,
) -> Tensor:
    """Run both directions; from the end, queries read what comes after their own token.

    That pass is strict, so that a token counts once; nor does it have skips. Strict queries read the
    state before their own token's decay; unless the operator is strict itself they apply that decay
    here.
    """
    q, k, v, g, *weights = cast("tuple[Tensor, Tensor, Tensor, Tensor | None]", inputs)
    if g is not None and not operator.strict:
        decay = g.exp() if g.ndim == q.ndim else g.exp().unsqueeze(-1)
        q = q.to(state_dtype(q, g)) * decay
    return run_both_directions(
        operator,
        inputs,
        backward=replace(operator, strict=True),
        backward_inputs=(q, k, v, g, *weights[:1]),
        cu_seqlens=cu_seqlens,
        sp=sp,
    )


def expand_log_decay(
    name: str, log_decay: Tensor, q: Tensor, v: Tensor, sp: Exchange | None
) -> Tensor:
    """Return a decay that is fixed for each head, log_decay [H or Hk], as gates [B, T, H or Hk]."""
    if q.ndim != 4 or v.ndim != 4:
        # The operator's own check says what is wrong with them.
        return q.new_zeros(q.shape[:3])
    counts = sorted({q.shape[2], v.shape[2]})
    if log_decay.ndim != 1 or len(log_decay) not in counts:
        raise ArgumentError(
            f"{name}: log_decay has shape {list(log_decay.shape)}, but must be "
            f"[{' or '.join(str(c) for c in counts)}], one a head"
        )
    check_inputs(
        name, {"log_decay": (log_decay, "H"), "q": (q, "B T G K")}, initial_state=None, sp=sp
    )
    check_log_decay(name, "log_decay", log_decay, sp)
    dtype = state_dtype(log_decay, q, v)
    return log_decay.to(dtype).expand(*q.shape[:2], -1)


def retnet_log_decay(num_heads: int, *, device: torch.device | None = None) -> Tensor:
    """Return RetNet's published decays, log(1 - 2^(-5-h)) for head h, fp64 [H].

    >>> retnet_log_decay(2).exp()
    tensor([0.9688, 0.9844], dtype=torch.float64)
    """
    heads = torch.arange(num_heads, dtype=torch.float64, device=device)
    return torch.log1p(-torch.exp2(-5 - heads))
