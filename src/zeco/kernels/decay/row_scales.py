"""What rows and states are scaled by in a chunk.

With b the cumulative sum of a chunk's gates, in base 2, and L its total, rows are scaled relative to
the middle of the decay, channel by channel::

    q̂_i = q_i exp2(b_i - L/2)      k̂_j = k_j exp2(L/2 - b_j)      q̂_i·k̂_j = (q_i exp2(b_i - b_j))·k_j

so that a state is scaled by exp2(L/2) before a chunk and after it. A channel whose total is below a
limit M (strong) takes M in place of L in the scaling of states, and rows are scaled by exp2(b_i - M/2)
and exp2(L - b_j - M/2): what enters such a chunk then leaves it decayed by exp2(M), 1e-36 (in fp16
1e-7) in place of less. That serves the states only; pairs inside such a chunk are made by
`zeco.kernels.decay.pairs`.

For bf16 inputs the state pass leaves exp2(b - L/2) packed in 16 bits, so that the passes after it make
no sums: they scale queries by it and keys by its reciprocal.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.decay.gate_sums import (
    after_each,
    around_middle,
    read_gates,
    sum_gates,
    until_each,
)
from zeco.kernels.products import INTERPRETED

# Half a unit in the last place, and 2^64 off the exponent, in `pack`.
ROUND_AND_REBASE = tl.constexpr(0x80008000)


@triton.jit
def half_decay(total, LIMIT: tl.constexpr):
    """Return what a state's channel is scaled by before and after a chunk."""
    return tl.exp2(0.5 * tl.maximum(total, LIMIT, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def anchored(g, total, C: tl.constexpr, FORM: tl.constexpr, LIMIT: tl.constexpr):
    """Return the exponents [BK, C] of queries and of keys; see the module's text.

    Args:
        g: gates [BK, C] from `read_gates`.
        total: their base-2 totals [BK].
        C: tokens a chunk.
        FORM: form of the gates.
        LIMIT: base-2 total below which a channel is strong.
    """
    if FORM == 0:
        # total - b would cancel where a strong decay precedes weak ones: two sums.
        until = sum_gates(g, until_each(C), FORM)
        after = sum_gates(g, after_each(C), FORM)
        middle = 0.5 * (until - after)
        strong = (total < LIMIT)[:, None]
        shift: tl.constexpr = 0.5 * LIMIT
        rising = tl.where(strong, until - shift, middle)
        falling = tl.where(strong, after - shift, -middle)
    else:
        # Halving is exact, and it sends the gates through registers: one shared buffer less.
        middle = sum_gates(g * 0.5, around_middle(C), FORM)
        excess = 0.5 * tl.minimum(total - LIMIT, 0.0)[:, None]
        rising = excess + middle
        falling = excess - middle
    return rising, falling


@triton.jit
def scale_exponent(middle, total, LIMIT: tl.constexpr):
    """Return the exponent [BK, C] of what queries are scaled by; keys are by its negative.

    Args:
        middle: b - L/2 [BK, C].
        total: L [BK].
        LIMIT: M.

    In a strong channel queries should get b - M/2 and keys L - b - M/2, which don't cancel. This takes
    the greater where that is positive, else 0. Where it makes the other greater than it should be, the
    scaling of the state by exp2(M/2) leaves nothing of it.
    """
    beyond = -0.5 * tl.minimum(total - LIMIT, 0.0)[:, None]
    return middle - tl.minimum(tl.maximum(middle, -beyond), beyond)


@triton.jit
def pack(x):
    """Return numbers from 2^-63 to 2^63 rounded to 16 bits: 7 of the exponent, 9 of the mantissa.

    Zero, which is what rows and channels that don't exist are read as, stands for 2^-63.
    """
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True) * 4 + ROUND_AND_REBASE
        return (bits >> 16).to(tl.uint16).to(tl.int16, bitcast=True)
    else:
        # Two at a time.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t;
            mad.lo.u32 s, $1, 4, 0x80008000;
            mad.lo.u32 t, $2, 4, 0x80008000;
            prmt.b32 $0, s, t, 0x7632;
            }""",
            "=r,r,r",
            [x.to(tl.int32, bitcast=True)],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def unpack(x):
    """Return the numbers of `pack` in fp32."""
    bits = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 14) + 0x20000000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _scale_by_packed(q, k, packed, SCALE: tl.constexpr):
    """Return what `scale_rows` does, of bf16 and of what `pack` made, two at a time.

    All of it in one layout: else the compiler would unpack once for each.
    """
    if INTERPRETED:
        rising = unpack(packed)
        falling = 1.0 / rising
        rising *= SCALE
        return (
            (q.to(tl.float32) * rising).to(q.dtype),
            (k.to(tl.float32) * falling).to(k.dtype),
            rising,
            falling,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t;
            .reg .f32 x, y;
            and.b32 s, $8, 0xffff;
            shr.u32 t, $8, 16;
            mad.lo.u32 s, s, 16384, 0x20000000;
            mad.lo.u32 t, t, 16384, 0x20000000;
            mov.b32 x, s;
            mov.b32 y, t;
            rcp.approx.ftz.f32 $4, x;
            rcp.approx.ftz.f32 $5, y;
            mul.f32 $2, x, $9;
            mul.f32 $3, y, $10;
            shl.b32 s, $6, 16;
            and.b32 t, $6, 0xffff0000;
            mov.b32 x, s;
            mov.b32 y, t;
            mul.f32 x, x, $2;
            mul.f32 y, y, $3;
            cvt.rn.bf16x2.f32 $0, y, x;
            shl.b32 s, $7, 16;
            and.b32 t, $7, 0xffff0000;
            mov.b32 x, s;
            mov.b32 y, t;
            mul.f32 x, x, $4;
            mul.f32 y, y, $5;
            cvt.rn.bf16x2.f32 $1, y, x;
            }""",
            "=&r,=&r,=&f,=&f,=&f,=&f,r,r,r,f,f",
            [q, k, packed, SCALE],
            dtype=(tl.bfloat16, tl.bfloat16, tl.float32, tl.float32),
            is_pure=True,
            pack=2,
        )


@triton.jit
def scale_rows(
    q,
    k,
    desc,
    b,
    h,
    t,
    first_k,
    total_ptr,
    rows,
    in_k,
    SCALE: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    FORM: tl.constexpr,
    LIMIT: tl.constexpr,
    AS_STORED: tl.constexpr,
):
    """Return queries and keys of a chunk as products take them, and what each are scaled by.

    Args:
        q, k: [BK, C], or [C, BK] if AS_STORED.
        desc: the scales that the state pass left, or the gates.
        b, h, t, first_k: where.
        total_ptr: the chunk's base-2 totals; rows and in_k are the places in them and which exist.
        SCALE: a factor of the queries.
        C, BK: sizes.
        FORM: 3 for scales, else the gates' form.
        LIMIT: base-2 total below which a channel is strong.
        AS_STORED: the order, for scales only.
    """
    if FORM == 3:
        packed = desc.load([b, h, t, first_k]).reshape(C, BK)
        if not AS_STORED:
            packed = tl.trans(packed)
        return _scale_by_packed(q, k, packed, SCALE)
    else:
        g = read_gates(desc, b, h, t, first_k, C, BK, FORM)
        total = tl.load(total_ptr + rows, mask=in_k, other=0.0)
        rising, falling = anchored(g, total, C, FORM, LIMIT)
        rising = tl.exp2(rising) * SCALE
        falling = tl.exp2(falling)
        return (
            (q.to(tl.float32) * rising).to(q.dtype),
            (k.to(tl.float32) * falling).to(k.dtype),
            rising,
            falling,
        )
