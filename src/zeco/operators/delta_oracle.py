"""Oracles of the delta-rule family: the papers' recurrences, one token after the other, in fp64.

Slow and plain on purpose; gradients are autograd's. Every function takes the arguments of the
public operator of its name (but for ``sp`` and ``backend``) and always returns (o, final_state),
in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ."""
    H = v.shape[2]
    q, k, v, beta = (_heads(x, H) for x in (q, k, v, beta))
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)

    def step(state: Tensor, t: int) -> Tensor:
        write = beta[:, t, :, None, None] * k[:, t, :, :, None]
        erase = identity - write @ k[:, t, :, None, :]
        return erase @ state + write @ v[:, t, :, None, :]

    return _run(
        step, q, v, q.shape[-1] ** -0.5 if scale is None else scale, initial_state, cu_seqlens
    )


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S'_t = diag(exp(g_t)) S_{t-1}, and S_t = S'_t + β_t k_t (v_t - S'_tᵀ k_t)ᵀ."""
    H = v.shape[2]
    q, k, v, g, beta = (_heads(x, H) for x in (q, k, v, g, beta))

    def step(state: Tensor, t: int) -> Tensor:
        state = g[:, t, :, :, None].exp() * state
        held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        write = beta[:, t, :, None] * (v[:, t] - held)
        return state + k[:, t, :, :, None] * write[:, :, None, :]

    return _run(
        step, q, v, q.shape[-1] ** -0.5 if scale is None else scale, initial_state, cu_seqlens
    )


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ: `kda` with one decay a head."""
    return kda(
        q,
        k,
        v,
        _heads(g, v.shape[2])[..., None],
        beta,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )


def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = (diag(exp(w_t)) + b_t a_tᵀ) S_{t-1} + k_t v_tᵀ."""
    H = v.shape[2]
    r, w, k, v, a, b = (_heads(x, H) for x in (r, w, k, v, a, b))

    def step(state: Tensor, t: int) -> Tensor:
        mix = torch.diag_embed(w[:, t].exp()) + b[:, t, :, :, None] * a[:, t, :, None, :]
        return mix @ state + k[:, t, :, :, None] * v[:, t, :, None, :]

    return _run(step, r, v, 1.0 if scale is None else scale, initial_state, cu_seqlens)


def _run(
    step: Callable[[Tensor, int], Tensor],
    q: Tensor,
    v: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Step through every document from its initial state, reading ``scale · S_tᵀ q_t``."""
    B, T, H, K = q.shape
    documents = [(0, T)] if cu_seqlens is None else list(pairwise(cu_seqlens.tolist()))
    if initial_state is None:
        initial_state = q.new_zeros(len(documents) * B, H, K, v.shape[-1])
    o: list[Tensor] = []
    finals: list[Tensor] = []
    for (start, stop), state in zip(documents, initial_state.double().split(B), strict=True):
        for t in range(start, stop):
            state = step(state, t)
            o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        finals.append(state)
    return torch.stack(o, 1) if o else torch.zeros_like(v), torch.cat(finals)


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat the heads (dim 2), each next to its copies, in fp64."""
    return x.double().repeat_interleave(num_heads // x.shape[2], 2)
