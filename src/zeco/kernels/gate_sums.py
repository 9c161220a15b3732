"""Gates of a chunk: their sums, as products with a small matrix, and what rows are scaled by.

Gates are held as base-2 logarithms, channels by tokens [K, C]. With b the cumulative sum of a chunk and
L its total, rows are scaled relative to the middle of the decay, channel by channel::

    q̂_i = q_i exp2(b_i - L/2)      k̂_j = k_j exp2(L/2 - b_j)      q̂_i·k̂_j = (q_i exp2(b_i - b_j))·k_j

so that a state is scaled by exp2(L/2) before a chunk and after it. A channel whose total is below a
limit M (strong) takes M in place of L in the scaling of states, and rows are scaled by exp2(b_i - M/2)
and exp2(L - b_j - M/2): what enters such a chunk then leaves it decayed by exp2(M), 1e-36 (in fp16
1e-7) in place of less. That serves the states only; pairs inside such a chunk are made by
`zeco.kernels.decay_pairs`.

For bf16 inputs the state pass leaves exp2(b - L/2) packed in 16 bits, so that the passes after it make
no sums: they scale queries by it and keys by its reciprocal.
"""
# ruff: noqa: SIM108  (a conditional expression would compile both sides)
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# exp2 of it is the smallest normal fp32: decays below count as this. It also keeps -inf out of sums.
FLOOR = tl.constexpr(-126.0)

# Half a unit in the last place, and 2^64 off the exponent, in `pack`.
ROUND_AND_REBASE = tl.constexpr(0x80008000)


@triton.jit
def read_gates(desc, b, h, t, k, C: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr):
    """Return the gates [BK, C] of a chunk, floored.

    FORM says how sums are made: 0, from base-2 logarithms in fp32; 1, from gates in 16 bits as they
    are (natural logarithms); 2, from base-2 logarithms in two fp16 pieces (22 bits).
    """
    g = tl.trans(desc.load([b, h, t, k]).reshape(C, BK))
    if FORM == 1:
        # A comparison that NaN fails: it must come out again.
        return tl.where(g < FLOOR * LN2, FLOOR * LN2, g).to(g.dtype)
    else:
        g = g.to(tl.float32) * LOG2E
        return tl.where(g < FLOOR, FLOOR, g)


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
        high = g.to(tl.float16)
        low = (g - high.to(tl.float32)).to(tl.float16)
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
    bits = x.to(tl.uint32, bitcast=True) * 4 + ROUND_AND_REBASE
    return (bits >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def unpack(x):
    """Return the numbers of `pack` in fp32."""
    if INTERPRETED:
        bits = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 14) + 0x20000000
        found = bits.to(tl.float32, bitcast=True)
    else:
        # Two at a time, and opaque to the compiler, which would else take it for dear to repeat.
        found = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            and.b32 t, $2, 0xffff;
            mad.lo.u32 t, t, 16384, 0x20000000;
            mov.b32 $0, t;
            shr.u32 t, $2, 16;
            mad.lo.u32 t, t, 16384, 0x20000000;
            mov.b32 $1, t;
            }""",
            "=f,=f,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return found


@triton.jit
def reciprocal(x):
    """Return 1/x, to two units in the last place."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def read_scales(
    desc,
    b,
    h,
    t,
    k,
    total_ptr,
    rows,
    in_k,
    C: tl.constexpr,
    BK: tl.constexpr,
    FORM: tl.constexpr,
    LIMIT: tl.constexpr,
    AS_STORED: tl.constexpr,
):
    """Return what queries and keys of a chunk are scaled by [BK, C], as [C, BK] if AS_STORED.

    Args:
        desc: the scales that the state pass left, or the gates.
        b, h, t, k: where.
        total_ptr: the chunk's base-2 totals; rows and in_k are the places in them and which exist.
        C, BK: sizes.
        FORM: 3 for scales, else the gates' form.
        LIMIT: base-2 total below which a channel is strong.
        AS_STORED: the order, for scales only.
    """
    if FORM == 3:
        packed = desc.load([b, h, t, k]).reshape(C, BK)
        if not AS_STORED:
            packed = tl.trans(packed)
        found = unpack(packed)
        rising = found
        falling = reciprocal(found)
    else:
        g = read_gates(desc, b, h, t, k, C, BK, FORM)
        total = tl.load(total_ptr + rows, mask=in_k, other=0.0)
        rising, falling = anchored(g, total, C, FORM, LIMIT)
        rising = tl.exp2(rising)
        falling = tl.exp2(falling)
    return rising, falling


@triton.jit
def half_decay(total, LIMIT: tl.constexpr):
    """Return what a state's channel is scaled by before and after a chunk."""
    return tl.exp2(0.5 * tl.maximum(total, LIMIT, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def opaque(x):
    """Return x in 16 bits, in a way that the compiler takes for a computation."""
    if x.dtype != tl.float32 and not INTERPRETED:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2
        )
    return x


@triton.jit
def product(x, y, EXACT: tl.constexpr):
    """Return ``x @ y`` in fp32; fp32 inputs are multiplied as such if EXACT."""
    if EXACT:
        found = tl.dot(x, y, input_precision="tf32x3")
    else:
        found = tl.dot(x, y)
    return found


@triton.jit
def add_product(accumulator, x, y, EXACT: tl.constexpr):
    """Return ``accumulator + x @ y``."""
    if EXACT:
        found = tl.dot(x, y, accumulator, input_precision="tf32x3")
    else:
        found = tl.dot(x, y, accumulator)
    return found
