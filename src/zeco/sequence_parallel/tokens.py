"""Fetching tokens from the ranks that hold them: only those that somebody needs cross the network."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from zeco.collectives.all_to_all import Swap, Way, all_to_all
from zeco.collectives.transport import Transport

Span = tuple[int, int]
"""First token of a run of the sequence, and one past its last."""

Spans = tuple[Span, ...]


def merge_spans(spans: Sequence[Span]) -> Spans:
    """Return the same tokens as sorted spans that don't touch each other.

    >>> merge_spans([(4, 6), (0, 2), (1, 3), (3, 3), (6, 7)])
    ((0, 3), (4, 7))
    """
    merged: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def overlaps(spans: Sequence[Span], wanted: Sequence[Span]) -> list[Span]:
    """Return what of each span is wanted, span after span; ``wanted`` is merged.

    >>> overlaps([(4, 8), (0, 3)], [(2, 5), (7, 9)])
    [(4, 5), (7, 8), (2, 3)]
    """
    return [
        (max(start, first), min(stop, last))
        for start, stop in spans
        for first, last in wanted
        if max(start, first) < min(stop, last)
    ]


def place_in(wanted: Sequence[Span], token: int) -> int:
    """Return the place of a token in the row of wanted ones; one past a span's last counts too.

    >>> place_in([(2, 5), (7, 9)], 8)
    4
    """
    at = max(0, bisect_right(wanted, token, key=lambda span: span[0]) - 1)
    before = sum(stop - start for start, stop in wanted[:at])
    return before + token - wanted[at][0]


def fetch_tokens(
    tensors: Sequence[Tensor],
    spans: Sequence[Spans],
    wanted: Sequence[Spans],
    transport: Transport,
) -> list[Tensor]:
    """Bring every rank the tokens that it wants, in the order of the sequence.

    Differentiable; when a checkpointed region is recomputed, no message is sent again.

    Args:
        tensors: this rank's tokens, each [B, T, ...].
        spans: where the tokens of every rank lie in the sequence, in the order in which it has them.
        wanted: what every rank wants, merged (see `merge_spans`).
        transport: this rank's end of the group.

    Returns:
        For each tensor [B, W, ...], W tokens wanted by this rank.
    """
    rank, ranks = transport.rank, range(transport.size)
    mine = _places(spans[rank])
    arriving = [overlaps(spans[source], wanted[rank]) for source in ranks]
    counts = tuple(sum(stop - start for start, stop in parts) for parts in arriving)
    leaving = [
        [(mine[s] + a - s, mine[s] + b - s) for s, a, b in _tagged(spans[rank], wanted[target])]
        for target in ranks
    ]
    sent = tuple(sum(stop - start for start, stop in parts) for parts in leaving)
    way = Way(1, sent, 1, counts)
    pieces = [piece for parts in leaving for piece in parts]
    swaps = [Swap(torch.cat([x[:, :0], *(x[:, a:b] for a, b in pieces)], 1), way) for x in tensors]
    found = all_to_all(swaps, transport)
    order = [span for parts in arriving for span in parts]
    if order == sorted(order):
        return found
    sizes = [stop - start for start, stop in order]
    by_place = sorted(range(len(order)), key=order.__getitem__)
    return [torch.cat([x.split(sizes, 1)[i] for i in by_place], 1) for x in found]


def _places(spans: Spans) -> dict[int, int]:
    """Return the place at which each (not empty) span begins among a rank's tokens."""
    places: dict[int, int] = {}
    row = 0
    for start, stop in spans:
        if start < stop:
            places[start] = row
        row += stop - start
    return places


def _tagged(spans: Spans, wanted: Spans) -> list[tuple[int, int, int]]:
    """Return `overlaps`, each behind the first token of its span."""
    return [
        (start, first, last)
        for start, stop in spans
        for first, last in overlaps([(start, stop)], wanted)
    ]
