"""Softmax attention of runs of queries to the keys that they can see, on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zeco.sequence_parallel.tokens import Span, Spans, place_in

MAX_MASK_ELEMENTS = 1 << 24
"""Largest mask made at a time; longer runs of queries are cut into blocks."""

MIN_BLOCK = 64
"""Fewer queries a block aren't worth a call, however narrow the window."""

Rows = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [B, S, H, D] before each document."""


@dataclass(frozen=True)
class Queries:
    """A run of one document's queries, as places in the whole sequence.

    Attributes:
        start: the first query.
        stop: one past the last.
        first: the document's first token.
        last: one past its last.
        document: which one it is.
    """

    start: int
    stop: int
    first: int
    last: int
    document: int

    def blocks(self, size: int) -> list[Queries]:
        """Cut into runs of ``size`` queries at most."""
        starts = range(self.start, self.stop, size)
        return [
            Queries(start, min(start + size, self.stop), self.first, self.last, self.document)
            for start in starts
        ]


@dataclass(frozen=True)
class Sight:
    """What a query can see, and the factor of its products with keys.

    Attributes:
        causal: nothing after itself.
        window: only tokens less than so many away; None for no limit.
        scale: the factor.
    """

    causal: bool
    window: int | None
    scale: float

    def first_of(self, run: Queries, earliest: int) -> int:
        """Return the first token, none before ``earliest``, that some query of a run can see."""
        return earliest if self.window is None else max(earliest, run.start - self.window + 1)

    def keys_of(self, run: Queries) -> Span:
        """Return the tokens of the sequence that some query of a run can see."""
        stop = run.stop if self.causal else run.last
        if self.window is not None:
            stop = min(stop, run.stop + self.window - 1)
        return self.first_of(run, run.first), stop

    def mask(self, run: Queries, first: int, stop: int, device: torch.device) -> Tensor | None:
        """Return which query sees which of the tokens from first to stop [Tq, Tk]; None for all."""
        near = self.window is None or max(run.stop - 1 - first, stop - 1 - run.start) < self.window
        if near and (not self.causal or stop <= run.start + 1):
            return None
        tokens = torch.arange(first, stop, device=device)
        ahead = tokens - torch.arange(run.start, run.stop, device=device)[:, None]
        sees = ahead <= 0 if self.causal else torch.ones_like(ahead, dtype=torch.bool)
        return sees if self.window is None else sees & (ahead.abs() < self.window)

    def is_triangle(self, run: Queries, first: int) -> bool:
        """Whether queries and keys from ``first`` on are the same tokens, with no narrower window."""
        num_queries = run.stop - run.start
        wide = self.window is None or self.window >= num_queries
        return self.causal and first == run.start and wide

    def block_size(self, num_keys: int) -> int:
        """Return how many queries go together when they need a mask."""
        size = MAX_MASK_ELEMENTS // max(1, num_keys)
        if self.window is not None:
            size = min(size, self.window)
        return max(MIN_BLOCK, size)


def queries_in(spans: Spans, documents: Sequence[int]) -> list[Queries]:
    """Cut spans of tokens at the documents' boundaries.

    >>> [(run.start, run.stop, run.document) for run in queries_in(((1, 5),), [0, 3, 3, 8])]
    [(1, 3, 0), (3, 5, 2)]
    """
    return [
        Queries(max(start, first), min(stop, last), first, last, document)
        for start, stop in spans
        for document, (first, last) in enumerate(pairwise(documents))
        if max(start, first) < min(stop, last)
    ]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Sequence[Queries],
    held: Spans,
    past: Rows | None,
    sight: Sight,
) -> Tensor:
    """Return the outputs [B, T, Hq, V] of runs of queries.

    Args:
        q: the queries, run after run [B, T, Hq, D].
        k: keys [B, W, Hkv, D] of the tokens held, in the order of the sequence.
        v: values [B, W, Hkv, V].
        queries: the runs.
        held: which tokens these keys belong to, merged.
        past: keys and values before each document, or None.
        sight: what queries can see.
    """
    # Empty, but they tie all inputs to the output: their backward pass may be an exchange with other
    # ranks, which wait for this one even if it has no queries.
    shape = (q.shape[0], 0, q.shape[2], v.shape[3])
    outputs = [x[:, :0, :1, :1].expand(shape) for x in (q, k, v)]
    row = 0
    for whole_run in queries:
        for run in _blocks(whole_run, past, sight):
            mine = q[:, row : row + run.stop - run.start]
            row += run.stop - run.start
            outputs.append(_attend_run(mine, k, v, run, held, past, sight))
    return torch.cat(outputs, 1)


def _blocks(run: Queries, past: Rows | None, sight: Sight) -> list[Queries]:
    before = 0 if past is None else past[run.document][0].shape[1]
    first = sight.first_of(run, run.first - before)
    _, stop = sight.keys_of(run)
    if sight.is_triangle(run, first) or (not sight.causal and sight.window is None):
        return [run]
    return run.blocks(sight.block_size(stop - first))


def _attend_run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    run: Queries,
    held: Spans,
    past: Rows | None,
    sight: Sight,
) -> Tensor:
    start, stop = sight.keys_of(run)
    at = place_in(held, start)
    k, v = k[:, at : at + stop - start], v[:, at : at + stop - start]
    first = start
    if past is not None:
        old_k, old_v = past[run.document]
        before = old_k.shape[1]
        first = sight.first_of(run, run.first - before)
        if first < run.first:
            seen = slice(before - (run.first - first), before)
            k = torch.cat([old_k[:, seen].to(k.dtype), k], 1)
            v = torch.cat([old_v[:, seen].to(v.dtype), v], 1)
    triangle = sight.is_triangle(run, first) and run.stop - run.start > 1
    o = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if triangle else sight.mask(run, first, stop, q.device),
        is_causal=triangle,
        scale=sight.scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return o.transpose(1, 2)
