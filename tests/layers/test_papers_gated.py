"""Layers with data-dependent gates against the papers' recurrences, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeco.layers import HGRN2, RWKV6, RWKV7, LightningAttention, Mamba2

WIDTH, HEADS, LENGTH = 12, 2, 9
K = WIDTH // HEADS


def tokens() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(LENGTH, WIDTH, dtype=torch.float64)


def scatter(layer: nn.Module) -> nn.Module:
    """Move every parameter off its initial value, so that none hides behind a 0 or 1."""
    torch.manual_seed(0)
    for parameter in layer.double().parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return layer


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1))


def recur(
    step: Callable[[int, Tensor], Tensor], read: Callable[[int, Tensor, Tensor], Tensor], *dims: int
) -> Tensor:
    """Return [T, H, V] from a state's update and from what is read of it before and after."""
    S = torch.zeros(*dims, dtype=torch.float64)
    rows: list[Tensor] = []
    for t in range(LENGTH):
        before, S = S, step(t, S)
        rows.append(read(t, before, S))
    return torch.stack(rows)


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]


def apply(S: Tensor, q: Tensor) -> Tensor:
    return torch.einsum("hkv,hk->hv", S, q)


def head_norm(o: Tensor, layer: nn.Module) -> Tensor:
    mean = o.mean(-1, keepdim=True)
    variance = (o - mean).square().mean(-1, keepdim=True)
    o = (o - mean) / (variance + 64e-5).sqrt()
    return o.flatten(1) * layer.norm.weight + layer.norm.bias


def check(layer: nn.Module, x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(layer(x[None])[0][0], y @ layer.out.weight.T)


@torch.no_grad()
def test_hgrn2() -> None:
    layer, x = scatter(HGRN2(WIDTH, HEADS, lower_bound=0.25)), tokens()
    q, f, i = (x @ layer.heads.projection.weight.T).chunk(3, -1)
    f = heads(0.25 + 0.75 * f.sigmoid())
    q, i = heads(F.silu(q)), heads(i)
    o = recur(
        lambda t, S: f[t, :, :, None] * S + outer(1 - f[t], i[t]),
        lambda t, _, S: apply(S, q[t]) * K**-0.5,
        HEADS,
        K,
        K,
    ).flatten(1)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight
    check(layer, x, o)


@torch.no_grad()
def test_lightning() -> None:
    layer, x = scatter(LightningAttention(WIDTH, HEADS, depth=0.5)), tokens()
    q, k, v = (heads(y) for y in F.silu(x @ layer.heads.projection.weight.T).chunk(3, -1))
    slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64) * (0.5 + 1e-5)
    o = recur(
        lambda t, S: torch.exp(-slopes)[:, None, None] * S + outer(k[t], v[t]),
        lambda t, _, S: apply(S, q[t]),
        HEADS,
        K,
        K,
    ).flatten(1)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight
    check(layer, x, o * torch.sigmoid(x @ layer.gate.weight.T))


@torch.no_grad()
def test_mamba2() -> None:
    layer, x = scatter(Mamba2(WIDTH, HEADS, state_dim=5, conv_width=0)), tokens()
    B, C, values = F.silu(x @ layer.heads.projection.weight.T).split([5, 5, 24], -1)
    values = heads(values)
    dt = torch.log1p(torch.exp(x @ layer.step.weight.T + layer.decay.bias))
    A = -layer.decay.log_rate.exp()

    def step(t: int, S: Tensor) -> Tensor:
        decay = torch.exp(dt[t] * A)[:, None, None]
        return decay * S + dt[t, :, None, None] * outer(B[t].expand(HEADS, -1), values[t])

    o = recur(
        step,
        lambda t, _, S: apply(S, C[t].expand(HEADS, -1)) + layer.skip[:, None] * values[t],
        HEADS,
        5,
        12,
    ).flatten(1)
    o = o * F.silu(x @ layer.gate.weight.T)
    check(layer, x, o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight)


def shifted(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, WIDTH, dtype=x.dtype), x[:-1]]) - x


def low_rank(layer: nn.Module, x: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
    y = inner(x @ layer[0].weight.T) @ layer[2].weight.T
    return y if layer[2].bias is None else y + layer[2].bias


@torch.no_grad()
def test_rwkv6() -> None:
    layer, x = scatter(RWKV6(WIDTH, HEADS, blend_rank=3, decay_rank=4)), tokens()
    d = shifted(x)
    inner = torch.tanh((x + d * layer.shift_blend) @ layer.blend_down.weight.T)
    blended = [
        x
        + d
        * (layer.blends[i * WIDTH : (i + 1) * WIDTH] + inner[:, 3 * i : 3 * i + 3] @ up.weight.T)
        for i, up in enumerate(layer.blend_up)
    ]
    r, k, v = (
        heads(blended[i] @ linear.weight.T)
        for i, linear in ((0, layer.receptance), (2, layer.key), (3, layer.value))
    )
    w = heads(torch.exp(-torch.exp(low_rank(layer.decay, blended[1], torch.tanh))))
    u = heads(layer.bonus)
    o = recur(
        lambda t, S: w[t, :, :, None] * S + outer(k[t], v[t]),
        lambda t, before, _: apply(before + u[..., None] * outer(k[t], v[t]), r[t]),
        HEADS,
        K,
        K,
    )
    check(layer, x, head_norm(o, layer) * F.silu(blended[4] @ layer.gate.weight.T))


@torch.no_grad()
def test_rwkv7() -> None:
    layer, x = scatter(RWKV7(WIDTH, HEADS, rank=4)), tokens()
    d = shifted(x)
    xr, xw, xk, xv, xa, xg = (x + d * blend for blend in layer.blends.chunk(6))
    r, k, v = xr @ layer.receptance.weight.T, xk @ layer.key.weight.T, xv @ layer.value.weight.T
    w = torch.exp(-math.exp(-0.5) * torch.sigmoid(low_rank(layer.decay, xw, torch.tanh)))
    a = torch.sigmoid(low_rank(layer.rate, xa, lambda y: y))
    kappa = heads(k * layer.removal)
    kappa = kappa / kappa.norm(dim=-1, keepdim=True)
    k = k * (1 + (a - 1) * layer.replacement)
    r, k, v, w, a = (heads(y) for y in (r, k, v, w, a))

    def step(t: int, S: Tensor) -> Tensor:
        transition = torch.diag_embed(w[t]) - outer(a[t] * kappa[t], kappa[t])
        return transition @ S + outer(k[t], v[t])

    o = recur(step, lambda t, _, S: apply(S, r[t]), HEADS, K, K)
    bonus = (r * k * heads(layer.bonus)).sum(-1, keepdim=True) * v
    gate = low_rank(layer.gate, xg, torch.sigmoid)
    check(layer, x, (head_norm(o, layer) + bonus.flatten(1)) * gate)
