"""Launchers for one decay a head, or none: those of `zeco.kernels.decay.passes`.

    S_t = exp(g_t) S_{t-1} + step_t k_t v_tᵀ         o_t = scale · S_tᵀ q_t + skip_t v_t

g is [B, T, H] (natural logarithms, <= 0), or None where nothing decays; so are, with gates, steps (>= 0)
and skips, or None for ones and zeros. The passes read their `chunk_sums`. q and k may have fewer heads,
each shared by as many of v; gradients are those of every head of v. All else is as there.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from zeco.kernels.chunkwise import passes as chunkwise
from zeco.kernels.decay.passes import States, scan_segments
from zeco.kernels.decay.plan import Plan
from zeco.kernels.launch import describe, launch
from zeco.kernels.scalar.sums import scalar_sums_kernel
from zeco.kernels.scalar.walk import scalar_output_walk_kernel, scalar_state_fwd_kernel


class Sums(NamedTuple):
    """Numbers of each token that all passes read.

    Attributes:
        values: base-2 logarithms from the start of each chunk up to each token, in one part, or in fp32
            in two, of which the first is exact; behind them the steps' base-2 logarithms and the skips,
            [parts, B·H, N, C], fp32.
        step, skip: whether there are such.
    """

    values: Tensor | None
    step: bool
    skip: bool


NO_SUMS = Sums(None, step=False, skip=False)
"""What is read where nothing decays."""


def chunk_sums(
    plan: Plan, g: Tensor | None, step: Tensor | None = None, skip: Tensor | None = None
) -> Sums:
    """Return what all passes read of gates, steps and skips [B, T, H]."""
    if g is None:
        return NO_SUMS
    parts = 2 if plan.exact else 1
    given = [x for x in (step, skip) if x is not None]
    size = (parts + len(given), plan.heads, plan.num_chunks, plan.chunk)
    values = torch.empty(size, dtype=torch.float32, device=g.device)
    run, heads = 4, min(8, triton.next_power_of_2(plan.H))
    num_runs = -(-plan.num_chunks // run)
    launch(
        scalar_sums_kernel,
        plan.B * -(-plan.H // heads) * num_runs,
        g,
        step,
        skip,
        values,
        *g.stride(),
        *strides(step),
        *strides(skip),
        plan.T,
        plan.H,
        plan.num_chunks,
        num_runs,
        plan.heads,
        C=plan.chunk,
        RUN=run,
        HEADS=heads,
        PARTS=parts,
        num_warps=4,
        known=plan.launches,
    )
    return Sums(values, step is not None, skip is not None)


def strides(x: Tensor | None) -> tuple[int, ...]:
    """Return the strides of numbers [B, T, H], which may be none."""
    return (0, 0, 0) if x is None else x.stride()


def state_pass(
    plan: Plan, k: Tensor, v: Tensor, sums: Sums, initials: Tensor | None = None
) -> States:
    """Return the states of a walk forwards in time; see `zeco.kernels.decay.passes.state_pass`."""
    return _states(plan, k, v, sums, initials, scale=1.0, adjoint=False)


def adjoint_state_pass(
    plan: Plan,
    q: Tensor,
    d_o: Tensor,
    sums: Sums,
    d_finals: Tensor | None = None,
    *,
    scale: float,
) -> States:
    """Return the adjoint states; see `zeco.kernels.decay.passes.adjoint_state_pass`."""
    return _states(plan, q, d_o, sums, d_finals, scale=scale, adjoint=True)


def _states(
    plan: Plan,
    x: Tensor,
    y: Tensor,
    sums: Sums,
    starts: Tensor | None,
    *,
    scale: float,
    adjoint: bool,
) -> States:
    if plan.cuts.chunkwise is not None:
        weights = chunkwise.Weights(sums)
        updates, decays = chunkwise.segment_updates(plan, x, y, weights, scale, reverse=adjoint)
        return scan_segments(plan, updates, decays, starts, adjoint=adjoint)
    heads, S, K, V = plan.heads, plan.num_segments, plan.K, plan.V
    updates = torch.empty(heads, S, K, V, dtype=torch.float32, device=x.device)
    decays = torch.empty(heads, S, K, dtype=torch.float32, device=x.device)
    bk, bv = min(plan.block_k, 128), min(plan.block_v, 128)
    launch(
        scalar_state_fwd_kernel,
        heads * S * -(-K // bk) * -(-V // bv),
        describe(x, plan.chunk, bk),
        describe(y, plan.chunk, bv),
        sums.values,
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
        GROUP=plan.group,
        EXACT=plan.exact,
        STEP=sums.step,
        ADJOINT=adjoint,
        STAGES=plan.cuts.state_stages,
        num_warps=plan.cuts.state_warps,
        known=plan.launches,
    )
    return scan_segments(plan, updates, decays, starts, adjoint=adjoint)


def output_pass(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Sums,
    *,
    scale: float,
    states: States,
    entering: Tensor | None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the state that leaves; see `zeco.kernels.decay.passes.output_pass`."""
    o = torch.empty(v.shape, dtype=dtype or q.dtype, device=q.device)
    if plan.cuts.chunkwise is not None:
        weights = chunkwise.Weights(sums)
        return o, chunkwise.output_pass(plan, q, k, v, o, weights, scale, states, entering)
    return o, walk(plan, q, k, v, sums, o, None, scale, states, entering, reverse=False)


def walk(
    plan: Plan,
    x: Tensor,
    z: Tensor,
    y: Tensor,
    sums: Sums,
    out: Tensor,
    own: Tensor | None,
    scale: float,
    states: States,
    entering: Tensor | None,
    *,
    reverse: bool,
) -> Tensor:
    """Launch an output walk into ``out``; return what leaves.

    x, z, y are as in `scalar_output_walk_kernel`; ``own`` is room for tokens' own products, or None.
    """
    edge = torch.empty(plan.B, plan.H, plan.K, plan.V, dtype=torch.float32, device=x.device)
    bk, bv = plan.block_k, plan.split_v
    launch(
        scalar_output_walk_kernel,
        plan.heads * plan.num_segments * -(-plan.V // bv),
        describe(x, plan.chunk, bk),
        describe(z, plan.chunk, bk),
        describe(y, plan.chunk, bv),
        sums.values,
        describe(out, plan.chunk, bv),
        own,
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
        GROUP=plan.group,
        EXACT=plan.exact,
        STEP=sums.step,
        SKIP=sums.skip,
        REVERSE=reverse,
        STAGES=plan.cuts.output.stages,
        num_warps=plan.cuts.output.num_warps,
        known=plan.launches,
    )
    return edge
