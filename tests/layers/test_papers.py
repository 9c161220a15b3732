"""Mixers against the papers' formulas, written out for one token at a time or as whole matrices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from zeco.layers import GatedLinearAttention, LinearAttention, MultiScaleRetention

WIDTH, HEADS, LENGTH = 16, 2, 9


def tokens() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)


def cut(matrix: Tensor, sizes: list[int], x: Tensor) -> list[Tensor]:
    """Project tokens by parts of a matrix, [T, H, dim] each."""
    parts = (x[0] @ matrix.T).split(sizes, -1)
    return [part.unflatten(-1, (HEADS, -1)) for part in parts]


def rms(o: Tensor, weight: Tensor) -> Tensor:
    return o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


@torch.no_grad()
def test_gla_is_section_4_4() -> None:
    torch.manual_seed(0)
    layer, x = GatedLinearAttention(WIDTH, HEADS).double(), tokens()
    layer.norm.norm.weight.uniform_(0.5, 1.5)
    q, k, v = cut(layer.heads.projection.weight, [8, 8, 16], x)
    low_rank = x[0] @ layer.decay_down.weight.T @ layer.decay_up.weight.T + layer.decay_up.bias
    alpha = torch.sigmoid(low_rank).pow(1 / 16).unflatten(-1, (HEADS, -1))
    swish = F.silu(x[0] @ layer.gate.weight.T).unflatten(-1, (HEADS, -1))
    S = torch.zeros(HEADS, 4, 8, dtype=torch.float64)
    rows: list[Tensor] = []
    for t in range(LENGTH):
        S = alpha[t, :, :, None] * S + k[t, :, :, None] * v[t, :, None, :]
        o = torch.einsum("hk,hkv->hv", q[t], S) * 4**-0.5
        rows.append((swish[t] * rms(o, layer.norm.norm.weight)).flatten() @ layer.out.weight.T)
    torch.testing.assert_close(layer(x)[0][0], torch.stack(rows))


@torch.no_grad()
def test_retention_is_the_parallel_form() -> None:
    """Complex rotations and the decay matrix D of RetNet's equation 5."""
    torch.manual_seed(0)
    layer, x = MultiScaleRetention(WIDTH, HEADS).double(), tokens()
    q, k, v = cut(layer.heads.projection.weight, [16, 16, 32], x)
    n = torch.arange(LENGTH, dtype=torch.float64)
    theta = 10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turn = torch.exp(1j * n[:, None] * theta)[:, None]
    qc, kc = (torch.complex(y[..., :4], y[..., 4:]) * turn for y in (q, k))
    scores = torch.einsum("nhk,mhk->hnm", qc, kc.conj()).real * 8**-0.5
    gamma = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float64))
    D = gamma[:, None, None] ** (n[:, None] - n).clamp(min=0) * (n[:, None] >= n)
    o = rms(torch.einsum("hnm,mhv->nhv", scores * D, v), layer.norm.norm.weight)
    swish = F.silu(x[0] @ layer.gate.weight.T).unflatten(-1, (HEADS, -1))
    torch.testing.assert_close(layer(x)[0][0], (swish * o).flatten(1) @ layer.out.weight.T)


@torch.no_grad()
def test_linear_attention_is_a_weighted_mean() -> None:
    torch.manual_seed(0)
    layer, x = LinearAttention(WIDTH, HEADS).double(), tokens()
    q, k, v = cut(layer.heads.projection.weight, [16, 16, 16], x)
    weights = torch.einsum("nhk,mhk->hnm", F.elu(q) + 1, F.elu(k) + 1).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    o = torch.einsum("hnm,mhv->nhv", weights, v)
    torch.testing.assert_close(layer(x)[0][0], o.flatten(1) @ layer.out.weight.T)
