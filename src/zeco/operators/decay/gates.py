"""Gates within a chunk: cumulative decays, rows scaled by them, and scores that cannot overflow.

With b the cumulative log decay of a chunk (b_C its total), attention inside the chunk needs
``(q_i ∘ exp(b_i - b_j)) · k_j`` for j <= i. Written as one matmul of scaled rows,
``(q_i ∘ exp(b_i - m)) · (k_j ∘ exp(m - b_j))``, the two factors stay within exp(|b_C| / 2) for
m = b_C / 2, and the same rows serve the states::

    update[c]   = exp(b_C - m) ∘ kᵀ v             o_inter = q (exp(m) ∘ S[c])

so one tensor ``shift`` = m = b_C - m scales both. This *fast form* is used where |b_C| is within
`FAST_LIMIT` in every channel of a chunk's head. Elsewhere m is 0 for the queries and b_C for the
keys (``shift`` = 0, all exponents <= 0), and scores come from `zeco.operators.decay.exact_scores`.
The choice is made for every chunk and head by itself, so that a result never depends on which
other chunks are in the call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from zeco.operators.decay.exact_scores import (
    FAST_LIMIT,
    exclusive_prefix,
    exclusive_suffix,
    inclusive_suffix,
)


@dataclass(frozen=True, eq=False)
class ChunkGates:
    """Exponents of a call's chunks; G is K (diagonal decay) or 1 (one decay a head).

    Attributes:
        query: [B, N, H, C, G], added to log |q|.
        key: [B, N, H, C, G], added to log |k|.
        total: log decay of each chunk [B, N, H, G].
        shift: [B, N, H, G, 1], what scales states read and updates written.
        exact: which of the B·N·H chunks are outside the fast form; None if there is none.
    """

    query: Tensor
    key: Tensor
    total: Tensor
    shift: Tensor
    exact: Tensor | None


def chunk_gates(g: Tensor, *, strict: bool) -> ChunkGates:
    """Return the exponents of log decays g [B, N, H, C, G], differentiable in g.

    Args:
        g: log decay of every token, in chunks; -inf is a decay to zero.
        strict: whether a query reads the state before its own token's decay and update.
    """
    exponents = ChunkExponentsFunction.apply(g, strict)
    query, key, total, shift, far = cast("tuple[Tensor, ...]", exponents)
    exact = far.flatten().nonzero().squeeze(1)
    return ChunkGates(query, key, total.squeeze(-2), shift.mT, exact if len(exact) else None)


class ChunkExponentsFunction(torch.autograd.Function):
    """Exponents of queries and keys, total, shift, and which chunks are outside the fast form."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, strict: bool) -> tuple[Tensor, ...]:
        """Sum decays along each chunk."""
        # Below this, exp is 0 in g's dtype whatever follows; flooring keeps -inf out of the sums.
        info = torch.finfo(g.dtype)
        g = g.clamp(min=1.1 * math.log(info.tiny * info.eps))
        prefix = g.cumsum(-2)
        total = prefix[..., -1:, :].clone()
        far = total.abs().amax((-2, -1)) > FAST_LIMIT
        shift = (total / 2).masked_fill_(far[..., None, None], 0)
        key = (total - shift) - prefix
        if far.any():
            # total - prefix would cancel where a strong decay precedes weak ones.
            key[far] = exclusive_suffix(g[far])
        if strict:
            prefix = F.pad(prefix[..., :-1, :], (0, 0, 1, 0))
        query = prefix.sub_(shift)
        ctx.strict = strict
        ctx.save_for_backward(far)
        ctx.mark_non_differentiable(far)
        return query, key, total, shift, far

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_query: Tensor, d_key: Tensor, d_total: Tensor, d_shift: Tensor, _: Tensor
    ) -> tuple[Tensor, None]:
        """Sum gradients the other way: dg_l collects queries from l on and keys before l."""
        (far,) = ctx.saved_tensors
        sum_key = d_key.sum(-2, keepdim=True)
        d_shift = d_shift - d_query.sum(-2, keepdim=True) - sum_key
        d_total = d_total + (d_shift / 2).masked_fill_(far[..., None, None], 0)
        if ctx.strict:
            d_query = F.pad(d_query[..., 1:, :], (0, 0, 0, 1))
        # Keys before l, as all keys less those from l on: one sum for both, fine for fast chunks.
        d_g = inclusive_suffix(d_query - d_key).add_(d_total + sum_key)
        if far.any():
            # Here the last key's gradient may be far above that of the gates before it.
            d_g[far] = inclusive_suffix(d_query[far]) + exclusive_prefix(d_key[far]) + d_total[far]
        return d_g, None


class ScaleRowsFunction(torch.autograd.Function):
    """``factor · exp(exponent) ∘ x`` as a contiguous tensor, the exponential computed once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exponent: Tensor, factor: float) -> Tensor:
        """Scale x [B, N, H, C, K] by exponents [B, N, H, C, G]."""
        weight = exponent.exp()
        if factor != 1.0:
            weight.mul_(factor)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.mul(x, weight, out=y)
        ctx.save_for_backward(weight, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return ``weight ∘ dy`` and ``y ∘ dy``."""
        weight, y = ctx.saved_tensors
        d_exponent = d_y * y
        if weight.shape[-1] == 1:
            d_exponent = d_exponent.sum(-1, keepdim=True)
        return d_y * weight, d_exponent, None


def scale_rows(x: Tensor, exponent: Tensor | None, factor: float = 1.0) -> Tensor:
    """Return ``factor · exp(exponent) ∘ x`` for x [B, N, H, C, K], contiguous."""
    if exponent is not None:
        return cast("Tensor", ScaleRowsFunction.apply(x, exponent, factor))
    x = x.contiguous()
    return x if factor == 1.0 else x * factor


class AttendFunction(torch.autograd.Function):
    """``o = tril(q kᵀ) v + q S`` for every chunk, some of the score matrices given."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        states: Tensor,
        rows: Tensor | None,
        exact: Tensor | None,
        strict: bool,
    ) -> Tensor:
        """Attend within chunks and to the states; all tensors are [M, rows, columns]."""
        scores = causal_scores(q, k, rows, exact, strict=strict)
        ctx.save_for_backward(q, k, v, states, rows, scores)
        ctx.strict = strict
        return torch.bmm(scores, v).baddbmm_(q, states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor) -> tuple[Any, ...]:
        """Take the gradient through both products."""
        q, k, v, states, rows, scores = ctx.saved_tensors
        found = attend_gradients(d_o, q, k, v, states, rows, scores, strict=ctx.strict)
        return *found[:4], None, found[4], None


def attend_gradients(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    rows: Tensor | None,
    scores: Tensor,
    *,
    strict: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v, states, and of the scores that were given."""
    d_o = d_o.contiguous()
    d_scores = torch.bmm(d_o, v.mT).tril_(-1 if strict else 0)
    d_exact = None
    if rows is not None:
        d_exact = d_scores.index_select(0, rows)
        d_scores.index_fill_(0, rows, 0)
    d_q = torch.bmm(d_scores, k).baddbmm_(d_o, states.mT)
    d_k = torch.bmm(d_scores.mT, q)
    d_v = torch.bmm(scores.mT, d_o)
    d_states = torch.bmm(q.mT, d_o)
    return d_q, d_k, d_v, d_states, d_exact


def causal_scores(
    q: Tensor, k: Tensor, rows: Tensor | None, exact: Tensor | None, *, strict: bool
) -> Tensor:
    """Return scores [M, C, C] of scaled rows [M, C, K], those of ``rows`` replaced by ``exact``."""
    # Above the diagonal the fast form may be huge; tril_ overwrites it.
    scores = torch.bmm(q, k.mT).tril_(-1 if strict else 0)
    if rows is not None and exact is not None:
        scores.index_copy_(0, rows, exact)
    return scores
