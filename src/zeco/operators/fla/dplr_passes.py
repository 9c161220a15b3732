"""Passes of RWKV-7 on Flash Linear Attention's kernels for diagonal plus low-rank transitions.

What FLA calls q is r here, gk is w. Its w and u are WY rows again, but of a token that writes twice:
``x = u + w S`` goes along b, v along k.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor

from zeco.core.captures import hold, is_capturing
from zeco.operators.fla.passes import PER_LN2, Passes, PassGradients, call_fla, taken
from zeco.operators.fla.runs import Runs
from zeco.operators.segment import Inputs

_DPLR = "ops.generalized_delta_rule.dplr."


@dataclass(frozen=True, eq=False)
class _Solved:
    """FLA's w, u, gi, ge, qg, kg, ag, bg, A_qk, A_qb, A_ak and the inverse of what A_ab leaves."""

    w: Tensor
    u: Tensor
    decay: Tensor
    decay_before: Tensor
    query: Tensor
    key: Tensor
    erase: Tensor
    direction: Tensor
    key_scores: Tensor
    scores: Tensor
    overlap: Tensor
    inverse: Tensor


class DplrPasses(Passes):
    """RWKV-7 with decays of any strength, in FLA's own choice of chunks for these.

    Inputs are r, w, k, v, a, b.
    """

    CHUNK = 16
    PROGRAMS = 256
    NUM_KEPT = 0

    BOUNDED: ClassVar[bool] = False
    """Whether decays are known to be weak enough for products of rows scaled both ways."""

    _solved: _Solved | None = None

    def __init__(self, inputs: Inputs, *, scale: float, runs: Runs) -> None:
        super().__init__(inputs, scale=scale, runs=runs)
        self.where["chunk_size"] = self.CHUNK

    @property
    def _rows(self) -> dict[str, Tensor]:
        """The inputs but v and the decays, by FLA's names."""
        q, _, k, _, a, b = cast("tuple[Tensor, ...]", self.inputs)
        return {"q": q, "k": k, "a": a, "b": b}

    @property
    def _v(self) -> Tensor:
        return cast("Tensor", self.inputs[3])

    def _call(self, module: str, function: str, **given: Any) -> Any:
        return call_fla(_DPLR + module, function, **given, **self.where)

    def _solve(self) -> _Solved:
        """Sum the gates within chunks and solve the chunks' systems."""
        if self._solved is None:
            gi, ge = call_fla(
                "ops.rwkv6.chunk",
                "chunk_rwkv6_fwd_cumsum",
                self.inputs[1],
                scale=PER_LN2,
                **self.where,
            )
            A_ab, A_qk, A_ak, A_qb, qg, kg, ag, bg = self._call(
                "chunk_A_fwd",
                "chunk_dplr_fwd_intra",
                gi=gi,
                ge=ge,
                scale=self.scale,
                safe_gate=self.BOUNDED,
                **self._rows,
            )
            w, u, inverse = self._call(
                "wy_fast_fwd",
                "prepare_wy_repr_fwd",
                ag=ag,
                A_ab=A_ab,
                A_ak=A_ak,
                v=self._v,
                safe_gate=self.BOUNDED,
            )
            self._solved = _Solved(w, u, gi, ge, qg, kg, ag, bg, A_qk, A_qb, A_ak, inverse)
        return self._solved

    def keep(self) -> tuple[Tensor, ...]:
        return ()

    def recall(self, kept: tuple[Tensor, ...]) -> None:
        del kept

    def maps(self, first: int, stop: int) -> Tensor:
        from zeco.kernels.delta.run_maps import run_maps

        s = self._solve()
        found = run_maps(
            s.direction,
            s.w,
            s.u,
            s.decay,
            beside=(s.key, self._v),
            chunk=self.CHUNK,
            cu_seqlens=self.runs.cu_seqlens,
            first=first,
            stop=stop,
        )
        return self._with_reach(*found)

    def _hold_offsets(self) -> None:
        """Keep the offsets of chunks that passes over states make, and FLA for its last few layouts."""
        cuts = self.runs.cu_seqlens
        if is_capturing(cuts.device):
            offsets = call_fla("ops.utils", "prepare_chunk_offsets", cuts, self.CHUNK)
            hold(offsets, cuts.device)

    def _states(self, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state that enters each chunk, x of the tokens, and the runs' ends."""
        s = self._solve()
        self._hold_offsets()
        return self._call(
            "chunk_h_fwd",
            "chunk_dplr_fwd_h",
            kg=s.key,
            v=self._v,
            w=s.w,
            u=s.u,
            bg=s.direction,
            gk=s.decay,
            initial_state=starts,
            output_final_state=True,
        )

    def outputs(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        s = self._solve()
        h, written, ends = self._states(starts)
        o = self._call(
            "chunk_o_fwd",
            "chunk_dplr_fwd_o",
            qg=s.query,
            v=self._v,
            v_new=written,
            A_qk=s.key_scores,
            A_qb=s.scores,
            h=h,
        )
        return o, ends

    def adjoints(self, d_o: Tensor) -> Tensor:
        from zeco.kernels.delta.adjoints import run_adjoints

        s = self._solve()
        return run_adjoints(
            s.query,
            s.direction,
            s.w,
            d_o,
            s.decay,
            scores=s.scores,
            scale=1.0,  # it is in the queries
            cu_seqlens=self.runs.cu_seqlens,
            reach=self.reach,
            chunk=self.CHUNK,
            adds=True,
        )

    def replay(self, starts: Tensor) -> None:
        h, written, _ = self._states(starts)
        self._replayed = h, written

    def gradients(self, d_o: Tensor, d_ends: Tensor) -> PassGradients:
        h, written = taken(self._replayed)
        self._replayed = None
        s, v = self._solve(), self._v
        inner, d_key_scores, d_scores = self._call(
            "chunk_o_bwd",
            "chunk_dplr_bwd_dAu",
            v=v,
            v_new=written,
            do=d_o,
            A_qb=s.scores,
            scale=self.scale,
        )
        self._hold_offsets()
        dh, d_starts, dx = self._call(
            "chunk_h_bwd",
            "chunk_dplr_bwd_dhu",
            qg=s.query,
            bg=s.direction,
            w=s.w,
            gk=s.decay,
            h0=d_ends,  # only its shape counts: FLA asks for it to return the gradient of one
            dht=d_ends,
            do=d_o,
            dv=inner,
        )
        dv = self._call(
            "chunk_o_bwd", "chunk_dplr_bwd_dv", A_qk=s.key_scores, kg=s.key, do=d_o, dh=dh
        )
        d_query, d_key, dw, d_direction, d_total = self._call(
            "chunk_o_bwd",
            "chunk_dplr_bwd_o",
            k=s.key,
            b=s.direction,
            v=v,
            v_new=written,
            do=d_o,
            h=h,
            dh=dh,
            dv=dx,
            w=s.w,
            gk=s.decay,
        )
        d_inverse, d_overlap, dv, d_erase = self._call(
            "wy_fast_bwd",
            "chunk_dplr_bwd_wy",
            A_ab_inv=s.inverse,
            A_ak=s.overlap,
            v=v,
            ag=s.erase,
            dw=dw,
            du=dx,
            dv0=dv,
        )
        dq, dk, da, db, dg = self._call(
            "chunk_A_bwd",
            "chunk_dplr_bwd_dqk_intra",
            gi=s.decay,
            ge=s.decay_before,
            dAqk=d_key_scores,
            dAqb=d_scores,
            dAak=d_overlap,
            dAab=d_inverse,
            dgk_last=d_total,
            dqg=d_query,
            dkg=d_key,
            dag=d_erase,
            dbg=d_direction,
            scale=self.scale,
            safe_gate=self.BOUNDED,
            **self._rows,
        )
        return PassGradients((dq, dg, dk, dv, da, db), d_starts)


class BoundedDplrPasses(DplrPasses):
    """RWKV-7 with decays bounded from below, as its layers have them: FLA's longer chunks."""

    CHUNK = 64
    BOUNDED = True


def dplr_passes(K: int, lower_bound: float | None) -> type[DplrPasses]:
    """Return the passes for a key dim and log decays of at least ``lower_bound``, if that is known."""
    takes_longer = getattr(importlib.import_module("fla.utils"), "TRITON_ABOVE_3_4_0")  # noqa: B009
    if lower_bound is None or K > _MAX_BOUNDED_DIM or not takes_longer:
        return DplrPasses
    chunk = BoundedDplrPasses.CHUNK
    safe = call_fla(_DPLR + "chunk", "gate_bound_is_safe", lower_bound, chunk)
    return BoundedDplrPasses if safe else DplrPasses


# Above, a chunk's four rows of fp32 don't fit into registers.
_MAX_BOUNDED_DIM = 128
