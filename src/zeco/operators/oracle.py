"""Oracles of the decay family: the papers' recurrences, one token after the other, in fp64.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ         o_t = scale · S_tᵀ q_t

Slow and plain on purpose; gradients are autograd's. Every function takes the arguments of the
public operator of its name (but for ``sp`` and ``backend``) and always returns (o, final_state),
in fp64.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    bonus: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence of the whole family.

    Args:
        q: queries [B, T, Hk, K].
        k: keys [B, T, Hk, K].
        v: values [B, T, H, V], H a multiple of Hk: heads of q, k and g serve H / Hk values each.
        g: log decays [B, T, H or Hk], [B, T, H or Hk, K], or None for no decay.
        scale: factor of the queries, K**-0.5 by default.
        initial_state: [B, H, K, V], or [N, H, K, V] with cu_seqlens; zeros by default.
        cu_seqlens: boundaries [N+1] of the documents in a batch of 1.
        bonus: u [H or Hk, K]; queries then read S_{t-1} + diag(u) k_t v_tᵀ in place of S_t.

    Returns:
        o [B, T, H, V] and the final states, shaped as ``initial_state``.
    """
    B, T, _, K = q.shape
    H, V = v.shape[2:]
    factor = K**-0.5 if scale is None else scale
    q, k, v = (_heads(x.double(), H) for x in (q, k, v))
    g = q.new_zeros(B, T, H) if g is None else _heads(g.double(), H)
    g = g if g.ndim == 4 else g[..., None]
    u = None if bonus is None else _heads(bonus.double()[None, None], H)[0]
    documents = [(0, T)]
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        documents = list(pairwise(bounds))
    if initial_state is None:
        initial_state = q.new_zeros(len(documents) * B, H, K, V)
    o: list[Tensor] = []
    finals: list[Tensor] = []
    for (start, stop), state in zip(documents, initial_state.double().split(B), strict=True):
        for t in range(start, stop):
            kv = k[:, t, :, :, None] * v[:, t, :, None, :]
            before = state
            state = g[:, t, :, :, None].exp() * before + kv
            read = state if u is None else before + u[..., None] * kv
            o.append(factor * torch.einsum("bhk,bhkv->bhv", q[:, t], read))
        finals.append(state)
    return torch.stack(o, 1) if o else torch.zeros_like(v), torch.cat(finals)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalize: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """No decay; with ``normalize``, o_t = S_tᵀ q_t / (z_tᵀ q_t) and z_t = z_{t-1} + k_t."""
    if normalize:
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    o, final = recurrence(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return (o[..., :-1] / o[..., -1:] if normalize else o), final


def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One fixed decay a head, log_decay [H or Hk]."""
    g = log_decay.double().expand(*q.shape[:2], -1)
    return recurrence(q, k, v, g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """RetNet: γ_h = 1 - 2^(-5-h) unless log_decay is given."""
    if log_decay is None:
        head = torch.arange(q.shape[2], dtype=torch.float64, device=q.device)
        log_decay = (1 - 2.0 ** (-5 - head)).log()
    return lightning_attention(
        q,
        k,
        v,
        log_decay=log_decay,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )


simple_gla = recurrence
gla = recurrence


def hgrn2(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GLA with keys 1 - exp(g)."""
    k = 1 - g.double().exp() if k is None else k
    return recurrence(q, k, v, g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba-2: S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_tᵀ and o_t = S_tᵀ C_t + D x_t."""
    x, dt = x.double(), dt.double()
    o, final = recurrence(
        C,
        B,
        dt[..., None] * x,
        dt * A.double(),
        scale=1.0,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )
    return (o if D is None else o + D.double()[:, None] * x), final


def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """RWKV-6: o_t = scale · (S_{t-1} + diag(u) k_t v_tᵀ)ᵀ r_t."""
    return recurrence(
        r,
        k,
        v,
        w,
        bonus=u,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat the heads (dim 2), each next to its copies."""
    return x.repeat_interleave(num_heads // x.shape[2], 2)
