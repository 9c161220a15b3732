"""Launchers for one decay a head, or none: the passes of `zeco.kernels.decay` and its gradients.

    S_t = exp(g_t) S_{t-1} + k_t v_tᵀ         o_t = scale · S_tᵀ q_t

g is [B, T, H] (natural logarithms, <= 0), or None where nothing decays; the passes read its
`chunk_sums`. All else is as there.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from zeco.kernels.decay import States, scan_segments
from zeco.kernels.decay_gradients import DecayGradients, QueryGradient
from zeco.kernels.decay_plan import Plan
from zeco.kernels.launch import describe, launch
from zeco.kernels.scalar_sums import scalar_sums_kernel
from zeco.kernels.scalar_walk import (
    scalar_gate_gradient_kernel,
    scalar_gradient_walk_kernel,
    scalar_output_walk_kernel,
    scalar_state_fwd_kernel,
)


def chunk_sums(plan: Plan, g: Tensor | None) -> Tensor | None:
    """Return the sums of gates [B, T, H] that all passes read; None without gates.

    Base-2 logarithms from the start of each chunk up to each token, [parts, B·H, N, C]: one part, or
    in fp32 two, of which the first is exact.
    """
    if g is None:
        return None
    size = (2 if plan.exact else 1, plan.heads, plan.num_chunks, plan.chunk)
    sums = torch.empty(size, dtype=torch.float32, device=g.device)
    run = 16
    num_runs = -(-plan.num_chunks // run)
    launch(
        scalar_sums_kernel,
        plan.heads * num_runs,
        g,
        sums,
        *g.stride(),
        plan.T,
        plan.H,
        plan.num_chunks,
        num_runs,
        plan.heads,
        C=plan.chunk,
        RUN=run,
        PARTS=len(sums),
        num_warps=4,
        known=plan.launches,
    )
    return sums


def state_pass(
    plan: Plan, k: Tensor, v: Tensor, sums: Tensor | None, initials: Tensor | None = None
) -> States:
    """Return the states of a walk forwards in time; see `zeco.kernels.decay.state_pass`."""
    return _states(plan, k, v, sums, initials, scale=1.0, adjoint=False)


def adjoint_state_pass(
    plan: Plan,
    q: Tensor,
    d_o: Tensor,
    sums: Tensor | None,
    d_finals: Tensor | None = None,
    *,
    scale: float,
) -> States:
    """Return the adjoint states; see `zeco.kernels.decay.adjoint_state_pass`."""
    return _states(plan, q, d_o, sums, d_finals, scale=scale, adjoint=True)


def _states(
    plan: Plan,
    x: Tensor,
    y: Tensor,
    sums: Tensor | None,
    starts: Tensor | None,
    *,
    scale: float,
    adjoint: bool,
) -> States:
    heads, S, K, V = plan.heads, plan.num_segments, plan.K, plan.V
    updates = torch.empty(heads, S, K, V, dtype=torch.float32, device=x.device)
    decays = torch.empty(heads, S, K, dtype=torch.float32, device=x.device)
    bk, bv = min(plan.block_k, 128), min(plan.block_v, 128)
    launch(
        scalar_state_fwd_kernel,
        heads * S * -(-K // bk) * -(-V // bv),
        describe(x, plan.chunk, bk),
        describe(y, plan.chunk, bv),
        sums,
        updates,
        decays,
        plan.table,
        scale,
        plan.H,
        heads,
        plan.num_chunks,
        S,
        plan.chunks_per_segment,
        K=K,
        V=V,
        C=plan.chunk,
        BK=bk,
        BV=bv,
        EXACT=plan.exact,
        ADJOINT=adjoint,
        STAGES=plan.state_stages,
        num_warps=plan.state_warps,
        known=plan.launches,
    )
    return scan_segments(plan, updates, decays, starts, adjoint=adjoint)


def output_pass(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Tensor | None,
    *,
    scale: float,
    states: States,
    entering: Tensor | None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the state that leaves; see `zeco.kernels.decay.output_pass`."""
    o = torch.empty(v.shape, dtype=dtype or q.dtype, device=q.device)
    return o, _walk(plan, q, k, v, sums, o, scale, states, entering, reverse=False)


def _walk(
    plan: Plan,
    x: Tensor,
    z: Tensor,
    y: Tensor,
    sums: Tensor | None,
    out: Tensor,
    scale: float,
    states: States,
    entering: Tensor | None,
    *,
    reverse: bool,
) -> Tensor:
    edge = torch.empty(plan.B, plan.H, plan.K, plan.V, dtype=torch.float32, device=x.device)
    bk, bv = plan.block_k, plan.split_v
    launch(
        scalar_output_walk_kernel,
        plan.heads * plan.num_segments * -(-plan.V // bv),
        describe(x, plan.chunk, bk),
        describe(z, plan.chunk, bk),
        describe(y, plan.chunk, bv),
        sums,
        describe(out, plan.chunk, bv),
        states.states,
        states.passed,
        entering,
        edge,
        plan.table,
        math.log2(scale),
        *plan.counts,
        K=plan.K,
        V=plan.V,
        C=plan.chunk,
        BK=bk,
        BV=bv,
        EXACT=plan.exact,
        REVERSE=reverse,
        STAGES=plan.output.stages,
        num_warps=plan.output.num_warps,
        known=plan.launches,
    )
    return edge


def query_pass(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    *,
    scale: float,
    states: States,
    sums: Tensor | None,
    entering: Tensor | None,
) -> QueryGradient:
    """Return the gradient of the queries; see `zeco.kernels.decay_gradients.query_pass`."""
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return QueryGradient(
        dq, _gradient_walk(plan, d_o, v, k, q, sums, dq, scale, states, entering, reverse=False)
    )


def gradient_passes(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    d_o: Tensor,
    *,
    scale: float,
    states: States,
    adjoints: States,
    sums: Tensor | None,
    entering: Tensor | None,
    d_leaving: Tensor | None,
    queries: QueryGradient,
) -> DecayGradients:
    """Return all gradients; see `zeco.kernels.decay_gradients.gradient_passes`."""
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    d_entering = _walk(plan, k, q, d_o, sums, dv, scale, adjoints, d_leaving, reverse=True)
    key_pull = _gradient_walk(
        plan, v, d_o, q, k, sums, dk, scale, adjoints, d_leaving, reverse=True
    )
    dg = None
    if g is not None and queries.pull is not None and key_pull is not None:
        dg = torch.empty(g.shape, dtype=g.dtype, device=g.device)
        _gate_gradient(plan, queries.pull, key_pull, dg, states, entering, adjoints, d_leaving)
    return DecayGradients(queries.q, dk, dv, dg, d_entering)


def _gradient_walk(
    plan: Plan,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    a: Tensor,
    sums: Tensor | None,
    grad: Tensor,
    scale: float,
    states: States,
    entering: Tensor | None,
    *,
    reverse: bool,
) -> Tensor | None:
    """Launch a gradient walk; return the pulls if there are gates."""
    bk, bv = plan.split_k, plan.block_v
    blocks = -(-plan.K // bk)
    pull = None
    if sums is not None:
        size = (blocks, plan.heads, plan.num_chunks * plan.chunk)
        pull = torch.empty(size, dtype=torch.float32, device=sums.device)
    launch(
        scalar_gradient_walk_kernel,
        plan.heads * plan.num_segments * blocks,
        describe(x, plan.chunk, bv),
        describe(y, plan.chunk, bv),
        describe(z, plan.chunk, bk),
        None if sums is None else describe(a, plan.chunk, bk),
        sums,
        describe(grad, plan.chunk, bk),
        pull,
        states.states,
        states.passed,
        entering,
        plan.table,
        math.log2(scale),
        *plan.counts,
        K=plan.K,
        V=plan.V,
        C=plan.chunk,
        BK=bk,
        BV=bv,
        EXACT=plan.exact,
        REVERSE=reverse,
        STAGES=plan.gradient.stages,
        num_warps=plan.gradient.num_warps,
        known=plan.launches,
    )
    return pull


def _gate_gradient(
    plan: Plan,
    query_pull: Tensor,
    key_pull: Tensor,
    dg: Tensor,
    states: States,
    entering: Tensor | None,
    adjoints: States,
    d_leaving: Tensor | None,
) -> None:
    tokens = plan.chunks_per_segment * plan.chunk
    launch(
        scalar_gate_gradient_kernel,
        plan.heads * plan.num_segments,
        query_pull,
        key_pull,
        dg,
        states.states,
        states.passed,
        entering,
        adjoints.states,
        adjoints.passed,
        d_leaving,
        plan.table,
        *dg.stride(),
        plan.T,
        *plan.counts,
        K=plan.K,
        V=plan.V,
        C=plan.chunk,
        BK=min(plan.block_k, 64),
        BV=min(plan.block_v, 128),
        PULLS=len(query_pull),
        BT=min(2048, triton.next_power_of_2(tokens)),
        num_warps=8,
        known=plan.launches,
    )
