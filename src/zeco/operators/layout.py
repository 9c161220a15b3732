"""Tokens in chunks: each piece of a document starts a chunk of its own, tails are zero.

Zero keys, values, gates and betas leave a state as it is, so a padded row is a token that does
nothing. One mechanism thus serves lengths that are no multiple of the chunk and packed documents::

    pieces    |  document 3  | 4 |   document 5    |
    chunks    | 0..3 | 4..7̲_ | 8_ | 9..12 | 13..__ |       _ zero rows
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from zeco.core.documents import Pieces


@dataclass(frozen=True)
class Layout:
    """How a rank's T tokens lie in N chunks of C.

    Attributes:
        num_tokens: T.
        chunk: C.
        num_chunks: N.
        ranges: for each piece, its first chunk and one past its last.
        rows: for each of the N*C rows the token that it holds, T meaning none; None when the rows
            are simply the tokens in order, zeros after them.
    """

    num_tokens: int
    chunk: int
    num_chunks: int
    ranges: tuple[tuple[int, int], ...]
    rows: tuple[int, ...] | None

    def split(self, x: Tensor) -> Tensor:
        """Arrange tokens [B, T, ...] as chunks [B, N, C, ...], zeros in the rows without one."""
        padding = [0, 0] * (x.ndim - 2)
        if self.rows is None:
            missing = self.num_chunks * self.chunk - self.num_tokens
            x = F.pad(x, [*padding, 0, missing]) if missing else x
        else:
            rows = torch.tensor(self.rows, device=x.device)
            x = F.pad(x, [*padding, 0, 1]).index_select(1, rows)
        return x.reshape(x.shape[0], self.num_chunks, self.chunk, *x.shape[2:])

    def merge(self, y: Tensor) -> Tensor:
        """Take the tokens [B, T, ...] back out of chunks [B, N, C, ...]."""
        y = y.flatten(1, 2)
        if self.rows is None:
            return y[:, : self.num_tokens]
        tokens = sorted(
            (token, row) for row, token in enumerate(self.rows) if token < self.num_tokens
        )
        return y.index_select(1, torch.tensor([row for _, row in tokens], device=y.device))


@lru_cache(maxsize=256)
def make_layout(pieces: Pieces, chunk: int) -> Layout:
    """Lay the pieces' tokens into chunks of ``chunk`` rows.

    >>> from zeco.core.documents import local_pieces
    >>> make_layout(local_pieces([0, 3, 8], 0, 8), 4).ranges
    ((0, 1), (1, 3))
    """
    T = pieces.num_tokens
    ranges: list[tuple[int, int]] = []
    rows: list[int] = []
    first = 0
    for start, stop in pairwise(pieces.bounds):
        count = -(-(stop - start) // chunk)
        ranges.append((first, first + count))
        first += count
        if len(pieces.documents) > 1:
            rows.extend(range(start, stop))
            rows.extend([T] * (count * chunk - (stop - start)))
    return Layout(T, chunk, first, tuple(ranges), tuple(rows) or None)
