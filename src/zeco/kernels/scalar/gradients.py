"""Launchers of the gradients of one decay a head, or none; see `zeco.kernels.scalar.passes`."""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from zeco.kernels.chunkwise import passes as chunkwise
from zeco.kernels.decay.gradients import (
    DecayGradients,
    Meeting,
    Pulls,
    QueryGradient,
    meeting_arguments,
    new_rows,
)
from zeco.kernels.decay.passes import States
from zeco.kernels.decay.plan import Plan
from zeco.kernels.launch import describe, launch
from zeco.kernels.scalar.gate_gradient import scalar_gate_gradient_kernel
from zeco.kernels.scalar.passes import Sums, strides, walk
from zeco.kernels.scalar.walk import scalar_gradient_walk_kernel


def query_pass(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    *,
    scale: float,
    states: States,
    sums: Sums,
    entering: Tensor | None,
    pulls: bool = True,
) -> QueryGradient:
    """Return the gradient of the queries; see `zeco.kernels.decay.gradients.query_pass`.

    Without ``pulls`` gradients of gates, steps and skips can't be made of it.
    """
    dq, pull = new_rows(plan, q), _new_pulls(plan, q, sums) if pulls else None
    if plan.cuts.chunkwise is not None:
        weights = chunkwise.Weights(sums)
        kept = chunkwise.query_pass(plan, q, k, v, d_o, dq, pull, weights, scale, states, entering)
        return QueryGradient(dq, pull, None if pull is None else kept)
    _gradient_walk(plan, d_o, v, k, q, sums, dq, pull, None, scale, states, entering)
    return QueryGradient(dq, pull)


def gradient_passes(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    d_o: Tensor,
    *,
    step: Tensor | None = None,
    skip: Tensor | None = None,
    scale: float,
    states: States,
    adjoints: States,
    sums: Sums,
    entering: Tensor | None,
    d_leaving: Tensor | None,
    queries: QueryGradient,
) -> DecayGradients:
    """Return all gradients; see `zeco.kernels.decay.gradients.gradient_passes`.

    Those of gates, steps and skips are left out where g, step or skip is None.
    """
    dk, dv = new_rows(plan, k), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    dg, d_step, d_skip = (
        None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in (g, step, skip)
    )
    key_query = None if step is None else _new_tokens(plan, q.device)
    value_gradient = None if step is None and skip is None else _new_tokens(plan, q.device)
    wanted = any(x is not None for x in (dg, d_step, d_skip))
    pull = _new_pulls(plan, q, sums) if wanted else None
    crossing = None
    if plan.cuts.chunkwise is not None:
        left = (dk, dv, pull, chunkwise.Weights(sums), scale, adjoints, d_leaving)
        kept = chunkwise.key_value_pass(
            plan, q, k, v, d_o, *left,
            other=None if dg is None else queries.kept,
            key_query=key_query,
            value_gradient=value_gradient,
        )  # fmt: skip
        d_entering, crossing = kept.leaving, kept.crossing
    else:
        if dg is not None:
            size = (plan.key_blocks, plan.heads, plan.num_segments)
            crossing = torch.empty(size, dtype=torch.float32, device=q.device)
        d_entering = walk(
            plan, k, q, d_o, sums, dv, key_query, scale, adjoints, d_leaving, reverse=True
        )
        meeting = Meeting(crossing, states, entering)
        _gradient_walk(
            plan, v, d_o, q, k, sums, dk, pull, value_gradient, scale, adjoints, d_leaving, meeting
        )
    if wanted:
        left = (queries.pull, pull, crossing, key_query, value_gradient, sums.values)
        _gate_gradient(plan, left, scale, dg, d_step, d_skip)
    return DecayGradients(queries.q, dk, dv, dg, d_entering, d_step, d_skip)


def _new_tokens(plan: Plan, device: torch.device, parts: int = 1) -> Tensor:
    """Return room for a number of each token [parts, B·H, N·C]."""
    size = (parts, plan.heads, plan.num_chunks * plan.chunk)
    return torch.empty(size, dtype=torch.float32, device=device)


def _new_pulls(plan: Plan, like: Tensor, sums: Sums) -> Tensor | None:
    """Return room for the pulls of a gradient walk; None without gates."""
    return None if sums.values is None else _new_tokens(plan, like.device, plan.key_blocks)


def _gradient_walk(
    plan: Plan,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    a: Tensor,
    sums: Sums,
    grad: Tensor,
    pull: Tensor | None,
    own: Tensor | None,
    scale: float,
    states: States,
    entering: Tensor | None,
    meeting: Meeting | None = None,
) -> None:
    """Launch a gradient walk into ``grad``, ``pull`` and ``own``.

    x, y, z, a are as in `scalar_gradient_walk_kernel`, which walks in reverse if told of a ``meeting``.
    """
    crossing, *others = meeting_arguments(meeting)
    bk, bv = plan.split_k, plan.block_v
    launch(
        scalar_gradient_walk_kernel,
        plan.heads * plan.num_segments * plan.key_blocks,
        describe(x, plan.chunk, bv),
        describe(y, plan.chunk, bv),
        describe(z, plan.chunk, bk),
        None if pull is None else describe(a, plan.chunk, bk),
        sums.values,
        describe(grad, plan.chunk, bk),
        pull,
        own,
        crossing,
        states.states,
        states.passed,
        entering,
        *others,
        plan.table,
        math.log2(scale),
        *plan.counts,
        K=plan.K,
        V=plan.V,
        C=plan.chunk,
        BK=bk,
        BV=bv,
        GROUP=plan.group,
        EXACT=plan.exact,
        STEP=sums.step,
        PIECES=1 if pull is None else plan.pieces,
        REVERSE=meeting is not None,
        STAGES=plan.cuts.gradient.stages,
        num_warps=plan.cuts.gradient.num_warps,
        known=plan.launches,
    )


def _gate_gradient(
    plan: Plan,
    left: tuple[Tensor | Pulls | None, ...],
    scale: float,
    dg: Tensor | None,
    d_step: Tensor | None,
    d_skip: Tensor | None,
) -> None:
    # With wide keys what crosses is known at every chunk's start.
    table, counts = (
        (plan.table, plan.counts) if plan.cuts.chunkwise is None else (None, plan.single_chunks)
    )
    crossing = left[2]
    launch(
        scalar_gate_gradient_kernel,
        plan.heads * counts[3],
        *left,
        dg,
        d_step,
        d_skip,
        table,
        scale,
        *strides(dg),
        *strides(d_step),
        *strides(d_skip),
        plan.T,
        *counts,
        C=plan.chunk,
        EXACT=plan.exact,
        PULLS=plan.key_blocks,
        CROSSINGS=crossing.shape[0] if isinstance(crossing, Tensor) else 0,
        BT=min(2048, triton.next_power_of_2(counts[4] * plan.chunk)),
        num_warps=8,
        known=plan.launches,
    )
