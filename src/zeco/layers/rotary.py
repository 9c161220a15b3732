"""Rotary positions: queries and keys turned by angles that grow with their position."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco.core.shapes import state_dtype


def rotate(x: Tensor, position_ids: Tensor, *, base: float = 10_000.0) -> Tensor:
    """Turn the pair of channels (i, i + K/2) of every token by ``position * base**(-2i/K)``.

    Products of rotated queries and keys depend on differences of positions only.

    Args:
        x: queries or keys [B, T, H, K], K even.
        position_ids: positions [B, T] or [T] in the whole sequence, not in this rank's part.
        base: the wavelengths are 2π to 2π·base tokens.

    Returns:
        [B, T, H, K] in the dtype of x; angles are taken in fp32 or better.

    Source: Su et al., RoFormer, arXiv:2104.09864, equation 34, with halves in place of neighbours.

    >>> rotate(torch.ones(1, 2, 1, 2), torch.tensor([0, 1]))[0, :, 0]
    tensor([[ 1.0000,  1.0000],
            [-0.3012,  1.3818]])
    """
    dtype = state_dtype(x)
    half = x.shape[-1] // 2
    # Angles of far positions need more digits than fp32 has.
    steps = torch.arange(half, dtype=torch.float64, device=x.device)
    angles = position_ids.double()[..., None] * base ** (-steps / half)
    cos, sin = (f(angles).to(dtype).unsqueeze(-2) for f in (torch.cos, torch.sin))
    first, second = x.to(dtype).chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)
