"""Unit lower triangular inverses ``(I - A)⁻¹`` for many chunks at once: the core of the WY form.

Only the part of A strictly below the diagonal is read. The inverse is built by row substitution in
small diagonal blocks and then by block elimination, with A₁, A₂ the diagonal blocks and B the corner,
``[[I - A₁, 0], [-B, I - A₂]]⁻¹ = [[M₁, 0], [M₂ B M₁, M₂]]``, so every number on the way is an entry of
an inverse. For delta rules with |beta| ≤ 2 and unit keys those are bounded; powers of A, as in a
Neumann series, are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BASE = 8  # rows solved one by one; on a CPU much faster than LAPACK's batched solve


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Return ``(I - A)⁻¹`` of A [M, C, C], C a power of two.

    >>> unit_lower_inverse(torch.tensor([[[9.0, 9.0], [3.0, 9.0]]])).tolist()
    [[[1.0, 0.0], [3.0, 1.0]]]
    """
    M, C, _ = a.shape
    base = min(_BASE, C)
    inverse = torch.zeros_like(a)
    _diagonal_blocks(inverse, base).copy_(_invert_rows(_diagonal_blocks(a, base)))
    half = base
    while half < C:
        n = C // (2 * half)
        blocks = inverse.view(M, n, 2, half, n, 2, half)
        upper = _own_blocks(blocks[:, :, 0, :, :, 0])
        lower = _own_blocks(blocks[:, :, 1, :, :, 1])
        corner = _own_blocks(a.view(M, n, 2, half, n, 2, half)[:, :, 1, :, :, 0])
        found = torch.bmm(lower, torch.bmm(corner, upper)).view(M, n, half, half)
        blocks[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).copy_(found.permute(0, 2, 3, 1))
        half *= 2
    return inverse


def _diagonal_blocks(t: Tensor, size: int) -> Tensor:
    """View the diagonal blocks of [M, C, C] as [size, size, M, C/size]."""
    M, C, _ = t.shape
    n = C // size
    return t.view(M, n, size, n, size).diagonal(dim1=1, dim2=3).permute(1, 2, 0, 3)


def _own_blocks(blocks: Tensor) -> Tensor:
    """Take the blocks on the diagonal of [M, n, h, n, h] as [M*n, h, h]."""
    M, n, h, _, _ = blocks.shape
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(M * n, h, h)


def _invert_rows(blocks: Tensor) -> Tensor:
    """Invert ``I - A`` for blocks [h, h, ...] row by row, all blocks at once."""
    blocks = blocks.contiguous()
    found = torch.zeros_like(blocks)
    for i in range(len(blocks)):
        found[i, i] = 1.0
        for j in range(i):
            found[i, : j + 1].addcmul_(blocks[i, j], found[j, : j + 1])
    return found
