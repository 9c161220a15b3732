"""Sums of gradients over heads that share a row, in one pass and rounded once."""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeco.kernels.launch import Launches, launch

_BLOCK = 2048


@triton.jit
def head_sums_kernel(
    x_ptr, sums_ptr, numbers, WIDTH: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Add COUNT rows [WIDTH] that lie one after the other to one."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = at // WIDTH * (COUNT * WIDTH) + at % WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for member in tl.static_range(COUNT):
        total += tl.load(x_ptr + first + member * WIDTH, mask=at < numbers, other=0.0).to(
            tl.float32
        )
    tl.store(sums_ptr + at, total.to(sums_ptr.dtype.element_ty), mask=at < numbers)


def head_sums(x: Tensor, heads: int, dtype: torch.dtype, known: Launches) -> Tensor:
    """Return the sums [B, T, H, ...] of x [B, T, H·n, ...], contiguous, over each head's n.

    Args:
        x: gradients of every head of values.
        heads: H.
        dtype: of the sums.
        known: launches of before with the same shapes.
    """
    size = (*x.shape[:2], heads, *x.shape[3:])
    sums = torch.empty(size, dtype=dtype, device=x.device)
    launch(
        head_sums_kernel,
        -(-sums.numel() // _BLOCK),
        x,
        sums,
        sums.numel(),
        WIDTH=x[0, 0, 0].numel(),
        COUNT=x.shape[2] // heads,
        BLOCK=_BLOCK,
        num_warps=8,
        known=known,
    )
    return sums
