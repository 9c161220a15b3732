"""Launchers of the diagonal decay family's gradients; see `zeco.kernels.decay.passes`."""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from zeco.kernels.chunkwise import passes as chunkwise
from zeco.kernels.chunkwise.rows import scaled_rows
from zeco.kernels.decay.gate_gradient import gate_gradient_kernel
from zeco.kernels.decay.gradient_walk import gradient_walk_kernel
from zeco.kernels.decay.pairs import level_weights, strong_pairs_bwd_kernel
from zeco.kernels.decay.passes import Chunks, States, pair_blocks, walk
from zeco.kernels.decay.plan import Plan
from zeco.kernels.launch import Blocks, describe, launch


class DecayGradients(NamedTuple):
    """Gradients of one call, each in the dtype of what it belongs to.

    Attributes:
        q, k: [B, T, H, K], those of every head of v.
        v: [B, T, H, V].
        g: as the gates; None without.
        entering: [B, H, K, V], fp32.
        step, skip: [B, T, H]; None without them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    entering: Tensor
    step: Tensor | None = None
    skip: Tensor | None = None


class Pulls(NamedTuple):
    """What tokens take from the gates' gradient or give to it: k∘dk, or q∘dq.

    Attributes:
        values: [1, K, B·H·N, C], laid as [B·H, N, K, C]: fp16 in a unit of their row, or fp32. With wide
            keys [B, T, H, K] in fp16.
        margin: the sum of each row and its unit [B·H, N, K, 2], fp32. With wide keys, where nothing is
            carried from chunk to chunk, the unit only.
    """

    values: Tensor
    margin: Tensor

    def blocks(self, rows: int) -> Blocks:
        """Return the blocks [rows, C] of values, by chunk of all heads and by row."""
        return describe(self.values, rows, self.values.shape[3])


class Meeting(NamedTuple):
    """What a gradient walk in reverse is told of the one forwards, to meet it at the segments' starts.

    Attributes:
        crossing: room for the weights of paths that cross these; None where no gates' gradient is made.
        states, entering: the other walk's.
    """

    crossing: Tensor | None
    states: States
    entering: Tensor | None


def meeting_arguments(meeting: Meeting | None) -> tuple[Tensor | None, ...]:
    """Return a gradient walk's arguments: the room, then the other walk's states and what enters."""
    if meeting is None or meeting.crossing is None:
        return (None,) * 4
    return (meeting.crossing, meeting.states.states, meeting.states.passed, meeting.entering)


class QueryGradient(NamedTuple):
    """What needs no gradient of the state that leaves, so that it can be made while that travels.

    Attributes:
        q: gradient of the queries [B, T, H, K], but for pairs in strong chunks.
        pull: what the gates' gradient takes from it; None without gates.
        kept: the states of wide keys; else None.
    """

    q: Tensor
    pull: Pulls | Tensor | None
    kept: chunkwise.Kept | None = None


def query_pass(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    *,
    scale: float,
    states: States,
    chunks: Chunks,
    entering: Tensor | None,
) -> QueryGradient:
    """Return the gradient of the queries; see `gradient_passes` for the arguments."""
    dq, pull = new_rows(plan, q), _new_pulls(plan, q)
    if plan.cuts.chunkwise is not None:
        rows = scaled_rows(plan, q, k, chunks, scale)
        weights = chunkwise.Weights(chunks=chunks)
        kept = chunkwise.query_pass(plan, *rows, v, d_o, dq, pull, weights, scale, states, entering)
        return QueryGradient(dq, pull, kept)
    _gradient_walk(plan, d_o, v, k, q, dq, pull, scale, states, chunks, entering)
    return QueryGradient(dq, pull)


def gradient_passes(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    d_o: Tensor,
    *,
    scale: float,
    states: States,
    adjoints: States,
    chunks: Chunks,
    entering: Tensor | None,
    d_leaving: Tensor | None,
    queries: QueryGradient,
) -> DecayGradients:
    """Return all gradients.

    Args:
        plan: the call's plan.
        q, k, v, g: the call's inputs.
        d_o: gradient of the outputs [B, T, H, V].
        scale: factor of the queries.
        states: from `state_pass`.
        adjoints: from `adjoint_state_pass`.
        chunks: from either, but the same as for the queries.
        entering: the state that enters [B, H, K, V]; None for zeros.
        d_leaving: gradient of the state that leaves [B, H, K, V]; None for zeros.
        queries: from `query_pass`.
    """
    dk, dv = new_rows(plan, k), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    dg = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    dq, query_pull, pull = queries.q, cast("Pulls", queries.pull), _new_pulls(plan, q)
    if plan.cuts.chunkwise is not None:
        rows = scaled_rows(plan, q, k, chunks, scale)
        left = (dk, dv, pull, chunkwise.Weights(chunks=chunks), scale, adjoints, d_leaving)
        kept = chunkwise.key_value_pass(plan, *rows, v, d_o, *left, other=queries.kept)
        d_entering, crossing = kept.leaving, cast("Tensor", kept.crossing)
    else:
        d_entering = walk(plan, k, q, d_o, dv, scale, adjoints, chunks, d_leaving, reverse=True)
        crossing = torch.empty(
            plan.heads, plan.num_segments, plan.K, dtype=torch.float32, device=q.device
        )
        meeting = Meeting(crossing, states, entering)
        _gradient_walk(plan, v, d_o, q, k, dk, pull, scale, adjoints, chunks, d_leaving, meeting)
    # Pairs of strong chunks leave their pulls, written and not added, in room of their own, of which
    # nothing is touched where there are none.
    size = (plan.heads, plan.num_chunks, plan.K, plan.chunk)
    pairs_pull = torch.empty(size, dtype=torch.float32, device=q.device)
    _strong_pairs(plan, q, k, v, g, d_o, dq, dk, dv, pairs_pull, scale, chunks)
    _gate_gradient(plan, query_pull, pull, pairs_pull, chunks.strong, crossing, dg)
    return DecayGradients(dq, dk, dv, dg, d_entering)


def new_rows(plan: Plan, like: Tensor) -> Tensor:
    """Return room for a row of the key dim for each token of each head of v."""
    size = (plan.B, plan.T, plan.H, plan.K)
    return torch.empty(size, dtype=like.dtype, device=like.device)


def _new_pulls(plan: Plan, like: Tensor) -> Pulls:
    if plan.cuts.chunkwise is not None:
        return Pulls(*chunkwise.new_pulls(plan, like.device))
    size = (plan.heads, plan.num_chunks, plan.K)
    values = torch.empty_strided(
        *plan.pull_rows,
        dtype=torch.float32 if plan.exact else torch.float16,
        device=like.device,
    )
    return Pulls(values, torch.empty(*size, 2, dtype=torch.float32, device=like.device))


def _gradient_walk(
    plan: Plan,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    a: Tensor,
    grad: Tensor,
    pull: Pulls,
    scale: float,
    states: States,
    chunks: Chunks,
    entering: Tensor | None,
    meeting: Meeting | None = None,
) -> None:
    """Launch a gradient walk into ``grad`` and ``pull``.

    x, y, z, a are as in `gradient_walk_kernel`, which walks in reverse if told of a ``meeting``.
    """
    crossing, *others = meeting_arguments(meeting)
    bk, bv = plan.split_k, plan.block_v
    launch(
        gradient_walk_kernel,
        plan.heads * plan.num_segments * plan.key_blocks,
        describe(x, plan.chunk, bv),
        describe(y, plan.chunk, bv),
        describe(z, plan.chunk, bk),
        describe(a, plan.chunk, bk),
        describe(chunks.scales, plan.chunk, bk),
        describe(grad, plan.chunk, bk),
        pull.values,
        pull.margin,
        crossing,
        chunks.total,
        cast("Tensor", chunks.ratio),
        chunks.strong,
        states.states,
        states.passed,
        entering,
        *others,
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
        PIECES=plan.pieces,
        REVERSE=meeting is not None,
        STAGES=plan.cuts.gradient.stages,
        SCALE=scale,
        num_warps=plan.cuts.gradient.num_warps,
        known=plan.launches,
    )


def _strong_pairs(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    d_o: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    pull: Tensor,
    scale: float,
    chunks: Chunks,
) -> None:
    C = plan.chunk
    bk, bv, programs = pair_blocks(plan, plan.cuts.pairs_bwd)
    launch(
        strong_pairs_bwd_kernel,
        programs,
        *(describe(x, C, width) for x, width in ((q, bk), (k, bk), (v, bv), (g, bk), (d_o, bv))),
        *(describe(x, C, width) for x, width in ((dq, bk), (dk, bk), (dv, bv))),
        pull,
        chunks.strong,
        level_weights(C, plan.form, q.device),
        scale,
        plan.H,
        plan.num_chunks,
        plan.heads * plan.num_chunks,
        K=plan.K,
        V=plan.V,
        C=C,
        LEVELS=C.bit_length() - 1,
        BK=bk,
        BV=bv,
        GROUP=plan.group,
        FORM=plan.form,
        EXACT=plan.exact,
        num_warps=plan.cuts.pairs_bwd.num_warps,
        num_stages=1,
        maxnreg=plan.cuts.pairs_bwd.registers,
        known=plan.launches,
    )


def _gate_gradient(
    plan: Plan,
    query_pull: Pulls,
    pull: Pulls,
    pairs_pull: Tensor,
    strong: Tensor,
    crossing: Tensor,
    dg: Tensor,
) -> None:
    if plan.cuts.chunkwise is not None:
        chunkwise.gate_gradient(plan, query_pull, pull, pairs_pull, strong, crossing, dg)
        return
    walkers = plan.heads // plan.group * plan.num_segments
    bk = min(plan.block_k, 64 if plan.group == 1 else 32)
    launch(
        gate_gradient_kernel,
        walkers * -(-plan.K // bk),
        query_pull.blocks(bk),
        query_pull.margin,
        pull.blocks(bk),
        pull.margin,
        pairs_pull,
        strong,
        crossing,
        describe(dg, plan.chunk, bk),
        plan.table,
        *plan.counts,
        K=plan.K,
        C=plan.chunk,
        BK=bk,
        GROUP=plan.group,
        EXACT=plan.exact,
        # Each head of a group has loads of its own.
        STAGES=max(1, min(4, 8 // plan.group)),
        num_warps=4,
        known=plan.launches,
    )
