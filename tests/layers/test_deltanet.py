"""The layers of the delta rule against the papers' recurrences, one token at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zeco.layers import DeltaNet, GatedDeltaNet, KimiDeltaAttention, Mixer

WIDTH, HEADS, LENGTH = 12, 2, 9


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1))


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def decays(layer: Mixer, x: Tensor, K: int) -> Tensor:
    """Return α [T, H, K] by the layer's paper."""
    match layer:
        case GatedDeltaNet():
            logits = (x @ layer.step.weight.T + layer.decay.bias)[..., None].expand(-1, -1, K)
        case KimiDeltaAttention():
            low = x @ layer.step[0].weight.T @ layer.step[2].weight.T
            logits = heads(low + layer.decay.bias)
        case _:
            return x.new_ones(LENGTH, HEADS, K)
    return torch.exp(-layer.decay.log_rate.exp()[:, None] * torch.log1p(logits.exp()))


@pytest.mark.parametrize("largest_beta", [1.0, 2.0])
@pytest.mark.parametrize("layer_type", [DeltaNet, GatedDeltaNet, KimiDeltaAttention])
@torch.no_grad()
def test_is_the_papers_recurrence(layer_type: type[Mixer], largest_beta: float) -> None:
    torch.manual_seed(0)
    layer = layer_type(WIDTH, HEADS, conv_width=0, negative_eigenvalues=largest_beta == 2).double()
    for parameter in layer.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    K = WIDTH // HEADS
    projected = F.silu(x @ layer.heads.projection.weight.T)
    q, k, v = (
        heads(y) for y in projected.split([WIDTH, WIDTH, projected.shape[1] - 2 * WIDTH], -1)
    )
    q, k = unit(q), unit(k)
    beta = largest_beta * torch.sigmoid(x @ layer.beta.weight.T)
    alpha = decays(layer, x, K)
    S = torch.zeros(HEADS, K, v.shape[-1], dtype=torch.float64)
    rows: list[Tensor] = []
    for t in range(LENGTH):
        S = alpha[t, :, :, None] * S
        held = torch.einsum("hkv,hk->hv", S, k[t])
        S = S + torch.einsum("hk,hv->hkv", beta[t, :, None] * k[t], v[t] - held)
        rows.append(torch.einsum("hkv,hk->hv", S, q[t]) * K**-0.5)
    o = torch.stack(rows)
    weight = layer.norm.weight if isinstance(layer, DeltaNet) else layer.norm.norm.weight
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    match layer:
        case GatedDeltaNet():
            o = o * heads(F.silu(x @ layer.gate.weight.T))
        case KimiDeltaAttention():
            low = x @ layer.gate[0].weight.T @ layer.gate[2].weight.T
            o = o * heads(torch.sigmoid(low + layer.gate[2].bias))
    y = o.flatten(1) @ layer.out.weight.T
    # Lengths of q and k have a small constant under their root.
    torch.testing.assert_close(layer(x[None])[0][0], y, rtol=1e-4, atol=1e-5)
