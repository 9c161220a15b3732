"""Rows of wide keys, scaled by channel once for all passes that read them."""
# ruff: noqa: SIM108  (a conditional expression would compile both sides)
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeco.kernels.decay.gate_sums import floor_gates, power, total_gates
from zeco.kernels.decay.plan import Plan
from zeco.kernels.decay.row_scales import anchored, pack, scale_exponent, unpack
from zeco.kernels.decay.state import find_place
from zeco.kernels.launch import launch
from zeco.kernels.products import reciprocal

if TYPE_CHECKING:
    from zeco.kernels.decay.passes import Chunks


@dataclass
class Rows:
    """A call's rows scaled by channel [B, T, H, K], each once they have been needed."""

    queries: Tensor | None = None
    keys: Tensor | None = None


@triton.jit
def chunkwise_rows_kernel(
    x_ptr,
    scales_ptr,
    scaled_ptr,
    packed_ptr,
    total_ptr,
    strong_ptr,
    x_stride_b,
    x_stride_t,
    x_stride_h,
    scales_stride_b,
    scales_stride_t,
    scales_stride_h,
    T,
    heads,
    num_chunks,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FORM: tl.constexpr,
    LIMIT: tl.constexpr,
    PACKED: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Scale queries, or with KEYS keys, as `zeco.kernels.decay.row_scales` has it, into [B, T, H, K].

    By packed scales (FORM 3) or by the gates. From these it leaves, where there is room, each chunk's
    totals [B·H, N, K] and whether any channel is strong [B·H, N], raised from zero, for every head of
    values, and the packed scales; without PACKED, gates scale as where nothing is packed.

    Loads and stores by address: all of a program's loads are in flight together then.
    """
    kb, c, shared, b, h, _, _ = find_place(
        None, heads, num_chunks, num_chunks, 1, (K + BK - 1) // BK
    )
    b = b.to(tl.int64)
    t = (c * C + tl.arange(0, C)).to(tl.int64)
    ks = kb * BK + tl.arange(0, BK)
    in_k = ks < K
    inside = (t < T)[:, None] & in_k[None, :]
    x_at = x_ptr + b * x_stride_b + h * x_stride_h + t[:, None] * x_stride_t + ks[None, :]
    scales_at = scales_ptr + b * scales_stride_b + h * scales_stride_h
    scales_at += t[:, None] * scales_stride_t + ks[None, :]
    scales = tl.load(scales_at, mask=inside, other=0.0)
    x = tl.load(x_at, mask=inside, other=0.0)
    at = ((b * T + t[:, None]) * heads + h) * K + ks[None, :]
    if FORM == 3:
        rising = unpack(scales)
        falling = reciprocal(rising)
    else:
        if PACKED:
            g = floor_gates(scales, 2)
            total = tl.sum(g, 0)
            middle = tl.trans(tl.cumsum(g, 0) - 0.5 * total[None, :])
            rising = power(tl.trans(scale_exponent(middle, total, LIMIT)))
            falling = reciprocal(rising)
        else:
            # Channels first, as sums by products come out.
            g = tl.trans(floor_gates(scales, FORM))
            total = total_gates(g, C, FORM)
            rising, falling = anchored(g, total, C, FORM, LIMIT)
            rising, falling = tl.trans(tl.exp2(rising)), tl.trans(tl.exp2(falling))
        if packed_ptr is not None:
            tl.store(packed_ptr + at, pack(rising), mask=inside)
        if total_ptr is not None:
            any_strong = tl.max(tl.where(in_k & ((total < LIMIT) | (total != total)), 1, 0), 0)
            for member in tl.static_range(GROUP):
                row = (shared * GROUP + member).to(tl.int64) * num_chunks + c
                tl.store(total_ptr + row * K + ks, total, mask=in_k)
                tl.store(strong_ptr + row, any_strong, mask=any_strong == 1)
    if KEYS:
        weight = falling
    else:
        weight = rising * SCALE
    tl.store(scaled_ptr + at, (x.to(tl.float32) * weight).to(x.dtype), mask=inside)


def scale_by_gates(
    plan: Plan, x: Tensor, g: Tensor, chunks: Chunks, *, scale: float, keys: bool
) -> Tensor:
    """Return queries or keys scaled; leave these rows in the chunks, and what the gates are like."""
    packed = chunks.scales if plan.packed else None
    found = _scale(plan, x, g, plan.form, scale, keys, (packed, chunks.total, chunks.strong))
    rows = cast("Rows", chunks.rows)
    if keys:
        rows.keys = found
    else:
        rows.queries = found
    return found


def scaled_rows(
    plan: Plan, q: Tensor, k: Tensor, chunks: Chunks, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the scaled queries and keys of a call of which some were scaled."""
    rows = cast("Rows", chunks.rows)
    if rows.queries is None:
        rows.queries = _scale(plan, q, chunks.scales, chunks.form, scale, keys=False)
    if rows.keys is None:
        rows.keys = _scale(plan, k, chunks.scales, chunks.form, scale, keys=True)
    return rows.queries, rows.keys


def _scale(
    plan: Plan,
    x: Tensor,
    scales: Tensor,
    form: int,
    scale: float,
    keys: bool,
    left: tuple[Tensor | None, ...] = (None, None, None),
) -> Tensor:
    """Return x scaled; ``left`` is room for packed scales, totals and flags."""
    # Sums of gates want small programs, of which a multiprocessor holds many.
    bk, warps = (64, 8) if form == 3 else (32, 4)
    scaled = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        chunkwise_rows_kernel,
        x.shape[0] * x.shape[2] * plan.num_chunks * -(-plan.K // bk),
        x,
        scales,
        scaled,
        *left,
        *x.stride()[:3],
        *scales.stride()[:3],
        plan.T,
        x.shape[2],
        plan.num_chunks,
        K=plan.K,
        C=plan.chunk,
        BK=bk,
        GROUP=plan.group,
        FORM=form,
        LIMIT=plan.limit,
        PACKED=plan.packed,
        KEYS=keys,
        SCALE=scale,
        num_warps=warps,
        maxnreg=80,
        known=plan.launches,
    )
    return scaled
