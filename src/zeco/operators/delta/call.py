"""The delta rules without a gate, with a gate a head and with a gate a channel: one segment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from zeco.core.documents import Pieces
from zeco.core.errors import ArgumentError
from zeco.operators.arguments import check_heads, check_inputs, check_log_decay, repeat_heads
from zeco.operators.backends import choose_backend
from zeco.operators.bidirectional import check_stateless, run_both_directions
from zeco.operators.decay.gates import ChunkGates, chunk_gates
from zeco.operators.delta.core import Exact
from zeco.operators.delta.segment import DeltaFamilySegment, scaled
from zeco.operators.fla.channel_passes import ChannelPasses
from zeco.operators.fla.check import why_not_fla
from zeco.operators.fla.head_passes import HeadPasses
from zeco.operators.fla.segment import FlaDeltaSegment
from zeco.operators.function import run_operator
from zeco.operators.segment import Exchange, Inputs

OFFERED = ("torch", "fla")

# Added to the squared norm of queries and keys, as Flash Linear Attention does.
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class DeltaRuleOperator:
    """A delta rule with its options fixed; inputs are q, k, v, g, beta, with g None for no gate.

    Attributes:
        name: the public name, for messages.
        scale: factor of the queries.
        backend: which implementation runs.
        chunk: tokens a chunk, a power of two.
    """

    name: str
    scale: float
    backend: str = "torch"
    chunk: int = 64

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the tensors."""
        return ("q", "k", "v", "g", "beta")

    def state_shape(self, inputs: Inputs) -> tuple[int, int, int, int]:
        """Return [B, H, K, V] of the states."""
        _, k, v, _, _ = cast("tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]", inputs)
        return k.shape[0], k.shape[2], k.shape[3], v.shape[3]

    def segment(self, inputs: Inputs, pieces: Pieces) -> DeltaRuleSegment | FlaDeltaSegment:
        """Return the call of this operator on a rank's tokens."""
        if self.backend == "fla":
            g = inputs[3]
            kind = HeadPasses if g is None or g.ndim == 3 else ChannelPasses
            return FlaDeltaSegment(self, inputs, pieces, kind)
        return DeltaRuleSegment(self, inputs, pieces)


class DeltaRuleSegment(DeltaFamilySegment):
    """One call of a delta rule; u_t includes the written value, so there is one write a token."""

    @cached_property
    def gates(self) -> ChunkGates | None:
        """Cumulative decays of g [B, T, H] or [B, T, H, K]."""
        return None if self._g is None else chunk_gates(self._g, strict=False)

    @cached_property
    def _g(self) -> Tensor | None:
        return None if self.inputs[3] is None else self.chunks(3)

    @cached_property
    def _key(self) -> Tensor:
        return self.chunks(1)

    @cached_property
    def _beta(self) -> Tensor:
        return self.chunks(4)

    @cached_property
    def query(self) -> Tensor:
        """Queries up to and with their own decay."""
        gates = self.gates
        exponent = None if gates is None else gates.query
        return scaled(self.chunks(0), exponent, self.operator.scale)

    @cached_property
    def erase(self) -> Tensor:
        """``-β k``, which reads the state after the own token's decay."""
        gates = self.gates
        exponent = None if gates is None else gates.query
        return scaled(self._key * self._beta, exponent, -1.0)

    @cached_property
    def direction(self) -> Tensor:
        """Keys."""
        gates = self.gates
        return scaled(self._key, None if gates is None else gates.key)

    def exact_overlap(self) -> Exact:
        """Return ``-β_t k_t · k_j`` where the fast form does not do."""
        if not self.needs_exact:
            return None, None
        return self.exact_part(self._key * -self._beta, self._key, self._g, strict=False)

    def exact_scores(self) -> Exact:
        """Return ``q_t · k_j`` where the fast form does not do."""
        if not self.needs_exact:
            return None, None
        query = self.chunks(0) * self.operator.scale
        return self.exact_part(query, self._key, self._g, strict=False)

    def source(self) -> Tensor:
        """Return the values to be written, ``β v``."""
        return (self.chunks(2) * self._beta).flatten(0, 2)


def run_delta_rule(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    gate_layout: str | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    bidirectional: bool,
    use_qk_l2norm_in_kernel: bool,
    sp: Exchange | None,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments, give every input the value heads' count, and run the operator.

    Args:
        name: the public operator.
        q: [B, T, Hk, K].
        k: [B, T, Hk, K].
        v: [B, T, H, V].
        g: log decays, or None.
        beta: [B, T, H or Hk].
        gate_layout: the dims of g after B and T: ``"H"``, ``"H K"`` or None.
        scale: factor of the queries, or None for K**-0.5.
        initial_state: see the public operators.
        output_final_state: see the public operators.
        cu_seqlens: see the public operators.
        bidirectional: see the public operators.
        use_qk_l2norm_in_kernel: see the public operators.
        sp: see the public operators.
        backend: see the public operators.
    """
    layouts = {"q": (q, "B T Hk K"), "k": (k, "B T Hk K"), "v": (v, "B T H V")}
    gates = {"beta": (beta, "B T Hb")}
    if gate_layout is not None:
        if g is None:
            raise ArgumentError(f"{name}: g is required; without a gate use delta_rule")
        gates["g"] = (g, "B T " + gate_layout.replace("H", "Hg"))
    sizes = check_inputs(name, {**layouts, **gates}, initial_state=initial_state, sp=sp)
    H, Hk = sizes["H"], sizes["Hk"]
    check_heads(name, H, q=Hk)
    check_gate_heads(name, {argument: x for argument, (x, _) in gates.items()}, H, Hk)
    if g is not None:
        check_log_decay(name, "g", g, sp)
        g = repeat_heads(g, H)
    if use_qk_l2norm_in_kernel:
        q, k = unit_norm(q), unit_norm(k)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    dtypes = {argument: None if x is None else x.dtype for argument, x in given.items()}
    refused = {"fla": why_not_fla(sizes["K"], sizes["V"], **dtypes)}
    operator = DeltaRuleOperator(
        name,
        sizes["K"] ** -0.5 if scale is None else float(scale),
        backend=choose_backend(name, backend, q.device, OFFERED, refused),
    )
    inputs = (repeat_heads(q, H), repeat_heads(k, H), v, g, repeat_heads(beta, H))
    if bidirectional:
        check_stateless(name, initial_state, output_final_state)
        return run_both_directions(operator, inputs, cu_seqlens=cu_seqlens, sp=sp), None
    return run_operator(
        operator,
        inputs,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        sp=sp,
    )


def check_gate_heads(name: str, gates: Mapping[str, Tensor], H: int, Hk: int) -> None:
    """Refuse gates whose heads are neither the value heads nor the key heads."""
    for argument, x in gates.items():
        if x.shape[2] not in (H, Hk):
            raise ArgumentError(
                f"{name}: {argument} has {x.shape[2]} heads, but must have the {H} of v"
                + ("" if Hk == H else f" or the {Hk} of q and k")
            )


def unit_norm(x: Tensor) -> Tensor:
    """Scale the last dim to length one, in fp32 or better, and return the dtype of x."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt()).to(x.dtype)
