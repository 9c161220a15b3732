"""Launchers of the diagonal decay family: one function a pass; see `zeco.kernels.decay.plan` for sizes.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ         o_t = scale · S_tᵀ q_t

q, k [B, T, H, K], v [B, T, H, V], g [B, T, H, K] (natural logarithms, <= 0), states [B, H, K, V] in
fp32. No autograd and no communication: a caller may compute anything between the passes. The
chunkwise form is that of GLA (Yang et al., arXiv:2312.06635, section 4); the cut into segments, the
scaling around a chunk's middle and the gates' gradient are this package's.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from zeco.kernels.chunkwise import passes as chunkwise
from zeco.kernels.chunkwise import rows as chunkwise_rows
from zeco.kernels.decay.cuts import Pairs
from zeco.kernels.decay.pairs import level_weights, strong_pairs_fwd_kernel
from zeco.kernels.decay.plan import Plan
from zeco.kernels.decay.state import segment_scan_kernel, state_fwd_kernel
from zeco.kernels.decay.walk import output_walk_kernel
from zeco.kernels.launch import describe, launch


class Chunks(NamedTuple):
    """What the state pass learns about the gates of each chunk, in base 2.

    Attributes:
        total: total log decay [B·H, N, K].
        ratio: what a state is scaled by between a chunk and the next [B, N, H, K], laid as the total;
            None with wide keys.
        strong: whether any channel is strong [B·H, N].
        scales: what later passes scale rows by, packed in 16 bits, or the gates themselves.
        form: which of the two; see `zeco.kernels.decay.gate_sums.read_gates`.
        rows: scaled rows of wide keys; else None.
    """

    total: Tensor
    ratio: Tensor | None
    strong: Tensor
    scales: Tensor
    form: int
    rows: chunkwise_rows.Rows | None = None


class States(NamedTuple):
    """States at the boundaries of segments, from a zero start, for one direction of time.

    Attributes:
        states: [S+1, B·H, K, V].
        passed: base-2 log decay from the start of the walk [S+1, B·H, K].
        log_decay: the rank's total log decay [B, H, K].
        last: the boundary at which the walk ends.
    """

    states: Tensor
    passed: Tensor
    log_decay: Tensor
    last: int

    @property
    def own(self) -> Tensor:
        """The rank's own state [B, H, K, V]: the update, or the adjoint's."""
        return self.states[self.last].unflatten(0, self.log_decay.shape[:2])

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.states.nbytes + self.passed.nbytes + self.log_decay.nbytes

    def at(self, boundaries: list[int], entering: Tensor | None) -> Tensor:
        """Return the states [n, B, H, K, V] at some boundaries, what enters [B, H, K, V] injected."""
        own = self.states[boundaries].unflatten(1, self.log_decay.shape[:2])
        if entering is None:
            return own
        passed = self.passed[boundaries].exp2().unflatten(1, entering.shape[:2]).unsqueeze(-1)
        return torch.where(passed > 0, own + passed * entering, own)


def state_pass(
    plan: Plan, k: Tensor, v: Tensor, g: Tensor, initials: Tensor | None = None
) -> tuple[States, Chunks]:
    """Return the states of a walk forwards in time and what the gates are like.

    Args:
        plan: the call's plan.
        k, v, g: the call's inputs.
        initials: the states [n, B, H, K, V] after the plan's breaks, or None for zeros.
    """
    return _states(plan, k, v, g, initials, scale=1.0, adjoint=False)


def adjoint_state_pass(
    plan: Plan, q: Tensor, d_o: Tensor, g: Tensor, d_finals: Tensor | None = None, *, scale: float
) -> tuple[States, Chunks]:
    """Return the adjoint states of a walk backwards in time, and what the gates are like.

    Args:
        plan: the call's plan.
        q, g: the call's inputs.
        d_o: gradient of the outputs [B, T, H, V].
        d_finals: gradient [n, B, H, K, V] of the states after the pieces but the last, or None.
        scale: factor of the queries.
    """
    return _states(plan, q, d_o, g, d_finals, scale=scale, adjoint=True)


def _states(
    plan: Plan,
    x: Tensor,
    y: Tensor,
    g: Tensor,
    starts: Tensor | None,
    *,
    scale: float,
    adjoint: bool,
) -> tuple[States, Chunks]:
    heads, S, N, K, V = plan.heads, plan.num_segments, plan.num_chunks, plan.K, plan.V
    fp32 = {"dtype": torch.float32, "device": x.device}
    bk, bv = min(plan.block_k, 128), min(plan.block_v, 128)
    k_blocks, v_blocks = -(-K // bk), -(-V // bv)
    flags = torch.empty if k_blocks == 1 else torch.zeros
    wide = plan.cuts.chunkwise is not None
    chunks = Chunks(
        total=torch.empty(heads, N, K, **fp32),
        ratio=None if wide else torch.empty_strided(*plan.chunk_rows, **fp32),
        strong=flags(heads, N, dtype=torch.int32, device=x.device),
        scales=torch.empty(g.shape, dtype=torch.int16, device=g.device) if plan.packed else g,
        form=3 if plan.packed else plan.form,
        rows=chunkwise_rows.Rows() if wide else None,
    )
    if wide:
        x = chunkwise_rows.scale_by_gates(plan, x, g, chunks, scale=scale, keys=not adjoint)
        weights = chunkwise.Weights(chunks=chunks)
        updates, decays = chunkwise.segment_updates(plan, x, y, weights, scale, reverse=adjoint)
        return scan_segments(plan, updates, decays, starts, adjoint=adjoint), chunks
    updates, decays = torch.empty(heads, S, K, V, **fp32), torch.empty(heads, S, K, **fp32)
    launch(
        state_fwd_kernel,
        heads * S * k_blocks * v_blocks,
        describe(x, plan.chunk, bk),
        describe(y, plan.chunk, bv),
        describe(g, plan.chunk, bk),
        describe(chunks.scales, plan.chunk, bk),
        updates,
        decays,
        chunks.total,
        chunks.ratio,
        chunks.strong,
        plan.table,
        scale,
        plan.H,
        N,
        S,
        plan.chunks_per_segment,
        K=K,
        V=V,
        C=plan.chunk,
        BK=bk,
        BV=bv,
        GROUP=plan.group,
        FORM=plan.form,
        EXACT=plan.exact,
        LIMIT=plan.limit,
        ADJOINT=adjoint,
        PACKED=plan.packed,
        STAGES=plan.cuts.state_stages,
        num_warps=plan.cuts.state_warps,
        known=plan.launches,
    )
    return scan_segments(plan, updates, decays, starts, adjoint=adjoint), chunks


def scan_segments(
    plan: Plan, updates: Tensor, decays: Tensor, starts: Tensor | None, *, adjoint: bool
) -> States:
    """Compose the maps of the segments: updates [B·H, S, K, V], base-2 log decays [B·H, S, K]."""
    heads, S, K, V = updates.shape
    fp32 = {"dtype": torch.float32, "device": updates.device}
    states, passed = torch.empty(S + 1, heads, K, V, **fp32), torch.empty(S + 1, heads, K, **fp32)
    log_decay = torch.empty(plan.B, plan.H, K, **fp32)
    rows, cols = 16, min(64, plan.block_v)
    launch(
        segment_scan_kernel,
        heads * -(-K // rows) * -(-V // cols),
        updates,
        decays,
        states,
        passed,
        log_decay,
        plan.table,
        starts,
        # Backwards in time, a break takes what belongs to the piece before; the first has none.
        -1 if adjoint and plan.breaks[:1] == (0,) else 0,
        heads,
        S,
        K=K,
        V=V,
        BK=rows,
        BV=cols,
        ADJOINT=adjoint,
        num_warps=4,
        known=plan.launches,
    )
    return States(states, passed, log_decay, last=0 if adjoint else S)


def output_pass(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float,
    states: States,
    chunks: Chunks,
    entering: Tensor | None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, T, H, V] and the state that leaves, given the one that enters, if any.

    The outputs have ``dtype``, or that of the queries.
    """
    o = torch.empty(v.shape, dtype=dtype or q.dtype, device=q.device)
    if plan.cuts.chunkwise is not None:
        rows = chunkwise_rows.scaled_rows(plan, q, k, chunks, scale)
        weights = chunkwise.Weights(chunks=chunks)
        leaving = chunkwise.output_pass(plan, *rows, v, o, weights, scale, states, entering)
    else:
        leaving = walk(plan, q, k, v, o, scale, states, chunks, entering, reverse=False)
    bk, bv, programs = pair_blocks(plan, plan.cuts.pairs)
    launch(
        strong_pairs_fwd_kernel,
        programs,
        describe(q, plan.chunk, bk),
        describe(k, plan.chunk, bk),
        describe(v, plan.chunk, bv),
        describe(g, plan.chunk, bk),
        describe(o, plan.chunk, bv),
        chunks.strong,
        level_weights(plan.chunk, plan.form, q.device),
        scale,
        plan.H,
        plan.num_chunks,
        plan.heads * plan.num_chunks,
        K=plan.K,
        V=plan.V,
        C=plan.chunk,
        LEVELS=plan.chunk.bit_length() - 1,
        BK=bk,
        BV=bv,
        GROUP=plan.group,
        FORM=plan.form,
        EXACT=plan.exact,
        num_warps=plan.cuts.pairs.num_warps,
        num_stages=1,
        maxnreg=plan.cuts.pairs.registers,
        known=plan.launches,
    )
    return o, leaving


def pair_blocks(plan: Plan, pairs: Pairs) -> tuple[int, int, int]:
    """Return key and value channels a step of a pairs' kernel, and its programs."""
    programs = min(plan.heads * plan.num_chunks, plan.multiprocessors * pairs.resident)
    return pairs.width_k, pairs.width_v, programs


def walk(
    plan: Plan,
    x: Tensor,
    z: Tensor,
    y: Tensor,
    out: Tensor,
    scale: float,
    states: States,
    chunks: Chunks,
    entering: Tensor | None,
    *,
    reverse: bool,
) -> Tensor:
    """Launch the output walk; return the state at its far edge."""
    edge = torch.empty(plan.B, plan.H, plan.K, plan.V, dtype=torch.float32, device=x.device)
    bk, bv = plan.block_k, plan.split_v
    launch(
        output_walk_kernel,
        plan.heads * plan.num_segments * -(-plan.V // bv),
        describe(x, plan.chunk, bk),
        describe(z, plan.chunk, bk),
        describe(y, plan.chunk, bv),
        describe(chunks.scales, plan.chunk, bk),
        describe(cast("Tensor", chunks.ratio), 1, bk),
        describe(out, plan.chunk, bv),
        chunks.total,
        chunks.strong,
        states.states,
        states.passed,
        entering,
        edge,
        plan.table,
        *plan.counts,
        K=plan.K,
        V=plan.V,
        C=plan.chunk,
        BK=bk,
        BV=bv,
        GROUP=plan.group,
        FORM=chunks.form,
        EXACT=plan.exact,
        LIMIT=plan.limit,
        REVERSE=reverse,
        STAGES=plan.cuts.output.stages,
        SCALE=scale,
        num_warps=plan.cuts.output.num_warps,
        known=plan.launches,
    )
    return edge
