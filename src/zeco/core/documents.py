"""Where packed documents lie: global boundaries, and the pieces of them that one rank holds.

A *piece* is a run of a rank's tokens that belong to one document. Its state starts from the state
that enters the rank when the document began on an earlier rank (``continued``), else from the
document's own initial state. A rank always has at least one piece, if need be an empty one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from zeco.core.errors import ArgumentError


@dataclass(frozen=True)
class Pieces:
    """One rank's tokens cut at document boundaries.

    Attributes:
        bounds: cut points 0 = b[0] <= ... <= b[n] = T; piece i holds tokens b[i] to b[i+1].
        documents: the global document of each piece.
        continued: whether the first piece goes on from the previous rank.
        continues: whether the last piece goes on to the next rank.
        before: tokens of the first piece's document on earlier ranks; None when the sequence isn't
            packed, for then nothing asks.
    """

    bounds: tuple[int, ...]
    documents: tuple[int, ...]
    continued: bool
    continues: bool
    before: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens on this rank."""
        return self.bounds[-1]

    @property
    def resets(self) -> bool:
        """Whether a document starts on this rank, so that nothing that enters leaves it."""
        return not self.continued or len(self.documents) > 1

    @property
    def fresh(self) -> tuple[int, ...]:
        """The pieces that start from their document's initial state."""
        return tuple(range(1 if self.continued else 0, len(self.documents)))

    @property
    def ended(self) -> tuple[int, ...]:
        """The pieces whose documents end on this rank."""
        return tuple(range(len(self.documents) - (1 if self.continues else 0)))


@lru_cache(maxsize=256)
def whole(num_tokens: int) -> Pieces:
    """Return the single piece of a rank whose sequence isn't packed: it always continues.

    >>> whole(5)
    Pieces(bounds=(0, 5), documents=(0,), continued=True, continues=True, before=None)
    """
    return Pieces((0, num_tokens), (0,), continued=True, continues=True)


def local_pieces(cu_seqlens: Sequence[int], start: int, stop: int) -> Pieces:
    """Cut the tokens [start, stop) of a packed sequence at its documents' boundaries.

    An empty document belongs to the rank that holds the token at its position, or, at the end of
    the sequence, to the last rank that holds one.

    Args:
        cu_seqlens: global boundaries, 0 first, the total length last.
        start: first global token of the rank.
        stop: one past its last.

    >>> local_pieces([0, 3, 3, 8], 2, 6)
    Pieces(bounds=(0, 1, 1, 4), documents=(0, 1, 2), continued=True, continues=True, before=2)
    >>> local_pieces([0, 3, 8], 3, 3)
    Pieces(bounds=(0, 0), documents=(0,), continued=True, continues=True, before=3)
    """
    total = cu_seqlens[-1]
    if start == stop and total > 0:
        document = max(0, bisect_right(cu_seqlens, start - 1) - 1)
        before = start - cu_seqlens[document]
        return Pieces((0, 0), (document,), continued=True, continues=True, before=before)
    num_documents = len(cu_seqlens) - 1
    bounds: list[int] = [0]
    documents: list[int] = []
    continued = False
    for document in range(num_documents):
        first, last = cu_seqlens[document], cu_seqlens[document + 1]
        if first == last:
            mine = start <= first < stop or (first == total and stop == total)
        else:
            mine = first < stop and last > start
        if not mine:
            continue
        if not documents:
            continued = first < start
        documents.append(document)
        bounds.append(min(last, stop) - start)
    continues = cu_seqlens[documents[-1] + 1] > stop
    before = start - cu_seqlens[documents[0]] if continued else 0
    return Pieces(tuple(bounds), tuple(documents), continued, continues, before)


def check_cu_seqlens(cu_seqlens: Tensor, total: int, batch: int) -> tuple[int, ...]:
    """Return the boundaries as integers, or refuse them by name.

    Args:
        cu_seqlens: global boundaries [N+1], int32 or int64.
        total: the length of the whole sequence, over all ranks.
        batch: the batch size, which must be 1.
    """
    where = "cu_seqlens"
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1:
        raise ArgumentError(
            f"{where} has dtype {cu_seqlens.dtype} and shape {list(cu_seqlens.shape)}, but must be "
            "int32 or int64 [num_documents + 1]"
        )
    if batch != 1:
        raise ArgumentError(f"{where} needs a batch of 1, got {batch}: flatten the batch into T")
    bounds = tuple(int(b) for b in cu_seqlens.tolist())
    if len(bounds) < 2 or bounds[0] != 0:
        raise ArgumentError(f"{where} must start at 0 and have two entries or more, got {bounds}")
    for earlier, later in pairwise(bounds):
        if later < earlier:
            raise ArgumentError(f"{where} decreases from {earlier} to {later}; sort the documents")
    if bounds[-1] != total:
        raise ArgumentError(
            f"{where} ends at {bounds[-1]}, but the sequence has {total} tokens over all ranks; "
            "give global boundaries, made before sharding"
        )
    return bounds
