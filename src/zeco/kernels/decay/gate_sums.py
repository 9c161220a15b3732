"""Gates of a chunk and their sums, as products with a small matrix.

Gates are held as base-2 logarithms, channels by tokens [K, C].
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.products import INTERPRETED, two_pieces

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# exp2 of it is the smallest normal fp32: decays below count as this. It also keeps -inf out of sums.
FLOOR = tl.constexpr(-126.0)


@triton.jit
def read_gates(desc, b, h, t, k, C: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr):
    """Return the gates [BK, C] of a chunk, floored; see `floor_gates`."""
    return floor_gates(tl.trans(desc.load([b, h, t, k]).reshape(C, BK)), FORM)


@triton.jit
def floor_gates(g, FORM: tl.constexpr):
    """Return gates, natural logarithms, as sums are made of them, floored.

    FORM says how these are made: 0, from base-2 logarithms in fp32; 1, from gates in 16 bits as they
    are (natural logarithms); 2, from base-2 logarithms in two fp16 pieces (22 bits).
    """
    if FORM == 1 and not INTERPRETED:
        # Two at a time.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 floor;
            mov.b32 floor, 0xc2afc2af;
            max.NaN.bf16x2 $0, $1, floor;
            }""",
            "=r,r",
            [g],
            dtype=g.dtype,
            is_pure=True,
            pack=2,
        )
    elif FORM == 1:
        # A comparison that NaN fails: it must come out again.
        return tl.where(g < FLOOR * LN2, FLOOR * LN2, g).to(g.dtype)
    else:
        return tl.maximum(g.to(tl.float32) * LOG2E, FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sum_gates(g, matrix, FORM: tl.constexpr):
    """Return the base-2 sums ``g @ matrix`` [BK, C] of gates [BK, C] from `read_gates`.

    The entries of matrix [C, C] are 0 or ±1: exact in 16 bits.
    """
    if FORM == 0:
        sums = tl.dot(g, matrix, input_precision="tf32x3")
    elif FORM == 1:
        sums = tl.dot(g, matrix.to(g.dtype)) * LOG2E
    else:
        high, low = two_pieces(g, tl.float16)
        m = matrix.to(tl.float16)
        sums = tl.dot(low, m, tl.dot(high, m))
    return sums


@triton.jit
def total_gates(g, C: tl.constexpr, FORM: tl.constexpr):
    """Return the base-2 totals [BK] of gates [BK, C].

    A product with ones: it leaves the sum where the state's rows are, without a trip through
    shared memory.
    """
    return tl.max(sum_gates(g, tl.full([C, 16], 1.0, tl.float32), FORM), 1)


@triton.jit
def until_each(C: tl.constexpr):
    """Return the matrix that sums tokens up to each one, itself included."""
    i = tl.arange(0, C)
    return tl.where(i[:, None] <= i[None, :], 1.0, 0.0)


@triton.jit
def after_each(C: tl.constexpr):
    """Return the matrix that sums the tokens after each one."""
    i = tl.arange(0, C)
    return tl.where(i[:, None] > i[None, :], 1.0, 0.0)


@triton.jit
def around_middle(C: tl.constexpr):
    """Return the matrix that turns halved gates into their sum up to each token, less half the total."""
    i = tl.arange(0, C)
    return tl.where(i[:, None] <= i[None, :], 1.0, -1.0)


@triton.jit
def power(x):
    """Return 2^x, or zero where that is below the normal numbers."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
