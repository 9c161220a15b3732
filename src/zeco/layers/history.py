"""The few tokens before each token, across ranks and within documents.

Short convolutions and token shifts look back by a fixed reach. Every piece of a document is laid
out as its context followed by its tokens, so that one valid convolution over all rows serves them::

    documents     |      3       |   4   |      5
    rows          hh tttttttttttt cc tttt cc tttttttt

Here t are tokens, h is the halo from earlier ranks, c what lies before a document of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from zeco.core.documents import Pieces
from zeco.core.shapes import check_shapes
from zeco.operators.single_device import SingleDevice
from zeco.sequence_parallel import SequenceParallel
from zeco.sequence_parallel.halo import halos
from zeco.sequence_parallel.methods.method import do_nothing


@dataclass(frozen=True, eq=False)
class History:
    """This rank's tokens, each piece of a document behind the tokens that it may look back at.

    Attributes:
        context: the first rows, [B, reach, D].
        others: all rows after them, [B, R - reach, D].
        reach: rows of each context.
        places: for each token the place, in rows, at which its context begins, [T]; None when these
            are simply the first T rows.
        leaving: the last ``reach`` rows that were seen, [B, reach, D]; for packed documents
            [N, reach, D], zero but for the documents that end on this rank.
    """

    context: Tensor
    others: Tensor
    reach: int
    places: Tensor | None
    leaving: Tensor

    def back(self, distance: int) -> Tensor:
        """Return what lies ``distance`` (0 to reach) tokens before each token, [B, T, D]."""
        rows = torch.cat([self.context, self.others], 1)
        return self.merge(rows[:, self.reach - distance : rows.shape[1] - distance])

    def merge(self, y: Tensor) -> Tensor:
        """Take what belongs to tokens, [B, T, D], from what was made of windows of rows.

        Args:
            y: [B, R - reach, D], entry i made of the rows from i to i + reach.
        """
        return y if self.places is None else y.index_select(1, self.places)


def read_history(
    x: Tensor,
    reach: int,
    *,
    sp: SequenceParallel | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    meanwhile: Callable[[], None] = do_nothing,
) -> History:
    """Put the tokens before them in front of a rank's tokens.

    Every rank calls it with the same ``reach``, and what it returns is used on every rank, so that
    the backward pass of the exchange runs everywhere too.

    Args:
        x: this rank's tokens [B, T, D].
        reach: how far a token looks back, at least 0.
        sp: the sequence-parallel context, or None.
        cu_seqlens: global boundaries [N+1] of packed documents, or None.
        state: what lies before the sequence, [B, reach, D], used on the first rank; with
            ``cu_seqlens`` before each document, [N, reach, D], the same on every rank. None: zeros.
        meanwhile: work to do while the halo is under way.

    Raises:
        ArgumentError: the state's shape doesn't fit.
    """
    num_states = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    name = "B" if cu_seqlens is None else "N"
    check_shapes(
        "state of a convolution or token shift",
        {"state": (state, f"{name} reach D")},
        **{name: num_states, "reach": reach, "D": x.shape[2]},
    )
    if state is not None:
        state = state.to(x.dtype)
    exchange = SingleDevice() if sp is None else sp
    slots = exchange.locate(x.shape[1], cu_seqlens, x.shape[0])
    sizes = [pieces.num_tokens for pieces in slots]
    initial = state if cu_seqlens is None else None
    lefts, x = halos(x, sizes, reach, sp, initial=initial, meanwhile=meanwhile)
    if cu_seqlens is None and len(slots) == 1:
        return History(lefts[0], x, reach, None, _last(lefts[0], x))
    history = _by_pieces(x, lefts, reach, slots, state, num_states)
    if cu_seqlens is None:
        return replace(history, leaving=_last(lefts[-1], x[:, x.shape[1] - sizes[-1] :]))
    return history


def _last(context: Tensor, tokens: Tensor) -> Tensor:
    """Return the last rows of a context and the tokens behind it, as many as the context has."""
    reach, count = context.shape[1], tokens.shape[1]
    if count >= reach:
        return tokens[:, count - reach :]
    return torch.cat([context, tokens], 1)[:, count:]


def _by_pieces(
    x: Tensor,
    lefts: list[Tensor],
    reach: int,
    slots: tuple[Pieces, ...],
    state: Tensor | None,
    num_documents: int,
) -> History:
    # The halos always come first, used or not: their backward pass is an exchange with other ranks.
    parts = list(lefts)
    places: list[Tensor] = []
    finals = x.new_zeros(num_documents, reach, x.shape[2])
    ended: list[Tensor] = []
    documents: list[int] = []
    row = reach * len(slots)
    lengths = [stop - start for pieces in slots for start, stop in pairwise(pieces.bounds)]
    split = iter(x.split(lengths, 1))
    for pieces, left in zip(slots, lefts, strict=True):
        for i, document in enumerate(pieces.documents):
            before = _before(pieces, reach) if i == 0 else 0
            context = left[:, reach - before :]
            if before < reach:
                own = (
                    left.new_zeros(1, reach, x.shape[2]) if state is None else state[document, None]
                )
                context = torch.cat([own[:, before:], context], 1)
            tokens = next(split)
            parts += [context, tokens]
            places.append(torch.arange(row, row + tokens.shape[1], device=x.device))
            row += reach + tokens.shape[1]
            if i in pieces.ended:
                ended.append(_last(context, tokens))
                documents.append(document)
    if ended:
        index = torch.tensor(documents, device=x.device)
        finals = finals.index_copy(0, index, torch.cat(ended))
    rows = torch.cat(parts, 1)
    return History(rows[:, :reach], rows[:, reach:], reach, torch.cat(places), finals)


def _before(pieces: Pieces, reach: int) -> int:
    """Return how many of the ``reach`` rows of a slot's halo belong to its first document."""
    if not pieces.continued:
        return 0
    return reach if pieces.before is None else min(pieces.before, reach)
