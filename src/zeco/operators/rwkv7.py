"""RWKV-7: one decay a key channel plus a matrix of rank one, the general form of the family."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from zeco.core.documents import Pieces
from zeco.core.errors import ArgumentError
from zeco.operators.arguments import (
    are_looked_at,
    check_heads,
    check_inputs,
    check_log_decay,
    documented,
    repeat_heads,
)
from zeco.operators.backends import choose_backend
from zeco.operators.bidirectional import check_stateless, run_both_directions
from zeco.operators.decay.gates import ChunkGates, causal_scores, chunk_gates
from zeco.operators.delta.core import Exact
from zeco.operators.delta.segment import DeltaFamilySegment, scaled
from zeco.operators.fla.check import why_not_fla
from zeco.operators.fla.dplr_passes import dplr_passes
from zeco.operators.fla.segment import FlaDeltaSegment
from zeco.operators.function import operator_call, run_operator
from zeco.operators.segment import Exchange, Inputs

# By how much a bound may be missed: w may have been rounded to 16 bits.
_ROUNDING = 0.01


@dataclass(frozen=True)
class RWKV7Operator:
    """RWKV-7 with its options fixed; inputs are r, w, k, v, a, b.

    Attributes:
        scale: factor of the receptances.
        backend: which implementation runs.
        lower_bound: of w, or None where it has none.
        chunk: tokens a chunk, a power of two, of the torch backend.
        name: the public name, for messages.
    """

    scale: float
    backend: str = "torch"
    lower_bound: float | None = None
    chunk: int = 64
    name: str = "rwkv7"

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the tensors."""
        return ("r", "w", "k", "v", "a", "b")

    def state_shape(self, inputs: Inputs) -> tuple[int, int, int, int]:
        """Return [B, H, K, V] of the states."""
        k, v = cast("tuple[Tensor, Tensor]", inputs[2:4])
        return k.shape[0], k.shape[2], k.shape[3], v.shape[3]

    def segment(self, inputs: Inputs, pieces: Pieces) -> RWKV7Segment | FlaDeltaSegment:
        """Return the call of this operator on a rank's tokens."""
        if self.backend == "fla":
            kind = dplr_passes(self.state_shape(inputs)[2], self.lower_bound)
            return FlaDeltaSegment(self, inputs, pieces, kind)
        return RWKV7Segment(self, inputs, pieces)


class RWKV7Segment(DeltaFamilySegment):
    """One call of RWKV-7: u_tᵀ = a_tᵀ S_{t-1} goes along b_t, v_t along k_t."""

    @cached_property
    def _w(self) -> Tensor:
        return self.chunks(1)

    @cached_property
    def gates(self) -> ChunkGates:
        """Cumulative decays of w."""
        return chunk_gates(self._w, strict=False)

    @cached_property
    def query(self) -> Tensor:
        """Receptances up to and with their own decay."""
        return scaled(self.chunks(0), self.gates.query, self.operator.scale)

    @cached_property
    def erase(self) -> Tensor:
        """``a``, which reads the state before the own token's decay."""
        return scaled(self.chunks(4), chunk_gates(self._w, strict=True).query)

    @cached_property
    def direction(self) -> Tensor:
        """``b``."""
        return scaled(self.chunks(5), self.gates.key)

    @cached_property
    def _key(self) -> Tensor:
        return scaled(self.chunks(2), self.gates.key)

    @cached_property
    def _value(self) -> Tensor:
        return self.chunks(3).flatten(0, 2)

    def exact_overlap(self) -> Exact:
        """Return ``a_t · b_j`` where the fast form does not do."""
        return self._exact(4, 5, strict=True)

    def exact_scores(self) -> Exact:
        """Return ``r_t · b_j`` where the fast form does not do."""
        return self._exact(0, 5, factor=self.operator.scale)

    def source(self) -> Tensor:
        """Return what ``a`` reads of values written earlier in the chunk."""
        exact = self._exact(4, 2, strict=True)
        return torch.bmm(causal_scores(self.erase, self._key, *exact, strict=True), self._value)

    def written(self) -> Tensor:
        """Return ``kᵀ v``."""
        return torch.bmm(self._key.mT, self._value)

    def attended(self) -> Tensor:
        """Attend to values within the chunk."""
        exact = self._exact(0, 2, factor=self.operator.scale)
        return torch.bmm(causal_scores(self.query, self._key, *exact, strict=False), self._value)

    def _exact(self, x: int, y: int, *, strict: bool = False, factor: float = 1.0) -> Exact:
        if not self.needs_exact:
            return None, None
        return self.exact_part(self.chunks(x) * factor, self.chunks(y), self._w, strict=strict)


@documented
@operator_call
def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    bidirectional: bool = False,
    lower_bound: float | None = None,
    sp: Exchange | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attend to a state that decays by channel and moves what it holds along a to b.

        S_t = (diag(exp(w_t)) + b_t a_tᵀ) S_{t-1} + k_t v_tᵀ        o_t = scale · S_tᵀ r_t

    Args:
        r: receptances [B, T, Hk, K].
        w: natural logarithm of the decays [B, T, Hk, K], <= 0.
        k: keys [B, T, Hk, K].
        v: values [B, T, H, V], H a multiple of Hk.
        a: what is read of the state before its decay [B, T, Hk, K]; RWKV-7 has the negative
            normalised removal key there.
        b: where it is added [B, T, Hk, K]; RWKV-7 has that key times the learning rate there.
        scale: factor of the receptances; 1.0 by default.
        lower_bound: what no w is below, if that is known: -exp(-1/2) in RWKV-7. Backend ``"fla"``
            takes longer chunks then, where the bound allows it; the numbers are the same.
        <common without scale>

    Source: Peng et al., arXiv:2503.14456, with the state transposed.

    >>> import torch
    >>> one = torch.ones(1, 3, 1, 1)
    >>> rwkv7(one, 0 * one, one, one, -one, one)[0].flatten().tolist()
    [1.0, 1.0, 1.0]
    """
    keyed = {"r": r, "w": w, "k": k, "a": a, "b": b}
    layouts = {argument: (x, "B T Hk K") for argument, x in keyed.items()}
    sizes = check_inputs(
        "rwkv7", {**layouts, "v": (v, "B T H V")}, initial_state=initial_state, sp=sp
    )
    H = sizes["H"]
    check_heads("rwkv7", H, k=sizes["Hk"])
    check_log_decay("rwkv7", "w", w, sp)
    check_lower_bound(w, lower_bound, sp)
    refused = why_not_fla(
        sizes["K"], sizes["V"], v=v.dtype, **{n: x.dtype for n, x in keyed.items()}
    )
    operator = RWKV7Operator(
        1.0 if scale is None else float(scale),
        backend=choose_backend("rwkv7", backend, r.device, ("torch", "fla"), {"fla": refused}),
        lower_bound=lower_bound,
    )
    r, w, k, a, b = (repeat_heads(x, H) for x in keyed.values())
    inputs = (r, w, k, v, a, b)
    if bidirectional:
        check_stateless("rwkv7", initial_state, output_final_state)
        return run_both_directions(operator, inputs, cu_seqlens=cu_seqlens, sp=sp), None
    return run_operator(
        operator,
        inputs,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        sp=sp,
    )


def check_lower_bound(w: Tensor, lower_bound: float | None, sp: Exchange | None) -> None:
    """Refuse a bound that isn't below zero, and where values are looked at, those below it."""
    if lower_bound is None:
        return
    if not lower_bound < 0:
        raise ArgumentError(
            f"rwkv7: lower_bound is {lower_bound}, but must be below 0: it is what no w is below"
        )
    if are_looked_at(w, sp):
        low = float(w.detach().amin())
        if low < lower_bound * (1 + _ROUNDING):
            raise ArgumentError(
                f"rwkv7: w has values down to {low:.4g}, below lower_bound {lower_bound:.4g}; give "
                "a bound that holds, or none"
            )
