"""The few tokens before each token, across ranks and within documents.

Short convolutions and token shifts look back by a fixed reach. Every piece of a document is laid
out as its context followed by its tokens, so that one valid convolution over all rows serves them::

    documents     |      3       |   4   |      5
    rows          hh tttttttttttt cc tttt cc tttttttt

Here t are tokens, h is the halo from earlier ranks, c what lies before a document of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zeco.core.documents import Pieces
from zeco.core.shapes import check_shapes
from zeco.operators.function import SingleDevice
from zeco.sequence_parallel import SequenceParallel
from zeco.sequence_parallel.halo import halos


@dataclass(frozen=True, eq=False)
class History:
    """This rank's tokens, each piece of a document behind the tokens that it may look back at.

    Attributes:
        rows: contexts and tokens, [B, R, D].
        reach: rows of each context.
        places: for each token the place, in rows, at which its context begins, [T]; None when these
            are simply the first T rows.
        leaving: the last ``reach`` rows that were seen, [B, reach, D]; for packed documents
            [N, reach, D], zero but for the documents that end on this rank.
    """

    rows: Tensor
    reach: int
    places: Tensor | None
    leaving: Tensor

    def back(self, distance: int) -> Tensor:
        """Return what lies ``distance`` (0 to reach) tokens before each token, [B, T, D]."""
        return self.merge(self.rows[:, self.reach - distance : self.rows.shape[1] - distance])

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
    if sp is not None:
        lefts = halos(x, sizes, reach, sp, initial=initial)
    else:  # nobody to ask
        lefts = [x.new_zeros(x.shape[0], reach, x.shape[2]) if initial is None else initial]
    if cu_seqlens is None and len(slots) == 1:
        rows = torch.cat([lefts[0], x], 1)
        return History(rows, reach, None, rows[:, x.shape[1] :])
    history = _by_pieces(x, lefts, reach, slots, state, num_states)
    if cu_seqlens is None:
        last = x[:, x.shape[1] - sizes[-1] :]
        return replace(history, leaving=torch.cat([lefts[-1], last], 1)[:, sizes[-1] :])
    return history


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
    offset = 0
    for pieces, left in zip(slots, lefts, strict=True):
        for i, document in enumerate(pieces.documents):
            start, stop = offset + pieces.bounds[i], offset + pieces.bounds[i + 1]
            before = _before(pieces, reach) if i == 0 else 0
            context = left[:, reach - before :]
            if before < reach:
                own = (
                    left.new_zeros(1, reach, x.shape[2]) if state is None else state[document, None]
                )
                context = torch.cat([own[:, before:], context], 1)
            tokens = x[:, start:stop]
            parts += [context, tokens]
            places.append(torch.arange(row, row + stop - start, device=x.device))
            row += reach + stop - start
            if i in pieces.ended:
                ended.append(torch.cat([context, tokens], 1)[:, stop - start :])
                documents.append(document)
        offset += pieces.num_tokens
    if ended:
        index = torch.tensor(documents, device=x.device)
        finals = finals.index_copy(0, index, torch.cat(ended))
    return History(torch.cat(parts, 1), reach, torch.cat(places), finals)


def _before(pieces: Pieces, reach: int) -> int:
    """Return how many of the ``reach`` rows of a slot's halo belong to its first document."""
    if not pieces.continued:
        return 0
    return reach if pieces.before is None else min(pieces.before, reach)
