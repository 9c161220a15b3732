"""The pass of the delta-rule family through all chunks, and its gradients, written out.

With S the state that enters a chunk, shifted as the rows expect it (``S̃ = exp(shift) ∘ S``), and
M = (I - A)⁻¹ of its tokens' overlaps::

    U = M (source + ã S̃)                          what the tokens write along p̃
    S_next = exp(total) ∘ S + exp(shift) ∘ (p̃ᵀ U + written)
    o = tril(q̃ p̃ᵀ) U + q̃ S̃

Backward, with R the gradient of S_next and R̃ = exp(shift) ∘ R::

    dU = tril(q̃ p̃ᵀ)ᵀ do + p̃ R̃         dB = Mᵀ dU        (B = source + ã S̃)
    dS̃ = q̃ᵀ do + ãᵀ dB                 dS = exp(total) ∘ R + exp(shift) ∘ dS̃
    dA = strictly_lower(dB Uᵀ)           dp̃ = (tril(do Uᵀ))ᵀ q̃ + U R̃ᵀ + dAᵀ ã

Only the three products a chunk that hang on the state are in the loop; the rest is batched. Compared
with dense K×K transitions (`zeco.operators.delta.segment`) this saves a third of the products, which is
why it serves calls whose states need not be known before the pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeco.operators.decay.gates import causal_scores
from zeco.operators.delta.scan import Ranges

Exact = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True, eq=False)
class Rows:
    """What the tokens of M = N·G chunks do to a state, G the batch times the heads.

    Attributes:
        query: q̃ [M, C, K].
        erase: ã [M, C, K].
        direction: p̃ [M, C, K].
        source: [M, C, V].
        written: [M, K, V], or None.
        total: log decay of each chunk [M, K, 1] or [M, 1, 1], or None for none.
        shift: what the rows leave out of states and updates, shaped as ``total``.
        inverse: (I - A)⁻¹ [M, C, C], outside of autograd: its gradient goes to ã and p̃.
        rows: the indices of chunks whose overlaps are given, or None.
        overlap: A of those chunks.
        scores: q̃ p̃ᵀ of those chunks.
    """

    query: Tensor
    erase: Tensor
    direction: Tensor
    source: Tensor
    written: Tensor | None
    total: Tensor | None
    shift: Tensor | None
    inverse: Tensor
    rows: Tensor | None
    overlap: Tensor | None
    scores: Tensor | None


def run_chunks(
    rows: Rows, starts: Tensor, ranges: Ranges, *, outputs: bool = True
) -> tuple[Tensor, Tensor]:
    """Run the pass through every piece of a document; differentiable in all but the inverse.

    Args:
        rows: the chunks.
        starts: the state [n, G, K, V] that enters each piece.
        ranges: for each piece, its first chunk and one past its last; together they are 0..N.
        outputs: False leaves the values of the outputs out (they are zeros, but for autograd are
            the outputs): their gradients do not need them.

    Returns:
        The outputs [M, C, V] and the state after every piece [n, G, K, V].
    """
    found = DeltaCoreFunction.apply(
        outputs,
        ranges,
        starts,
        rows.query,
        rows.erase,
        rows.direction,
        rows.source,
        rows.written,
        rows.total,
        rows.shift,
        rows.inverse,
        rows.rows,
        rows.overlap,
        rows.scores,
    )
    return cast("tuple[Tensor, Tensor]", found)


class DeltaCoreFunction(torch.autograd.Function):
    """See the module's text."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: bool,
        ranges: Ranges,
        starts: Tensor,
        query: Tensor,
        erase: Tensor,
        direction: Tensor,
        source: Tensor,
        written: Tensor | None,
        total: Tensor | None,
        shift: Tensor | None,
        inverse: Tensor,
        rows: Tensor | None,
        overlap: Tensor | None,
        exact: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Loop over the chunks, then compute the outputs."""
        G, K, V = starts.shape[1:]
        keep = None if total is None else total.exp()
        scale = None if shift is None else shift.exp()
        shifted, u = source.new_empty(len(source), K, V), torch.empty_like(source)
        added = torch.empty_like(shifted) if written is None else written.clone()
        finals = torch.empty_like(starts)
        for i, (first, stop) in enumerate(ranges):
            state = finals[i].copy_(starts[i])
            for c in range(first, stop):
                at = slice(c * G, (c + 1) * G)
                if scale is None:
                    shifted[at].copy_(state)
                else:
                    torch.mul(state, scale[at], out=shifted[at])
                base = torch.baddbmm(source[at], erase[at], shifted[at])
                torch.bmm(inverse[at], base, out=u[at])
                if written is None:
                    torch.bmm(direction[at].mT, u[at], out=added[at])
                else:
                    added[at].baddbmm_(direction[at].mT, u[at])
                if keep is None or scale is None:
                    state.add_(added[at])
                else:
                    state.mul_(keep[at]).addcmul_(added[at], scale[at])
        scores = causal_scores(query, direction, rows, exact, strict=False)
        if outputs:
            o = torch.bmm(scores, u).baddbmm_(query, shifted)
        else:
            o = source.new_zeros(()).expand_as(source)
        ctx.ranges = ranges
        ctx.has_written, ctx.has_exact = written is not None, rows is not None
        kept = (query, erase, direction, inverse, keep, scale, rows, shifted, u, added, scores)
        ctx.save_for_backward(*kept)
        return o, finals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor, d_finals: Tensor) -> tuple[Any, ...]:
        """Loop back over the chunks, then compute the gradients of the rows."""
        query, erase, direction, inverse, keep, scale, rows, shifted, u, added, scores = (
            ctx.saved_tensors
        )
        d_o = d_o.contiguous()
        d_starts = d_finals.clone(memory_format=torch.contiguous_format)
        G = d_starts.shape[1]
        d_u = torch.bmm(scores.mT, d_o)
        d_shifted = torch.bmm(query.mT, d_o)
        d_base, d_added = torch.empty_like(u), torch.empty_like(added)
        d_keep = None if keep is None else torch.empty_like(keep)
        for i, (first, stop) in enumerate(ctx.ranges):
            d_state = d_starts[i]
            for c in range(stop - 1, first - 1, -1):
                at = slice(c * G, (c + 1) * G)
                if scale is None:
                    d_added[at].copy_(d_state)
                else:
                    torch.mul(d_state, scale[at], out=d_added[at])
                d_u[at].baddbmm_(direction[at], d_added[at])
                torch.bmm(inverse[at].mT, d_u[at], out=d_base[at])
                d_shifted[at].baddbmm_(erase[at].mT, d_base[at])
                if keep is None or scale is None or d_keep is None:
                    d_state.add_(d_shifted[at])
                else:
                    # S is S̃ / scale, which is never zero: a shift is 0 or at most half FAST_LIMIT.
                    product = _reduced(d_state * shifted[at], keep)
                    torch.div(product, scale[at], out=d_keep[at])
                    d_state.mul_(keep[at]).addcmul_(d_shifted[at], scale[at])
        d_overlap = torch.bmm(d_base, u.mT).tril_(-1)
        d_scores = torch.bmm(d_o, u.mT).tril_()
        d_exact_overlap, d_exact_scores = None, None
        if rows is not None:
            d_exact_overlap = d_overlap.index_select(0, rows)
            d_exact_scores = d_scores.index_select(0, rows)
            d_overlap.index_fill_(0, rows, 0)
            d_scores.index_fill_(0, rows, 0)
        d_query = torch.bmm(d_scores, direction).baddbmm_(d_o, shifted.mT)
        d_erase = torch.bmm(d_overlap, direction).baddbmm_(d_base, shifted.mT)
        d_direction = torch.bmm(d_scores.mT, query).baddbmm_(d_overlap.mT, erase)
        d_direction.baddbmm_(u, d_added.mT)
        d_total, d_shift = None, None
        if keep is not None and scale is not None and d_keep is not None:
            d_total = d_keep.mul_(keep)
            d_shift = _reduced(shifted * d_shifted, keep) + _reduced(added * d_added, keep)
        return (
            None,
            None,
            d_starts,
            d_query,
            d_erase,
            d_direction,
            d_base,
            d_added if ctx.has_written else None,
            d_total,
            d_shift,
            None,
            None,
            d_exact_overlap,
            d_exact_scores,
        )


def _reduced(x: Tensor, like: Tensor) -> Tensor:
    """Sum [M, K, V] over V, and over K where there is one decay a head: [M, K or 1, 1]."""
    return x.sum(-1, keepdim=True) if like.shape[1] > 1 else x.sum((-2, -1), keepdim=True)
