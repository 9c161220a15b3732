"""Maps of runs of the delta rules' chunks.

A run maps the state that enters it to the one that leaves it, S -> M S + U. Both come from one pass
over its chunks: each column of U is a state that starts from zero, each column of M one that starts
from a column of the identity and writes no values. So a transition costs what a state of K value
channels costs, and is rounded alike; its chunks' K×K matrices are never formed.

With w the WY rows, k the keys decayed to the chunk's end and x what a chunk's tokens write::

    x = u - w S            S <- exp(b_C) ∘ S + kᵀ x

RWKV-7 writes x = u + w S, and its values along another key besides (``BESIDE``).

Where gates are strong or runs long, M comes to nothing: once columns of it are zero in fp32 they stay
so, and are walked no further. How far they got is how far the entering state reaches, and spares the
walk back (`zeco.kernels.delta.adjoints`) all chunks behind.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeco.kernels.delta.maps import find_place
from zeco.kernels.launch import launch

_WIDTH = 64  # columns a program
_NUM_WARPS = 4
LOOK = (
    8  # chunks before the first look at whether columns are zero; from look to look twice as many
)


@triton.jit
def run_maps_kernel(
    k_ptr,
    w_ptr,
    u_ptr,
    decay_ptr,
    key_ptr,
    v_ptr,
    maps_ptr,
    reach_ptr,
    cu_seqlens_ptr,
    first_run,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    GATE: tl.constexpr,
    BESIDE: tl.constexpr,
    LOOK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Walk one run with BN columns of its map; GATE is 0 for none, 1 a head, 2 a channel."""
    V_BLOCKS: tl.constexpr = (V + BN - 1) // BN
    K_BLOCKS: tl.constexpr = (K + BN - 1) // BN
    block, h, run = find_place(H, V_BLOCKS + K_BLOCKS)
    start = tl.load(cu_seqlens_ptr + first_run + run).to(tl.int64)
    stop = tl.load(cu_seqlens_ptr + first_run + run + 1).to(tl.int64)
    tokens = (stop - start).to(tl.int32)

    is_update = block < V_BLOCKS
    column = tl.where(is_update, block, block - V_BLOCKS) * BN + tl.arange(0, BN)
    width = tl.where(is_update, V, K)
    rows, channels = tl.arange(0, C), tl.arange(0, BK)
    in_k, in_column = channels < K, column < width
    state = tl.where((channels[:, None] == column[None, :]) & (block >= V_BLOCKS), 1.0, 0.0)
    done, chunks = 0, (tokens + C - 1) // C
    ahead = tl.where(is_update, chunks, LOOK)
    while done < chunks:
        until = tl.minimum(done + ahead, chunks)
        for c in tl.range(done, until, num_stages=STAGES):
            inside = c * C + rows < tokens
            token = (start + c * C + rows) * H + h
            last = (start + tl.minimum(c * C + C, tokens) - 1) * H + h
            in_rows = inside[:, None] & in_k[None, :]
            w = tl.load(w_ptr + token[:, None] * K + channels[None, :], mask=in_rows, other=0.0)
            k = tl.load(k_ptr + token[:, None] * K + channels[None, :], mask=in_rows, other=0.0)
            in_u = inside[:, None] & (in_column & is_update)[None, :]
            u = tl.load(u_ptr + token[:, None] * V + column[None, :], mask=in_u, other=0.0)
            read = tl.dot(w, state.to(w.dtype))
            x = u.to(tl.float32) + (read if BESIDE else -read)
            if GATE == 1:
                b = tl.load(decay_ptr + token, mask=inside, other=0.0)
                total = tl.load(decay_ptr + last)
                x = x * tl.exp2(tl.where(inside, total - b, 0.0))[:, None]
                state = state * tl.exp2(total)
            if GATE == 2:
                total = tl.load(decay_ptr + last * K + channels, mask=in_k, other=0.0)
                state = state * tl.exp2(total)[:, None]
            state = tl.dot(tl.trans(k), x.to(k.dtype), state)
            if BESIDE:
                v = tl.load(v_ptr + token[:, None] * V + column[None, :], mask=in_u, other=0.0)
                at_key = key_ptr + token[:, None] * K + channels[None, :]
                key = tl.load(at_key, mask=in_rows, other=0.0)
                state = tl.dot(tl.trans(key), v, state)
        done, ahead = until, 2 * ahead
        is_zero = tl.max(tl.max(tl.abs(state), 1), 0) == 0.0
        chunks = tl.where(is_zero & (block >= V_BLOCKS), until, chunks)
    if block >= V_BLOCKS:
        tl.store(reach_ptr + (run * H + h) * K_BLOCKS + block - V_BLOCKS, done)
    at = (run * H + h) * K * (V + K) + channels[:, None] * (V + K)
    at += tl.where(is_update, column, V + column)[None, :]
    tl.store(maps_ptr + at, state, mask=in_k[:, None] & in_column[None, :])


def run_maps(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    decay: Tensor | None,
    *,
    beside: tuple[Tensor, Tensor] | None = None,
    chunk: int = 64,
    cu_seqlens: Tensor,
    first: int,
    stop: int,
) -> tuple[Tensor, Tensor]:
    """Return the maps of runs first to stop - 1, and how far the states that enter them reach.

    The maps are fp32 [stop - first, H, K, V + K]; the others count the chunks that see anything of
    what enters a run, for blocks of its channels, int32 [stop - first, H, blocks].

    Args:
        k: keys [1, T, H, K], contiguous; with a gate a channel, decayed to the chunk's end.
        w: WY rows [1, T, H, K].
        u: their values [1, T, H, V].
        decay: cumulative log decay of each chunk in base 2, fp32 [1, T, H] or [1, T, H, K], or None.
        beside: keys like k and values [1, T, H, V] that are written too; w is added then.
        chunk: tokens a chunk.
        cu_seqlens: cut points of all runs.
        first: the first run.
        stop: one past the last.
    """
    _, _, H, K = k.shape
    V = u.shape[3]
    BK = max(16, triton.next_power_of_2(K))
    BN = _WIDTH if BK <= 128 else 32
    size = (stop - first, H, K, V + K)
    maps = torch.empty(size, dtype=torch.float32, device=k.device)
    reach = torch.empty(*size[:2], triton.cdiv(K, BN), dtype=torch.int32, device=k.device)
    blocks = triton.cdiv(V, BN) + triton.cdiv(K, BN)
    gate = 0 if decay is None else decay.ndim - 2
    key, v = (None, None) if beside is None else beside
    launch(
        run_maps_kernel,
        blocks * H * (stop - first),
        k,
        w,
        u,
        decay,
        key,
        v,
        maps,
        reach,
        cu_seqlens,
        first,
        H,
        K=K,
        V=V,
        C=chunk,
        BK=BK,
        BN=BN,
        GATE=gate,
        BESIDE=beside is not None,
        LOOK=LOOK if gate else 1 << 24,
        STAGES=2 if beside is None or chunk < 64 else 1,
        num_warps=_NUM_WARPS,
    )
    return maps, reach
