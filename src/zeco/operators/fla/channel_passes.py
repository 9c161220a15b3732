"""Passes of KDA on Flash Linear Attention's kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zeco.operators.fla.passes import DeltaPasses, PassGradients, call_fla, taken


@dataclass(frozen=True, eq=False)
class _Solved:
    """What KDA's passes share: FLA's w, u, kg, qg (None until it is asked for), Aqk and Akk."""

    w: Tensor
    u: Tensor
    key: Tensor
    query: Tensor | None
    scores: Tensor
    inverse: Tensor


class ChannelPasses(DeltaPasses):
    """One decay a key channel: KDA.

    Gates of any strength are taken: FLA's ``safe_gate``, which is faster and bounds them, stays off.
    """

    NUM_KEPT = 2

    _solved: _Solved | None = None

    def _solve(self, *, queries: bool = False) -> _Solved:
        """Solve the chunks' systems; ``queries`` are decayed for the passes backward only."""
        if self._solved is None or (queries and self._solved.query is None):
            w, u, query, key, scores, inverse = call_fla(
                "ops.kda.chunk_intra",
                "chunk_kda_fwd_intra",
                q=self.q,
                k=self.k,
                v=self.v,
                gk=self._decay,
                beta=self.beta,
                scale=self.scale,
                chunk_size=self.CHUNK,
                safe_gate=False,
                disable_recompute=queries,
                **self.where,
            )
            self._solved = _Solved(w, u, key, query, scores, inverse)
        return self._solved

    def keep(self) -> tuple[Tensor, ...]:
        s = self._solve()
        return s.scores, s.inverse

    def recall(self, kept: tuple[Tensor, ...]) -> None:
        scores, inverse = kept
        w, u, query, key = call_fla(
            "ops.kda.wy_fast",
            "recompute_w_u_fwd",
            q=self.q,
            k=self.k,
            v=self.v,
            beta=self.beta,
            A=inverse,
            gk=self._decay,
            **self.where,
        )
        self._solved = _Solved(w, u, key, query, scores, inverse)

    def maps(self, first: int, stop: int) -> Tensor:
        s = self._solve()
        return self._maps(s.key, s.w, s.u, first, stop)

    def outputs(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        s = self._solve()
        h, written, ends = self._states(s.key, s.w, s.u, starts, gk=self._decay)
        o = call_fla(
            "ops.gla.chunk",
            "chunk_gla_fwd_o_gk",
            q=self.q,
            v=written,
            g=self._decay,
            A=s.scores,
            h=h,
            scale=self.scale,
            chunk_size=self.CHUNK,
            **self.where,
        )
        return o, ends

    def adjoints(self, d_o: Tensor) -> Tensor:
        s = self._solve(queries=True)
        return self._own_adjoints(taken(s.query), s.key, s.w, d_o, scores=s.scores)

    def replay(self, starts: Tensor) -> None:
        s = self._solve(queries=True)
        h, written, _ = self._states(s.key, s.w, s.u, starts, gk=self._decay)
        self._replayed = h, written

    def gradients(self, d_o: Tensor, d_ends: Tensor) -> PassGradients:
        h, written = taken(self._replayed)
        self._replayed = None
        s = self._solve(queries=True)
        common = {"chunk_size": self.CHUNK, **self.where}
        rows = {"q": self.q, "k": self.k, "g": self._decay, "beta": self.beta, **common}
        d_scores, inner = call_fla(
            "ops.kda.chunk_bwd",
            "chunk_kda_bwd_dAv",
            q=self.q,
            k=self.k,
            v=written,
            do=d_o,
            A=s.scores,
            scale=self.scale,
            **common,
        )
        query = taken(s.query)
        dh, d_starts, du = self._adjoints(query, s.key, s.w, d_o, inner, d_ends, gk=self._decay)
        dq, dk, dv, d_beta, dg, d_inverse = call_fla(
            "ops.kda.chunk_bwd",
            "chunk_kda_bwd_wy_dqkg_fused",
            v=self.v,
            v_new=written,
            A=s.inverse,
            h=h,
            do=d_o,
            dh=dh,
            dv=du,
            scale=self.scale,
            **rows,
        )
        dq, dk, d_beta, dg = call_fla(
            "ops.kda.chunk_intra",
            "chunk_kda_bwd_intra",
            dAqk=d_scores,
            dAkk=d_inverse,
            dq=dq,
            dk=dk,
            db=d_beta,
            dg=dg,
            safe_gate=False,
            **rows,
        )
        dg = call_fla("ops.utils", "chunk_local_cumsum", dg, reverse=True, **common)
        return PassGradients((dq, dk, dv, dg, d_beta), d_starts)
