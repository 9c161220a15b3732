"""Both directions at once, for encoders: an operator run forwards, and again from the end.

The second pass is the operator over the reversed sequence, its outputs turned around. Ranks need no
other arrangement for it: in reverse a contiguous sequence runs over the same ranks from the last to
the first, and in the layout "zigzag" each rank's slots simply change places (`Exchange.mirrored`).

What the second pass reads of a token itself depends on the family; P is the product of decays:

| family | o_t |
| --- | --- |
| decay (all but the following) | scale · q_t · (Σ_{j≤t} P(j,t] k_j v_jᵀ + Σ_{j>t} P[t,j) k_j v_jᵀ) |
| RWKV-6 | scale · r_t · (Σ_{j<t} P(j,t) k_j v_jᵀ + diag(u) k_t v_tᵀ + Σ_{j>t} P(t,j) k_j v_jᵀ) |
| delta rules, RWKV-7 | forward output + backward output; both contain the token's own write |

So in the decay family every token counts once; without decay the result is full attention, and with a
fixed decay a token counts alike from both sides. P(j,t] multiplies the decays of the tokens after j up
to t, P[t,j) those from t up to just before j. The delta rules write the difference to what the state
holds already, which has no part that is the token's alone, so there is nothing to take out of their sum.
"""

from __future__ import annotations

from torch import Tensor

from zeco.core.errors import ArgumentError
from zeco.operators.function import run_operator
from zeco.operators.segment import Exchange, Inputs, Operator


def run_both_directions(
    forward: Operator,
    inputs: Inputs,
    *,
    backward: Operator | None = None,
    backward_inputs: Inputs | None = None,
    cu_seqlens: Tensor | None,
    sp: Exchange | None,
) -> Tensor:
    """Return the sum of an operator's outputs and of those of the pass from the end.

    Args:
        forward: the operator.
        inputs: its tensors, tokens in dim 1.
        backward: the operator that runs from the end; None for the same.
        backward_inputs: its tensors, in the order of the sequence; None for the same.
        cu_seqlens: global document boundaries, or None.
        sp: the exchange between ranks, or None.
    """
    backward = forward if backward is None else backward
    given = inputs if backward_inputs is None else backward_inputs
    mirrored = None if cu_seqlens is None else (cu_seqlens[-1:] - cu_seqlens).flip(0)
    o, _ = run_operator(
        forward,
        inputs,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=cu_seqlens,
        sp=sp,
    )
    from_end, _ = run_operator(
        backward,
        tuple(None if x is None else x.flip(1) for x in given),
        initial_state=None,
        output_final_state=False,
        cu_seqlens=mirrored,
        sp=None if sp is None else sp.mirrored(),
    )
    return (o + from_end.flip(1)).to(o.dtype)


def check_stateless(name: str, initial_state: Tensor | None, output_final_state: bool) -> None:
    """Refuse states, which a sequence that is read from both ends doesn't have."""
    argument = "initial_state" if initial_state is not None else "output_final_state=True"
    if initial_state is not None or output_final_state:
        raise ArgumentError(
            f"{name}: {argument} was given with bidirectional=True, but a sequence that is read "
            "from both ends has no state before or after it; leave it out, or call the operator "
            "once for each direction"
        )
