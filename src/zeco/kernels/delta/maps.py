"""States through maps of runs of the delta rules' chunks, and such maps through one another.

Maps [N, H, K, V + K] hold the update U beside the transition M (`zeco.kernels.delta.run_maps`). Chains
of a few maps (one sequence's runs) are small: one launch takes all, in three TF32 products that make
up fp32. Where the composed map is needed before the state that enters is known, the maps of what
precedes each run come with it, and the state then goes through all of them at once, not through one
run after the other.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeco.kernels.launch import launch

_CHAIN_WIDTH = 32  # columns a program of a chain of maps
_CHAIN_WARPS = 8
_ROOM = 200 * 1024  # bytes of shared memory that pipelined chains need


@triton.jit
def find_place(H, BLOCKS: tl.constexpr):
    """Return a program's block of columns, head and run (or sequence); blocks come first."""
    pid = tl.program_id(0)
    rest = pid // BLOCKS
    return pid % BLOCKS, (rest % H).to(tl.int64), (rest // H).to(tl.int64)


@triton.jit
def load_block(ptr, rows, columns, in_rows, in_columns, stride: tl.constexpr):
    """Return a block of a matrix whose rows are ``stride`` apart, zeros outside of it."""
    mask = in_rows[:, None] & in_columns[None, :]
    return tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def chain_kernel(
    maps_ptr,
    own_ptr,
    start_ptr,
    states_ptr,
    end_ptr,
    matrix_ptr,
    length,
    num_sharing,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    BACK: tl.constexpr,
    TOTAL: tl.constexpr,
    STORE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Take BN columns of one sequence's state through its maps.

    BACK: through the transposed maps from the last, adding ``own`` in place of the updates. TOTAL:
    from zero and the identity, the columns of the map that all make up. STORE: what comes before each
    map. ``num_sharing`` sequences have one start. States have K rows in one block of BK, or in two.
    """
    TWO: tl.constexpr = K > BK
    W: tl.constexpr = V + K
    V_BLOCKS: tl.constexpr = (V + BN - 1) // BN
    BLOCKS: tl.constexpr = V_BLOCKS + ((K + BN - 1) // BN if TOTAL else 0)
    block, h, sequence = find_place(H, BLOCKS)
    is_state = block < V_BLOCKS
    column = tl.where(is_state, block, block - V_BLOCKS) * BN + tl.arange(0, BN)
    in_column = column < tl.where(is_state, V, K)
    low = tl.arange(0, BK)
    high = BK + low
    in_low, in_high = low < K, high < K
    if TOTAL:
        is_one = (low[:, None] == column[None, :]) & (block >= V_BLOCKS)
        s1 = tl.where(is_one, 1.0, 0.0)
        if TWO:
            is_one = (high[:, None] == column[None, :]) & (block >= V_BLOCKS)
            s2 = tl.where(is_one, 1.0, 0.0)
    else:
        at_state = start_ptr + (sequence // num_sharing * H + h) * K * V
        s1 = load_block(at_state, low, column, in_low, in_column, V)
        if TWO:
            s2 = load_block(at_state, high, column, in_high, in_column, V)
    adds = in_column & is_state
    for step in tl.range(0, length, num_stages=STAGES):
        run = sequence * length + (length - 1 - step if BACK else step)
        at = (run * H + h) * K
        if STORE:
            OUT: tl.constexpr = W if TOTAL else V
            here = states_ptr + at * OUT + tl.where(is_state, column, V + column)[None, :]
            mask = in_low[:, None] & in_column[None, :]
            tl.store(here + low[:, None] * OUT, s1, mask=mask)
            if TWO:
                mask = in_high[:, None] & in_column[None, :]
                tl.store(here + high[:, None] * OUT, s2, mask=mask)
        matrix = maps_ptr + at * W + V
        if BACK:
            n1 = load_block(own_ptr + at * V, low, column, in_low, adds, V)
            m = tl.trans(load_block(matrix, low, low, in_low, in_low, W))
        else:
            n1 = load_block(maps_ptr + at * W, low, column, in_low, adds, W)
            m = load_block(matrix, low, low, in_low, in_low, W)
        n1 = tl.dot(m, s1, n1, input_precision="tf32x3")
        if TWO:
            if BACK:
                n2 = load_block(own_ptr + at * V, high, column, in_high, adds, V)
                m12 = tl.trans(load_block(matrix, high, low, in_high, in_low, W))
                m21 = tl.trans(load_block(matrix, low, high, in_low, in_high, W))
                m22 = tl.trans(load_block(matrix, high, high, in_high, in_high, W))
            else:
                n2 = load_block(maps_ptr + at * W, high, column, in_high, adds, W)
                m12 = load_block(matrix, low, high, in_low, in_high, W)
                m21 = load_block(matrix, high, low, in_high, in_low, W)
                m22 = load_block(matrix, high, high, in_high, in_high, W)
            n1 = tl.dot(m12, s2, n1, input_precision="tf32x3")
            n2 = tl.dot(m21, s1, n2, input_precision="tf32x3")
            s2 = tl.dot(m22, s2, n2, input_precision="tf32x3")
        s1 = n1
    in_rows = in_low[:, None] & in_column[None, :]
    in_more = in_high[:, None] & in_column[None, :]
    if is_state:
        end = end_ptr + (sequence * H + h) * K * V + column[None, :]
        tl.store(end + low[:, None] * V, s1, mask=in_rows)
        if TWO:
            tl.store(end + high[:, None] * V, s2, mask=in_more)
    elif matrix_ptr is not None:
        end = matrix_ptr + (sequence * H + h) * K * K + column[None, :]
        tl.store(end + low[:, None] * K, s1, mask=in_rows)
        if TWO:
            tl.store(end + high[:, None] * K, s2, mask=in_more)


@lru_cache(maxsize=16)
def has_room(device: torch.device) -> bool:
    """Return whether a device has the shared memory of the largest GPUs."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= _ROOM


def _launch(
    maps: Tensor,
    end: Tensor,
    *,
    own: Tensor | None = None,
    start: Tensor | None = None,
    states: Tensor | None = None,
    matrix: Tensor | None = None,
    back: bool = False,
) -> None:
    B, H, K, V = end.shape
    BK = min(128, max(16, triton.next_power_of_2(K)))
    BN = 16 if K > 128 else _CHAIN_WIDTH
    blocks = triton.cdiv(V, BN) + (triton.cdiv(K, BN) if start is None else 0)
    length = len(maps) // B
    is_pipelined = K <= 128 and length > 1 and not back and has_room(maps.device)
    launch(
        chain_kernel,
        blocks * H * B,
        maps,
        own,
        start,
        states,
        end,
        matrix,
        length,
        1 if start is None else B // len(start),
        H,
        K=K,
        V=V,
        BK=BK,
        BN=BN,
        BACK=back,
        TOTAL=start is None,
        STORE=states is not None,
        STAGES=2 if is_pipelined else 1,
        num_warps=_CHAIN_WARPS,
        num_stages=1,
    )


def compose_maps(maps: Tensor, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the map of each sequence's runs together, and those of what precedes each run.

    Args:
        maps: of runs, as many for each sequence, [B·r, H, K, V + K].
        num_sequences: B.

    Returns:
        Update [B, H, K, V], transition [B, H, K, K], and maps like ``maps``.
    """
    _, H, K, width = maps.shape
    update = maps.new_empty(num_sequences, H, K, width - K)
    transition, before = maps.new_empty(num_sequences, H, K, K), torch.empty_like(maps)
    _launch(maps, update, states=before, matrix=transition)
    return update, transition, before


def compose_adjoints(maps: Tensor, own: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
    """Return what the outputs of each sequence's runs send to the state that enters the first.

    Args:
        maps: of runs, as many for each sequence, [B·r, H, K, V + K].
        own: what a run's outputs send to the state that enters it [B·r, H, K, V], fp32.
        num_sequences: B.

    Returns:
        That gradient [B, H, K, V]; and maps like ``maps``, each from the gradient of the state that
        leaves the sequence to that of the state that leaves a run.
    """
    start = own.new_empty(num_sequences, *own.shape[1:])
    after = torch.empty_like(maps)
    _launch(maps, start, own=own, states=after, back=True)
    return start, after


def apply_maps(maps: Tensor, start: Tensor) -> Tensor:
    """Apply as many maps for each sequence to its one state, [B·r, H, K, V].

    Args:
        maps: [B·r, H, K, V + K].
        start: [B, H, K, V], fp32.
    """
    found = start.new_empty(len(maps), *start.shape[1:])
    _launch(maps, found, start=start.contiguous())
    return found


def states_through(maps: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state that enters each run [B·r, H, K, V], and that which leaves the last.

    Args:
        maps: of runs, as many for each sequence, [B·r, H, K, V + K].
        start: the state that enters each sequence [B, H, K, V], fp32.
    """
    start = start.contiguous()
    states, end = start.new_empty(len(maps), *start.shape[1:]), torch.empty_like(start)
    _launch(maps, end, start=start, states=states)
    return states, end


def adjoints_through(maps: Tensor, own: Tensor, d_end: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the state that leaves each run, and of that which enters the first.

    Args:
        maps: of runs, as many for each sequence, [B·r, H, K, V + K].
        own: what a run's outputs send to the state that enters it [B·r, H, K, V], fp32.
        d_end: gradient of the state that leaves each sequence [B, H, K, V], fp32.
    """
    d_end = d_end.contiguous()
    states, start = torch.empty_like(own), torch.empty_like(d_end)
    _launch(maps, start, own=own, start=d_end, states=states, back=True)
    return states, start
