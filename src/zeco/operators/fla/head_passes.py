"""Passes of the delta rule and the gated delta rule on Flash Linear Attention's kernels.

Both go through the kernels of FLA's gated delta rule, which take None for a gate; those of its delta
rule compute the same without. One kernel is this package's: see `zeco.kernels.delta.gradients`.
"""

from __future__ import annotations

from torch import Tensor

from zeco.operators.fla.passes import DeltaPasses, PassGradients, call_fla, taken


class HeadPasses(DeltaPasses):
    """No gate, or one decay a head: the delta rule and the gated delta rule."""

    NUM_KEPT = 1

    _solved: tuple[Tensor, Tensor, Tensor] | None = None
    _inner: Tensor | None = None

    def _solve(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return w, u and A."""
        if self._solved is None:
            w, u, A = call_fla(
                "ops.gated_delta_rule.chunk_fwd",
                "chunk_gated_delta_rule_fwd_intra",
                k=self.k,
                v=self.v,
                g=self._decay,
                beta=self.beta,
                chunk_size=self.CHUNK,
                **self.where,
            )
            self._solved = w, u, A
        return self._solved

    def keep(self) -> tuple[Tensor, ...]:
        return (self._solve()[2],)

    def recall(self, kept: tuple[Tensor, ...]) -> None:
        (A,) = kept
        w, u = call_fla(
            "ops.gated_delta_rule.wy_fast",
            "recompute_w_u_fwd",
            k=self.k,
            v=self.v,
            beta=self.beta,
            A=A,
            g=self._decay,
            **self.where,
        )
        self._solved = w, u, A

    def maps(self, first: int, stop: int) -> Tensor:
        w, u, _ = self._solve()
        return self._maps(self.k, w, u, first, stop)

    def outputs(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        w, u, _ = self._solve()
        h, written, ends = self._states(self.k, w, u, starts, g=self._decay)
        o = call_fla(
            "ops.common.chunk_o",
            "chunk_fwd_o",
            q=self.q,
            k=self.k,
            v=written,
            h=h,
            g=self._decay,
            scale=self.scale,
            chunk_size=self.CHUNK,
            **self.where,
        )
        return o, ends

    def _inner_values(self, d_o: Tensor) -> Tensor:
        """Return what the outputs send to what the tokens of their chunk write."""
        inner = self._inner
        if inner is None:
            inner = call_fla(
                "ops.common.chunk_o",
                "chunk_bwd_dv_local",
                q=self.q,
                k=self.k,
                do=d_o,
                g=self._decay,
                scale=self.scale,
                chunk_size=self.CHUNK,
                **self.where,
            )
            self._inner = inner
        return inner

    def adjoints(self, d_o: Tensor) -> Tensor:
        w, _, _ = self._solve()
        return self._own_adjoints(self.q, self.k, w, d_o, inner=self._inner_values(d_o))

    def replay(self, starts: Tensor) -> None:
        w, u, _ = self._solve()
        h, written, _ = self._states(self.k, w, u, starts, g=self._decay)
        self._replayed = h, written

    def gradients(self, d_o: Tensor, d_ends: Tensor) -> PassGradients:
        from zeco.kernels.delta.gradients import row_gradients

        h, written = taken(self._replayed)
        self._replayed = None
        w, _, A = self._solve()
        dh, d_starts, du = self._adjoints(
            self.q, self.k, w, d_o, self._inner_values(d_o), d_ends, g=self._decay
        )
        rows = row_gradients(
            self.q,
            self.k,
            written,
            h,
            self._decay,
            d_o,
            du,
            dh,
            scale=self.scale,
            **self.where,
        )
        dk, dv, d_beta, dg = call_fla(
            "ops.gated_delta_rule.wy_fast",
            "prepare_wy_repr_bwd",
            k=self.k,
            v=self.v,
            beta=self.beta,
            g=self._decay,
            A=A,
            dw=rows.w,
            du=du,
            **self.where,
        )
        if rows.decay is not None:
            dg = call_fla(
                "ops.utils",
                "chunk_local_cumsum",
                dg.add_(rows.decay),
                chunk_size=self.CHUNK,
                reverse=True,
                **self.where,
            )
        return PassGradients((rows.q, dk.add_(rows.k), dv, dg, d_beta), d_starts)
