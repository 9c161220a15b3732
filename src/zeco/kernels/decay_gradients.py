"""Launchers of the diagonal decay family's gradients; see `zeco.kernels.decay`."""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from zeco.kernels.decay import Chunks, States, pair_blocks, walk
from zeco.kernels.decay_pairs import strong_pairs_bwd_kernel
from zeco.kernels.decay_plan import Plan
from zeco.kernels.decay_walk import gate_gradient_kernel, gradient_walk_kernel
from zeco.kernels.launch import describe, launch


@dataclass(frozen=True, eq=False)
class DecayGradients:
    """Gradients of one call, each in the dtype of what it belongs to.

    Attributes:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        g: [B, T, H, K], or [B, T, H]; None without gates.
        entering: [B, H, K, V], fp32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    entering: Tensor


@dataclass(frozen=True, eq=False)
class QueryGradient:
    """What needs no gradient of the state that leaves, so that it can be made while that travels.

    Attributes:
        q: gradient of the queries [B, T, H, K], but for pairs in strong chunks.
        pull: what the gates' gradient takes from it; None without gates.
    """

    q: Tensor
    pull: Tensor | None


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
    entering: Tensor,
) -> QueryGradient:
    """Return the gradient of the queries; see `gradient_passes` for the arguments."""
    dq, pull = torch.empty(q.shape, dtype=q.dtype, device=q.device), _new_pull(plan, q)
    _gradient_walk(plan, d_o, v, k, q, dq, pull, scale, states, chunks, entering, reverse=False)
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
    entering: Tensor,
    d_leaving: Tensor,
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
        chunks: from either.
        entering: the state that enters [B, H, K, V].
        d_leaving: gradient of the state that leaves [B, H, K, V].
        queries: from `query_pass`.
    """
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    dg = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    dq, query_pull, pull = queries.q, cast("Tensor", queries.pull), _new_pull(plan, q)
    d_entering = walk(plan, k, q, d_o, dv, scale, adjoints, chunks, d_leaving, reverse=True)
    _gradient_walk(plan, v, d_o, q, k, dk, pull, scale, adjoints, chunks, d_leaving, reverse=True)
    _strong_pairs(plan, q, k, v, g, d_o, dq, dk, dv, pull, scale, chunks)
    _gate_gradient(plan, query_pull, pull, dg, states, entering, adjoints, d_leaving)
    return DecayGradients(dq, dk, dv, dg, d_entering)


def _new_pull(plan: Plan, like: Tensor) -> Tensor:
    size = (plan.heads, plan.num_chunks, plan.K, plan.chunk)
    return torch.empty(size, dtype=torch.float32, device=like.device)


def _gradient_walk(
    plan: Plan,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    a: Tensor,
    grad: Tensor,
    pull: Tensor,
    scale: float,
    states: States,
    chunks: Chunks,
    entering: Tensor,
    *,
    reverse: bool,
) -> None:
    bk, bv = plan.split_k, plan.block_v
    launch(
        gradient_walk_kernel,
        plan.heads * plan.num_segments * -(-plan.K // bk),
        describe(x, plan.chunk, bv),
        describe(y, plan.chunk, bv),
        describe(z, plan.chunk, bk),
        a,
        describe(chunks.gates, plan.chunk, bk),
        describe(grad, plan.chunk, bk),
        pull,
        chunks.total,
        chunks.strong,
        states.states,
        states.passed,
        entering,
        plan.table,
        math.log2(scale),
        *a.stride()[:3],
        plan.T,
        *plan.counts,
        K=plan.K,
        V=plan.V,
        C=plan.chunk,
        BK=bk,
        BV=bv,
        FORM=chunks.form,
        EXACT=plan.exact,
        LIMIT=plan.limit,
        REVERSE=reverse,
        num_stages=plan.gradient.stages,
        num_warps=plan.gradient.num_warps,
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
    bk, bv, num_runs = pair_blocks(plan, plan.pairs_bwd)
    launch(
        strong_pairs_bwd_kernel,
        plan.heads * num_runs,
        *(describe(x, C, width) for x, width in ((q, bk), (k, bk), (v, bv), (g, bk), (d_o, bv))),
        *(describe(x, C, width) for x, width in ((dq, bk), (dk, bk), (dv, bv))),
        pull,
        chunks.strong,
        scale,
        plan.H,
        plan.num_chunks,
        num_runs,
        K=plan.K,
        V=plan.V,
        C=C,
        LEVELS=C.bit_length() - 1,
        BK=bk,
        BV=bv,
        RUN=plan.pairs_bwd.run,
        FORM=plan.form,
        EXACT=plan.exact,
        num_warps=plan.pairs_bwd.num_warps,
        num_stages=1,
    )


def _gate_gradient(
    plan: Plan,
    query_pull: Tensor,
    pull: Tensor,
    dg: Tensor,
    states: States,
    entering: Tensor,
    adjoints: States,
    d_leaving: Tensor,
) -> None:
    bk, bv = min(plan.block_k, 128), min(plan.block_v, 32)
    launch(
        gate_gradient_kernel,
        plan.heads * plan.num_segments * -(-plan.K // bk),
        query_pull,
        pull,
        describe(dg, plan.chunk, bk),
        states.states,
        states.passed,
        entering,
        adjoints.states,
        adjoints.passed,
        d_leaving,
        plan.table,
        *plan.counts,
        K=plan.K,
        V=plan.V,
        C=plan.chunk,
        BK=bk,
        BV=bv,
        # Interpreted, products in bf16 are wrong.
        EXACT=plan.exact or pull.device.type == "cpu",
        STAGES=3,
        num_warps=8,
    )
