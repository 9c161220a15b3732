"""Products on the matrix units, and how what enters them is prepared."""
# ruff: noqa: SIM108  (a conditional expression would compile both sides)
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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


@triton.jit
def pair_mask(C: tl.constexpr, NEAREST: tl.constexpr, REVERSE: tl.constexpr, EXACT: tl.constexpr):
    """Return which pairs of a chunk's tokens a walk sees [C, C], as `keep_pairs` takes it.

    Those of a token with itself (NEAREST 0) or only with ones before it (1), which are in rows; in
    reverse later ones are.
    """
    i = tl.arange(0, C)
    if REVERSE:
        seen = i[:, None] >= i[None, :] + NEAREST
    else:
        seen = i[:, None] + NEAREST <= i[None, :]
    if EXACT or INTERPRETED:
        return seen
    else:
        return tl.where(seen, -1, 0).to(tl.int16)


@triton.jit
def keep_pairs(pairs, mask, flag, like, EXACT: tl.constexpr):
    """Return pairs as numbers of another tensor's dtype, zero but where they are seen.

    Args:
        pairs: products in fp32.
        mask: which of them are seen, from `pair_mask`.
        flag: whether the chunk is strong, so that none is; None for no.
        like: the other tensor.
        EXACT: whether it is in fp32.
    """
    if flag is not None and (EXACT or INTERPRETED):
        kept = tl.where(mask & (flag == 0), pairs, 0.0).to(like.dtype)
    elif EXACT or INTERPRETED:
        kept = tl.where(mask, pairs, 0.0).to(like.dtype)
    elif flag is None:
        kept = tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;",
            "=r,r,r",
            [pairs.to(like.dtype), mask],
            dtype=like.dtype,
            is_pure=True,
            pack=2,
        )
    else:
        # Two at a time, in place of a comparison and a choice for each.
        pairs = pairs.to(like.dtype)
        kept = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x80;",
            "=r,r,r,r",
            [pairs, mask, tl.where(flag == 0, -1, 0).to(tl.int16)],
            dtype=like.dtype,
            is_pure=True,
            pack=2,
        )
    return kept


@triton.jit
def own_pairs(pairs, i):
    """Return the pairs [C, C] of each token with itself [C]; i are the numbers of the tokens."""
    # Along rows: that is a sum within each warp.
    return tl.sum(tl.where(i[:, None] == i[None, :], pairs, 0.0), 1)


@triton.jit
def opaque(x):
    """Return x in 16 bits, in a way that the compiler takes for a computation."""
    if x.dtype != tl.float32 and not INTERPRETED:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2
        )
    return x


@triton.jit
def two_pieces(x, DTYPE: tl.constexpr):
    """Return x, in fp32, as the sum of two pieces in a dtype of 16 bits."""
    if tl.bfloat16 != DTYPE or INTERPRETED:
        high = x.to(DTYPE)
        low = (x - high.to(tl.float32)).to(DTYPE)
    else:
        # Two at a time; the first piece is cut off, so that it is a number's upper half as it stands.
        high, low = tl.inline_asm_elementwise(
            """{
            .reg .f32 x, y;
            prmt.b32 $0, $2, $3, 0x7632;
            and.b32 x, $2, 0xffff0000;
            and.b32 y, $3, 0xffff0000;
            sub.f32 x, $2, x;
            sub.f32 y, $3, y;
            cvt.rn.bf16x2.f32 $1, y, x;
            }""",
            "=r,=r,r,r",
            [x],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return high, low


@triton.jit
def arranged_as(x, y):
    """Return x in 16 bits in the arrangement over threads that the product y has, if that serves.

    With 16 rows a warp it then enters another product from registers as it is.
    """
    if x.dtype == tl.float32 or INTERPRETED or x.shape[0] < 16 * tl.extra.cuda.num_warps():
        arranged = x
    else:
        arranged = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r,r", [x, y], dtype=x.dtype, is_pure=True, pack=2
        )
    return arranged


@triton.jit
def reciprocal(x):
    """Return 1/x, to two units in the last place."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
