"""What the outputs of runs of the delta family's chunks send to the states that enter the runs.

The mirror of `zeco.kernels.delta.run_maps`: one walk back over a run's chunks, from zero. With R
the gradient of the state that leaves a chunk, k and q its keys and queries, decayed to its end and
from its start, w the rows that read the state it starts from, with their sign, and x what its tokens
write::

    dx = d_inner + k R            R <- exp(b_C) ∘ R + scale · qᵀ do + wᵀ dx

``d_inner``, what the outputs send to x within the chunk, is given or made here of the chunk's scores.
Only R is kept: the chunks' own R and dx wait for the state that the run's end sends back.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeco.kernels.delta.maps import find_place, has_room
from zeco.kernels.launch import launch

_ENOUGH = 96  # programs at once that are worth wide ones, which read q, k and w once


@triton.jit
def run_adjoints_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    do_ptr,
    inner_ptr,
    scores_ptr,
    decay_ptr,
    starts_ptr,
    reach_ptr,
    cu_seqlens_ptr,
    scale,
    H,
    REACHES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
    GIVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Walk one run back with BN columns; GATE is 0 for none, 1 a head, 2 a channel.

    REACHES: how many counts of chunks there are, behind the largest of which nothing of what enters
    the run is left; 0 for none. ADDS: whether w is added or taken away. GIVEN: d_inner, in place of
    the scores.
    """
    BLOCKS: tl.constexpr = (V + BN - 1) // BN
    block, h, run = find_place(H, BLOCKS)
    start = tl.load(cu_seqlens_ptr + run).to(tl.int64)
    tokens = (tl.load(cu_seqlens_ptr + run + 1).to(tl.int64) - start).to(tl.int32)
    chunks = (tokens + C - 1) // C
    if REACHES:
        reach = 0
        for i in tl.static_range(REACHES):
            reach = tl.maximum(reach, tl.load(reach_ptr + (run * H + h) * REACHES + i))
        chunks = tl.minimum(chunks, reach)

    column = block * BN + tl.arange(0, BN)
    rows, channels = tl.arange(0, C), tl.arange(0, BK)
    in_k, in_column = channels < K, column < V
    state = tl.zeros([BK, BN], tl.float32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        c = chunks - 1 - step
        inside = c * C + rows < tokens
        token = (start + c * C + rows) * H + h
        last = (start + tl.minimum(c * C + C, tokens) - 1) * H + h
        in_rows = inside[:, None] & in_k[None, :]
        in_values = inside[:, None] & in_column[None, :]
        q = tl.load(q_ptr + token[:, None] * K + channels[None, :], mask=in_rows, other=0.0)
        k = tl.load(k_ptr + token[:, None] * K + channels[None, :], mask=in_rows, other=0.0)
        w = tl.load(w_ptr + token[:, None] * K + channels[None, :], mask=in_rows, other=0.0)
        do = tl.load(do_ptr + token[:, None] * V + column[None, :], mask=in_values, other=0.0)
        dx = tl.dot(k, state.to(k.dtype))
        if GATE == 1:
            b = tl.load(decay_ptr + token, mask=inside, other=0.0)
            total = tl.load(decay_ptr + last)
            dx = dx * tl.exp2(tl.where(inside, total - b, 0.0))[:, None]
            state = state * tl.exp2(total)
        if GATE == 2:
            total = tl.load(decay_ptr + last * K + channels, mask=in_k, other=0.0)
            state = state * tl.exp2(total)[:, None]
        if GIVEN:
            at = token[:, None] * V + column[None, :]
            dx += tl.load(inner_ptr + at, mask=in_values, other=0.0)
        else:
            # Above the diagonal scores may be anything.
            seen = inside[:, None] & (rows[:, None] >= rows[None, :])
            at = token[:, None] * C + rows[None, :]
            scores = tl.load(scores_ptr + at, mask=seen, other=0.0)
            dx = tl.dot(tl.trans(scores), do, dx)
        if not ADDS:
            dx = -dx
        if GATE == 1:
            do = (do * tl.exp2(b)[:, None]).to(k.dtype)
        state += tl.dot(tl.trans(q), do) * scale
        state = tl.dot(tl.trans(w), dx.to(w.dtype), state)
    at = (run * H + h) * K * V + channels[:, None] * V + column[None, :]
    tl.store(starts_ptr + at, state, mask=in_k[:, None] & in_column[None, :])


def run_adjoints(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    d_o: Tensor,
    decay: Tensor | None,
    *,
    inner: Tensor | None = None,
    scores: Tensor | None = None,
    scale: float,
    cu_seqlens: Tensor,
    reach: Tensor | None = None,
    chunk: int = 64,
    adds: bool = False,
) -> Tensor:
    """Return the gradients of the states that enter the runs, fp32 [N, H, K, V].

    Args:
        q: queries [1, T, H, K], contiguous; with a gate a channel, decayed from the chunk's start.
        k: directions along which tokens write [1, T, H, K]; with such a gate, decayed to its end.
        w: WY rows [1, T, H, K].
        d_o: gradient of the outputs [1, T, H, V].
        decay: cumulative log decay of each chunk in base 2, fp32 [1, T, H] or [1, T, H, K], or None.
        inner: what the outputs send to what the tokens of their chunk write [1, T, H, V], or None.
        scores: in its place the products of queries and directions, scaled [1, T, H, chunk].
        scale: factor of q.
        cu_seqlens: cut points of the runs.
        reach: what `zeco.kernels.delta.run_maps` found for all runs, to leave out what lies
            behind; None to walk all chunks.
        chunk: tokens a chunk.
        adds: whether tokens write what w reads of the state, or its negative.
    """
    _, _, H, K = k.shape
    V, num_runs = d_o.shape[3], len(cu_seqlens) - 1
    BK = max(16, triton.next_power_of_2(K))
    gate = 0 if decay is None else decay.ndim - 2
    BN, num_warps, stages = (64, 4, 2) if BK <= 128 else (32, 4, 1)
    if not has_room(k.device):
        BN, stages = 32, 1
    elif BN < V and gate != 1 and chunk >= 64 and triton.cdiv(V, 128) * H * num_runs >= _ENOUGH:
        BN, num_warps = (128, 8) if BK <= 128 else (BN, num_warps)
    starts = torch.empty(num_runs, H, K, V, dtype=torch.float32, device=k.device)
    launch(
        run_adjoints_kernel,
        triton.cdiv(V, BN) * H * num_runs,
        q,
        k,
        w,
        d_o,
        inner,
        scores,
        decay,
        starts,
        reach,
        cu_seqlens,
        scale,
        H,
        REACHES=0 if reach is None else reach.shape[2],
        K=K,
        V=V,
        C=chunk,
        BK=BK,
        BN=BN,
        GATE=gate,
        ADDS=adds,
        GIVEN=inner is not None,
        STAGES=stages,
        num_warps=num_warps,
    )
    return starts
