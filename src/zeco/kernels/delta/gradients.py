"""Gradients of the rows of a chunk of the delta rules, given the states around it and their adjoints.

With S the state that enters a chunk, R the gradient of the one that leaves it, b the cumulative log
decay (0 without a gate), u what the tokens write and D[i,j] = exp(b_i - b_j)::

    o_i = scale · (exp(b_i) Sᵀ q_i + Σ_{j<=i} D[i,j] (q_i·k_j) u_j)
    u   = source - w S            S_next = exp(b_C) S + Σ_j exp(b_C - b_j) k_j u_jᵀ

    ds[i,j] = scale · D[i,j] (do_i · u_j)   (j <= i)
    dq = scale · exp(b) ∘ do Sᵀ + ds k       dk = exp(b_C - b) ∘ u Rᵀ + dsᵀ q       dw = -du Sᵀ
    db = q·dq - k·dk,  and at the chunk's last token  + exp(b_C) Σ S∘R + Σ_j k_j·(exp(b_C - b_j) R u_j)

``db`` lacks what reaches b through w. Flash Linear Attention has this kernel too, but refuses a gate
on Hopper GPUs with Triton 3.4 to 3.7.0.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeco.kernels.delta.maps import find_place
from zeco.kernels.launch import launch

CHUNK = 64

_WIDTH = 64  # channels a program
_NUM_WARPS = 4
_NUM_STAGES = 3


@triton.jit
def delta_rows_bwd_kernel(
    q_ptr,
    k_ptr,
    u_ptr,
    state_ptr,
    decay_ptr,
    do_ptr,
    du_ptr,
    adjoint_ptr,
    dq_ptr,
    dk_ptr,
    dw_ptr,
    db_ptr,
    cu_seqlens_ptr,
    chunk_indices_ptr,
    scale,
    T,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATED: tl.constexpr,
):
    """Compute a block of BK channels of one chunk of one head."""
    K_BLOCKS: tl.constexpr = (K + BK - 1) // BK
    kb, h, chunk = find_place(H, K_BLOCKS)
    run = tl.load(chunk_indices_ptr + 2 * chunk)
    place = tl.load(chunk_indices_ptr + 2 * chunk + 1)
    first = tl.load(cu_seqlens_ptr + run).to(tl.int64) + place * C
    stop = tl.load(cu_seqlens_ptr + run + 1).to(tl.int64)
    count = tl.minimum(stop - first, C).to(tl.int32)

    rows = tl.arange(0, C)
    channels = kb * BK + tl.arange(0, BK)
    inside = rows < count
    in_k = channels < K
    in_rows = inside[:, None] & in_k[None, :]
    row_k = ((first + rows) * H + h)[:, None] * K + channels[None, :]
    row_v = ((first + rows) * H + h)[:, None] * V
    state = (chunk * H + h) * K * V + channels[:, None].to(tl.int64) * V

    ds = tl.zeros([C, C], tl.float32)
    dq = tl.zeros([C, BK], tl.float32)
    dk = tl.zeros([C, BK], tl.float32)
    dw = tl.zeros([C, BK], tl.float32)
    kept = tl.zeros([BK], tl.float32)
    for vb in range(0, (V + BV - 1) // BV):
        values = vb * BV + tl.arange(0, BV)
        in_v = values < V
        in_values = inside[:, None] & in_v[None, :]
        in_state = in_k[:, None] & in_v[None, :]
        u = tl.load(u_ptr + row_v + values[None, :], mask=in_values, other=0.0)
        do = tl.load(do_ptr + row_v + values[None, :], mask=in_values, other=0.0)
        du = tl.load(du_ptr + row_v + values[None, :], mask=in_values, other=0.0)
        s = tl.load(state_ptr + state + values[None, :], mask=in_state, other=0.0)
        r = tl.load(adjoint_ptr + state + values[None, :], mask=in_state, other=0.0)
        ds = tl.dot(do, tl.trans(u), ds)
        dq = tl.dot(do, tl.trans(s), dq)
        dk = tl.dot(u, tl.trans(r), dk)
        dw = tl.dot(du, tl.trans(s), dw)
        if GATED:
            kept += tl.sum(s.to(tl.float32) * r.to(tl.float32), axis=1)

    q = tl.load(q_ptr + row_k, mask=in_rows, other=0.0)
    k = tl.load(k_ptr + row_k, mask=in_rows, other=0.0)
    causal = (rows[:, None] >= rows[None, :]) & inside[:, None]
    if GATED:
        b = tl.load(decay_ptr + (first + rows) * H + h, mask=inside, other=0.0)
        last = tl.load(decay_ptr + (first + count - 1) * H + h)
        ds = tl.where(causal, ds * tl.exp2(tl.where(causal, b[:, None] - b[None, :], 0.0)), 0.0)
        dq = dq * tl.exp2(b)[:, None]
        dk = dk * tl.exp2(tl.where(inside, last - b, 0.0))[:, None]
        at_end = tl.sum(kept) * tl.exp2(last) + tl.sum(dk * k.to(tl.float32))
    else:
        ds = tl.where(causal, ds, 0.0)
    ds = (ds * scale).to(k.dtype)
    dq = tl.dot(ds, k, dq * scale)
    dk = tl.dot(tl.trans(ds), q, dk)
    tl.store(dq_ptr + row_k, dq.to(dq_ptr.dtype.element_ty), mask=in_rows)
    tl.store(dk_ptr + row_k, dk.to(dk_ptr.dtype.element_ty), mask=in_rows)
    tl.store(dw_ptr + row_k, (-dw).to(dw_ptr.dtype.element_ty), mask=in_rows)
    if GATED:
        db = tl.sum(dq * q.to(tl.float32), axis=1) - tl.sum(dk * k.to(tl.float32), axis=1)
        db += tl.where(rows == count - 1, at_end, 0.0)
        tl.store(db_ptr + (kb * T + first + rows) * H + h, db, mask=inside)


@dataclass(frozen=True, eq=False)
class RowGradients:
    """What `row_gradients` returns.

    Attributes:
        q, k, w: gradients [1, T, H, K] in the dtype of k.
        decay: gradient [1, T, H] of the cumulative decay in fp32, or None.
    """

    q: Tensor
    k: Tensor
    w: Tensor
    decay: Tensor | None


def row_gradients(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    states: Tensor,
    decay: Tensor | None,
    d_o: Tensor,
    d_u: Tensor,
    adjoints: Tensor,
    *,
    scale: float,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> RowGradients:
    """Return the gradients of the rows of all chunks; see the module's text.

    Args:
        q, k: [1, T, H, K], contiguous.
        u: what the tokens write [1, T, H, V].
        states: the state that enters each chunk [1, N, H, K, V].
        decay: cumulative log decay of each chunk in base 2, fp32 [1, T, H], or None.
        d_o: gradient of the outputs [1, T, H, V].
        d_u: gradient of u [1, T, H, V].
        adjoints: gradient of the state that leaves each chunk [1, N, H, K, V].
        scale: factor of the queries.
        cu_seqlens: cut points of the runs [runs + 1].
        chunk_indices: run and place there of each chunk [N, 2].
    """
    _, T, H, K = k.shape
    V = u.shape[3]
    BK = min(_WIDTH, max(16, triton.next_power_of_2(K)))
    BV = min(_WIDTH, max(16, triton.next_power_of_2(V)))
    blocks = triton.cdiv(K, BK)
    dq, dk, dw = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    db = None
    if decay is not None:
        db = torch.empty(blocks, T, H, dtype=torch.float32, device=k.device)
    launch(
        delta_rows_bwd_kernel,
        blocks * H * len(chunk_indices),
        q,
        k,
        u,
        states,
        decay,
        d_o,
        d_u,
        adjoints,
        dq,
        dk,
        dw,
        db,
        cu_seqlens,
        chunk_indices,
        scale,
        T,
        H,
        K=K,
        V=V,
        C=CHUNK,
        BK=BK,
        BV=BV,
        GATED=decay is not None,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )
    return RowGradients(dq, dk, dw, None if db is None else db.sum(0, keepdim=True))
