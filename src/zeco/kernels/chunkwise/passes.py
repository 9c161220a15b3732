"""Launchers of the passes of wide keys, which those of `zeco.kernels.decay` and `scalar` choose.

They stand in for the walks of narrower ones: states are written for every chunk and read by passes that
take each chunk alone.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from zeco.kernels.chunkwise.pass_kernels import (
    chunkwise_gate_gradient_kernel,
    chunkwise_gradient_kernel,
    chunkwise_output_kernel,
)
from zeco.kernels.chunkwise.states import chunkwise_states_kernel
from zeco.kernels.decay.cuts import Chunkwise
from zeco.kernels.decay.plan import Plan
from zeco.kernels.launch import Blocks, describe, launch

if TYPE_CHECKING:
    from zeco.kernels.decay.gradients import Pulls
    from zeco.kernels.decay.passes import Chunks, States
    from zeco.kernels.scalar.passes import Sums


class Weights(NamedTuple):
    """What tokens' rows and pairs are weighted by: of the two, one is given.

    Attributes:
        sums: with one decay a head, or none.
        chunks: by channel, where rows come scaled.
    """

    sums: Sums | None = None
    chunks: Chunks | None = None

    @property
    def values(self) -> Tensor | None:
        """Numbers of each token."""
        return None if self.sums is None else self.sums.values

    @property
    def step(self) -> bool:
        """Whether tokens have steps."""
        return self.sums is not None and self.sums.step


class Kept(NamedTuple):
    """The states of all chunks for one direction of time, as `zeco.kernels.chunkwise.states` has them.

    Attributes:
        states: [N, K, B·H, V], laid as [B·H, N, K, V], in the dtype of the values.
        leaving: the state [B, H, K, V] at the walk's far edge, fp32.
        crossing: weights of the paths that cross each chunk's start [blocks, B·H, N], or by channel
            [blocks, B·H, N, K]; None unless asked for.
    """

    states: Tensor
    leaving: Tensor
    crossing: Tensor | None


def _cuts(plan: Plan) -> Chunkwise:
    return cast("Chunkwise", plan.cuts.chunkwise)


def segment_updates(
    plan: Plan, x: Tensor, y: Tensor, weights: Weights, scale: float, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return each segment's update [B·H, S, K, V] and base-2 log decay [B·H, S, K].

    Args:
        plan: the call's plan.
        x, y: rows of keys and values, in reverse of queries and dO; the former scaled if by channel.
        weights: what they are weighted by.
        scale: factor of the queries.
        reverse: whether to walk backwards in time.
    """
    heads, S, K, V = plan.heads, plan.num_segments, plan.K, plan.V
    fp32 = {"dtype": torch.float32, "device": x.device}
    found = torch.empty(heads, S, K, V, **fp32), torch.empty(heads, S, K, **fp32)
    _walk_states(plan, x, y, weights, scale, reverse, updates=found)
    return found


def output_pass(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    weights: Weights,
    scale: float,
    states: States,
    entering: Tensor | None,
) -> Tensor:
    """Make the outputs into ``o``; return the state that leaves. q and k come scaled if by channel."""
    kept = _keep_states(plan, k, v, weights, scale, states, entering, reverse=False)
    _outputs(plan, q, k, v, o, weights, scale, kept, reverse=False)
    return kept.leaving


def query_pass(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    dq: Tensor,
    pull: Pulls | Tensor | None,
    weights: Weights,
    scale: float,
    states: States,
    entering: Tensor | None,
) -> Kept:
    """Make the queries' gradient into ``dq`` and ``pull``; return the states, for `key_value_pass`."""
    kept = _keep_states(plan, k, v, weights, scale, states, entering, reverse=False)
    _gradients(plan, d_o, v, k, q, dq, pull, weights, scale, kept, reverse=False)
    return kept


def key_value_pass(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    dk: Tensor,
    dv: Tensor,
    pull: Pulls | Tensor | None,
    weights: Weights,
    scale: float,
    adjoints: States,
    d_leaving: Tensor | None,
    *,
    other: Kept | None,
    key_query: Tensor | None = None,
    value_gradient: Tensor | None = None,
) -> Kept:
    """Make the gradients of keys and values into ``dk``, ``dv`` and ``pull``; return the adjoint states.

    Args:
        plan, q, k, v, d_o, dk, dv, pull, weights, scale: as above.
        adjoints: the adjoint states at the boundaries of segments.
        d_leaving: gradient of the state that leaves [B, H, K, V]; None for zeros.
        other: from `query_pass`, to find the weights of what crosses chunks' starts.
        key_query, value_gradient: room for tokens' own products k·q and v·dO [1, B·H, N·C], or None.
    """
    kept = _keep_states(
        plan, q, d_o, weights, scale, adjoints, d_leaving, reverse=True, other=other
    )
    _outputs(plan, k, q, d_o, dv, weights, scale, kept, reverse=True, own=key_query)
    _gradients(plan, v, d_o, q, k, dk, pull, weights, scale, kept, reverse=True, own=value_gradient)
    return kept


def _keep_states(
    plan: Plan,
    x: Tensor,
    y: Tensor,
    weights: Weights,
    scale: float,
    states: States,
    entering: Tensor | None,
    *,
    reverse: bool,
    other: Kept | None = None,
) -> Kept:
    """Walk all segments and keep each chunk's state."""
    N, K, V, heads = plan.num_chunks, plan.K, plan.V, plan.heads
    kept = torch.empty_strided(
        (N, K, heads, V), (K * V, V, N * K * V, 1), dtype=y.dtype, device=y.device
    )
    fp32 = {"dtype": torch.float32, "device": y.device}
    leaving = torch.empty(plan.B, plan.H, K, V, **fp32)
    crossing = None
    if other is not None:
        bk, bv = _state_block(plan)
        k_blocks, v_blocks = -(-K // bk), -(-V // bv)
        size = (v_blocks, heads, N, K) if weights.chunks else (v_blocks * k_blocks, heads, N)
        crossing = torch.empty(size, **fp32)
    found = Kept(kept, leaving, crossing)
    start = (states.states, states.passed, entering)
    _walk_states(plan, x, y, weights, scale, reverse, kept=found, other=other, start=start)
    return found


def _walk_states(
    plan: Plan,
    x: Tensor,
    y: Tensor,
    weights: Weights,
    scale: float,
    reverse: bool,
    *,
    kept: Kept | None = None,
    other: Kept | None = None,
    updates: tuple[Tensor | None, ...] = (None, None),
    start: tuple[Tensor | None, ...] = (None, None, None),
) -> None:
    bk, bv = _state_block(plan)
    launch(
        chunkwise_states_kernel,
        plan.heads * plan.num_segments * -(-plan.K // bk) * -(-plan.V // bv),
        describe(x, plan.chunk, bk),
        describe(y, plan.chunk, bv),
        weights.values,
        None if weights.chunks is None else weights.chunks.total,
        None if kept is None else _blocks(kept, bk, bv),
        None if other is None else _blocks(other, bk, bv),
        None if kept is None else kept.crossing,
        *updates,
        *start,
        None if kept is None else kept.leaving,
        plan.table,
        scale,
        *plan.counts,
        K=plan.K,
        V=plan.V,
        C=plan.chunk,
        BK=bk,
        BV=bv,
        GROUP=plan.group,
        STEP=weights.step,
        LIMIT=plan.limit,
        REVERSE=reverse,
        # With three, another state to read is more than shared memory holds.
        STAGES=3 if other is None else 2,
        num_warps=8,
        known=plan.launches,
    )


def _state_block(plan: Plan) -> tuple[int, int]:
    """Return the channels of both dims a program that walks states."""
    return min(128, plan.block_k), min(128, plan.block_v)


def _blocks(kept: Kept, rows: int, columns: int) -> Blocks:
    return describe(kept.states, rows, columns)


def _outputs(
    plan: Plan,
    x: Tensor,
    z: Tensor,
    y: Tensor,
    out: Tensor,
    weights: Weights,
    scale: float,
    kept: Kept,
    *,
    reverse: bool,
    own: Tensor | None = None,
) -> None:
    """Make o, or in reverse dv, into ``out``; arguments are as in the kernel."""
    tiles = _cuts(plan).output
    launch(
        chunkwise_output_kernel,
        plan.heads * plan.num_chunks * -(-plan.V // tiles.width),
        describe(x, plan.chunk, tiles.step),
        describe(z, plan.chunk, tiles.step),
        describe(y, plan.chunk, tiles.width),
        weights.values,
        None if weights.chunks is None else weights.chunks.strong,
        _blocks(kept, tiles.step, tiles.width),
        describe(out, plan.chunk, tiles.width),
        own,
        math.log2(scale),
        *plan.counts[:3],
        K=plan.K,
        V=plan.V,
        C=plan.chunk,
        BK=tiles.step,
        BV=tiles.width,
        GROUP=plan.group,
        STEP=weights.step,
        SKIP=weights.sums is not None and weights.sums.skip,
        REVERSE=reverse,
        STAGES=tiles.stages,
        num_warps=tiles.num_warps,
        known=plan.launches,
    )


def _gradients(
    plan: Plan,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    a: Tensor,
    grad: Tensor,
    pull: Pulls | Tensor | None,
    weights: Weights,
    scale: float,
    kept: Kept,
    *,
    reverse: bool,
    own: Tensor | None = None,
) -> None:
    """Make dq, or in reverse dk, into ``grad``; arguments are as in the kernel."""
    tiles, chunks = _cuts(plan).gradient, weights.chunks
    sums, values, unit = None, None, None
    if isinstance(pull, Tensor):
        sums = pull
    elif pull is not None:
        values, unit = describe(pull.values, plan.chunk, tiles.width), pull.margin
    launch(
        chunkwise_gradient_kernel,
        plan.heads * plan.num_chunks * plan.key_blocks,
        describe(x, plan.chunk, tiles.step),
        describe(y, plan.chunk, tiles.step),
        describe(z, plan.chunk, tiles.width),
        None if pull is None else describe(a, plan.chunk, tiles.width),
        weights.values,
        None if chunks is None else describe(chunks.scales, plan.chunk, tiles.width),
        None if chunks is None else chunks.total,
        None if chunks is None else chunks.strong,
        _blocks(kept, tiles.width, tiles.step),
        describe(grad, plan.chunk, tiles.width),
        sums,
        values,
        unit,
        own,
        math.log2(scale),
        *plan.counts[:3],
        K=plan.K,
        V=plan.V,
        C=plan.chunk,
        BK=tiles.width,
        BV=tiles.step,
        GROUP=plan.group,
        STEP=weights.step,
        FORM=plan.form if chunks is None else chunks.form,
        LIMIT=plan.limit,
        REVERSE=reverse,
        SCALE=1.0 if chunks is None else scale,
        STAGES=tiles.stages,
        num_warps=tiles.num_warps,
        known=plan.launches,
    )


def new_pulls(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return room for pulls by channel [B, T, H, K] and for their units [B·H, N, K]."""
    values = torch.empty(plan.B, plan.T, plan.H, plan.K, dtype=torch.float16, device=device)
    size = (plan.heads, plan.num_chunks, plan.K)
    return values, torch.empty(size, dtype=torch.float32, device=device)


def gate_gradient(
    plan: Plan,
    query_pulls: Pulls,
    key_pulls: Pulls,
    pairs_pull: Tensor,
    strong: Tensor,
    crossing: Tensor,
    dg: Tensor,
) -> None:
    """Make the gradient of the decays by channel into ``dg``."""
    bk = 64
    launch(
        chunkwise_gate_gradient_kernel,
        plan.heads // plan.group * plan.num_chunks * -(-plan.K // bk),
        query_pulls.values,
        query_pulls.margin,
        key_pulls.values,
        key_pulls.margin,
        pairs_pull,
        strong,
        crossing,
        dg,
        plan.T,
        *plan.counts[:3],
        K=plan.K,
        C=plan.chunk,
        BK=bk,
        GROUP=plan.group,
        PARTS=crossing.shape[0],
        num_warps=8,
        maxnreg=80,
        known=plan.launches,
    )
