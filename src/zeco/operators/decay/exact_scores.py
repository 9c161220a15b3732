"""Scores within a chunk for decays of any strength, without an exponential that can overflow.

Wanted is ``A[i, j] = (q_i ∘ exp(g_{j+1} + … + g_i)) · k_j`` for j <= i. By bisection: in a block of 2s
rows, queries of the later half are decayed from the split on and keys of the earlier half up to
it, so every exponent is a sum of log decays, hence <= 0, and no sum is ever a difference of larger
ones::

    |  A₁       |        blocks of `BASE` rows on the diagonal: scaled relative to the middle of
    | cross  A₂ |        their own decay where that is within FAST_LIMIT, else bisected to the end

Each block is computed from its own data alone, so its bits do not depend on the other blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# The largest |total log decay| for rows scaled relative to its middle: factors within exp(±40)
# keep 1e17 of fp32's range free on both sides, and rounding of the exponents costs 40 ulp.
FAST_LIMIT = 80.0

# Rows of the blocks on the diagonal: FAST_LIMIT then allows a mean decay of exp(-5) a token.
BASE = 16


def exact_scores(q: Tensor, k: Tensor, g: Tensor, *, strict: bool) -> Tensor:
    """Return the scores [M, C, C], zero above the diagonal; differentiable.

    Args:
        q: [M, C, K], C a power of two.
        k: [M, C, K].
        g: log decays [M, C, K] or [M, C, 1].
        strict: leave out the diagonal, and g_i from the exponent.

    >>> q = k = torch.ones(1, 4, 1)
    >>> exact_scores(q, k, torch.full((1, 4, 1), -1e4), strict=False)[0, 3].tolist()
    [0.0, 0.0, 0.0, 1.0]
    """
    return cast("Tensor", ExactScoresFunction.apply(q, k, g, strict))


class ExactScoresFunction(torch.autograd.Function):
    """`exact_scores`; backward computes the decayed halves again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, g: Tensor, strict: bool) -> Tensor:
        """Bisect down to blocks of `BASE` rows."""
        ctx.strict = strict
        ctx.save_for_backward(q, k, g)
        return _scores(q, k, g, strict, min(BASE, q.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Bisect again, with the gradient of each block."""
        q, k, g = ctx.saved_tensors
        return *_gradients(d_scores, q, k, g, ctx.strict, min(BASE, q.shape[1])), None


@dataclass(frozen=True, eq=False)
class _Level:
    """The decayed halves of all blocks of 2s rows, [M, n, s, K], and their decays."""

    size: int
    query: Tensor
    key: Tensor
    query_decay: Tensor
    key_decay: Tensor


def _levels(q: Tensor, k: Tensor, g: Tensor, strict: bool, base: int) -> Iterator[_Level]:
    size = base
    while size < q.shape[1]:
        later, earlier = _halves(g, size)[1], _halves(g, size)[0]
        since = exclusive_prefix(later) if strict else later.cumsum(-2)
        query_decay, key_decay = since.exp_(), exclusive_suffix(earlier).exp_()
        query, key = _halves(q, size)[1] * query_decay, _halves(k, size)[0] * key_decay
        yield _Level(size, query, key, query_decay, key_decay)
        size *= 2


def _scores(q: Tensor, k: Tensor, g: Tensor, strict: bool, base: int) -> Tensor:
    scores = q.new_zeros(q.shape[0], q.shape[1], q.shape[1])
    for level in _levels(q, k, g, strict, base):
        _corners(scores, level.size).copy_(level.query @ level.key.mT)
    if base == 1:
        if not strict:
            scores.diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
        return scores
    q, k, g = (x.reshape(-1, base, x.shape[-1]) for x in (q, k, g))
    query, key, _, _, far = _from_the_middle(q, k, g, strict)
    blocks = torch.bmm(query, key.mT).tril_(-1 if strict else 0)
    if far is not None:
        blocks.index_copy_(0, far, _scores(q[far], k[far], g[far], strict, 1))
    _blocks(scores, base).copy_(blocks.view(scores.shape[0], -1, base, base))
    return scores


def _gradients(
    d_scores: Tensor, q: Tensor, k: Tensor, g: Tensor, strict: bool, base: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = g.shape
    if base == 1:
        diagonal = d_scores.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        d_q, d_k = (
            (torch.zeros_like(q), torch.zeros_like(k))
            if strict
            else (
                diagonal * k,
                diagonal * q,
            )
        )
        d_g = torch.zeros_like(g)
    else:
        d_q, d_k, d_g = (
            found.view(x.shape)
            for found, x in zip(
                _block_gradients(d_scores, q, k, g, strict, base), (q, k, g), strict=True
            )
        )
    for level in _levels(q, k, g, strict, base):
        d_cross = _corners(d_scores, level.size)
        d_query, d_key = d_cross @ level.key, d_cross.mT @ level.query
        _halves(d_q, level.size)[1].addcmul_(d_query, level.query_decay)
        _halves(d_k, level.size)[0].addcmul_(d_key, level.key_decay)
        since = _summed(d_query.mul_(level.query), shape[-1])
        until = _summed(d_key.mul_(level.key), shape[-1])
        later = exclusive_suffix(since) if strict else inclusive_suffix(since)
        _halves(d_g, level.size)[1].add_(later)
        _halves(d_g, level.size)[0].add_(exclusive_prefix(until))
    return d_q, d_k, d_g


def _from_the_middle(
    q: Tensor, k: Tensor, g: Tensor, strict: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Scale rows [M, C, K] relative to the middle of their decay.

    Returns:
        The scaled queries and keys, both decays, and the indices of the blocks whose decay is too
        strong for this (they come back undecayed), or None.
    """
    prefix = g.cumsum(-2)
    too_far = prefix[:, -1].abs().amax(-1) > FAST_LIMIT
    prefix.masked_fill_(too_far[:, None, None], 0)
    middle = prefix[:, -1:] / 2
    since = F.pad(prefix[:, :-1], (0, 0, 1, 0)) if strict else prefix
    query_decay, key_decay = (since - middle).exp_(), (middle - prefix).exp_()
    far = too_far.nonzero().squeeze(1)
    return q * query_decay, k * key_decay, query_decay, key_decay, far if len(far) else None


def _block_gradients(
    d_scores: Tensor, q: Tensor, k: Tensor, g: Tensor, strict: bool, base: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Take gradients of the blocks on the diagonal, [M * n, base, ...]."""
    d_blocks = _blocks(d_scores, base).reshape(-1, base, base)
    q, k, g = (x.reshape(-1, base, x.shape[-1]) for x in (q, k, g))
    query, key, query_decay, key_decay, far = _from_the_middle(q, k, g, strict)
    # Scores on the diagonal have no decay: left in, they would only cancel in that of g, where
    # they may be far above everything else.
    below = d_blocks.tril(-1)
    d_query, d_key = torch.bmm(below, key), torch.bmm(below.mT, query)
    d_q, d_k = d_query * query_decay, d_key * key_decay
    if not strict:
        diagonal = d_blocks.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        d_q.addcmul_(diagonal, k)
        d_k.addcmul_(diagonal, q)
    # The middle's own gradient is zero: no score depends on it.
    since = _summed(d_query.mul_(query), g.shape[-1])
    until = _summed(d_key.mul_(key), g.shape[-1])
    if strict:
        since = F.pad(since[:, 1:], (0, 0, 0, 1))
    d_g = inclusive_suffix(since - until)
    if far is not None:
        exact = _gradients(d_blocks[far], q[far], k[far], g[far], strict, 1)
        for found, part in zip((d_q, d_k, d_g), exact, strict=True):
            found.index_copy_(0, far, part)
    return d_q, d_k, d_g


def _halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """View the earlier and later halves [M, n, size, ...] of blocks of 2·size rows."""
    blocks = x.unflatten(1, (-1, 2, size))
    return blocks[:, :, 0], blocks[:, :, 1]


def _blocks(scores: Tensor, size: int) -> Tensor:
    """View the blocks on the diagonal of [M, C, C] as [M, n, size, size]."""
    n = scores.shape[1] // size
    return scores.view(-1, n, size, n, size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _corners(scores: Tensor, size: int) -> Tensor:
    """View the lower left quarters of the diagonal blocks of 2·size rows, [M, n, size, size]."""
    return _blocks(scores, 2 * size)[:, :, size:, :size]


def _summed(x: Tensor, width: int) -> Tensor:
    return x if width == x.shape[-1] else x.sum(-1, keepdim=True)


def exclusive_prefix(g: Tensor) -> Tensor:
    """Return sums along dim -2 of everything before each row."""
    return F.pad(g[..., :-1, :].cumsum(-2), (0, 0, 1, 0))


def inclusive_suffix(g: Tensor) -> Tensor:
    """Return sums along dim -2 of each row and everything after it."""
    return g.flip(-2).cumsum(-2).flip(-2)


def exclusive_suffix(g: Tensor) -> Tensor:
    """Return sums along dim -2 of everything after each row."""
    return F.pad(inclusive_suffix(g[..., 1:, :]), (0, 0, 0, 1))
