"""Gradients of what each token has one number of: its gate, its step and its skip."""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.decay.state import find_place
from zeco.kernels.scalar.sums import token_at


@triton.jit
def scalar_gate_gradient_kernel(
    query_pull_ptr,
    key_pull_ptr,
    crossing_ptr,
    key_query_ptr,
    value_gradient_ptr,
    sums_ptr,
    dg_ptr,
    d_step_ptr,
    d_skip_ptr,
    table_ptr,
    scale,
    dg_stride_b,
    dg_stride_t,
    dg_stride_h,
    d_step_stride_b,
    d_step_stride_t,
    d_step_stride_h,
    d_skip_stride_b,
    d_skip_stride_t,
    d_skip_stride_h,
    T,
    H,
    heads,
    num_chunks,
    num_segments,
    chunks_per_segment,
    C: tl.constexpr,
    EXACT: tl.constexpr,
    PULLS: tl.constexpr,
    CROSSINGS: tl.constexpr,
    BT: tl.constexpr,
):
    """Gradients of the log decays, as `zeco.kernels.decay.gate_gradient` has it, of steps and skips.

    The pulls come in ``PULLS`` parts, to be added, what crosses in ``CROSSINGS``. A step's gradient is
    what its key's pull would be without it, the pair with itself included.
    """
    _, segment, bh, b, h, first, stop = find_place(
        table_ptr, H, num_chunks, num_segments, chunks_per_segment, 1
    )
    size = tl.cast(heads, tl.int64) * num_chunks * C
    own_start = bh.to(tl.int64) * num_chunks * C
    b = b.to(tl.int64)
    carried = tl.full([], 0.0, tl.float32)
    if dg_ptr is not None:
        for part in tl.static_range(CROSSINGS):
            carried += tl.load(crossing_ptr + (part * heads + bh) * num_segments + segment)
    i = tl.arange(0, BT)
    for start in tl.range(first * C, stop * C, BT):
        t = start + i.to(tl.int64)
        at = own_start + t
        inside = (t < stop * C) & (t < T)
        if dg_ptr is not None:
            # Those of the tokens before: a running sum of them leaves each token's own pull out.
            before = (t > first * C) & (t <= stop * C)
            pull = tl.zeros([BT], tl.float32)
            for part in tl.static_range(PULLS):
                pull += tl.load(key_pull_ptr + part * size + at - 1, mask=before, other=0.0)
                pull -= tl.load(query_pull_ptr + part * size + at - 1, mask=before, other=0.0)
            dg = carried + tl.cumsum(pull, 0)
            dg_at = token_at(dg_ptr, b, h, t, dg_stride_b, dg_stride_t, dg_stride_h)
            tl.store(dg_at, dg.to(dg_ptr.dtype.element_ty), mask=inside)
            carried += tl.sum(pull, 0)
        if d_step_ptr is not None:
            pull = tl.zeros([BT], tl.float32)
            for part in tl.static_range(PULLS):
                pull += tl.load(key_pull_ptr + part * size + at, mask=inside, other=0.0)
            PARTS: tl.constexpr = 2 if EXACT else 1
            steps = tl.load(sums_ptr + PARTS * size + at, mask=inside, other=0.0)
            own = tl.load(key_query_ptr + at, mask=inside, other=0.0)
            own *= tl.load(value_gradient_ptr + at, mask=inside, other=0.0)
            found = pull * tl.exp2(-steps) + scale * own
            step_at = token_at(
                d_step_ptr, b, h, t, d_step_stride_b, d_step_stride_t, d_step_stride_h
            )
            tl.store(step_at, found.to(d_step_ptr.dtype.element_ty), mask=inside)
        if d_skip_ptr is not None:
            found = tl.load(value_gradient_ptr + at, mask=inside, other=0.0)
            skip_at = token_at(
                d_skip_ptr, b, h, t, d_skip_stride_b, d_skip_stride_t, d_skip_stride_h
            )
            tl.store(skip_at, found.to(d_skip_ptr.dtype.element_ty), mask=inside)
