"""Ulysses (arXiv:2309.14509): every rank gets all tokens of its share of the heads, and back.

It needs no scan and suits any operator, but the heads must divide by the ranks, and all of queries,
keys, values, gates and outputs cross the network: T tokens' worth where a scan sends one state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeco.collectives.all_to_all import Swap, Way, all_to_all, gather_sizes
from zeco.collectives.transport import Transport
from zeco.core.errors import UnsupportedError
from zeco.core.partition import shard_bounds
from zeco.operators.arguments import repeat_heads

Span = tuple[int, int]
Spans = tuple[Span, ...]


@dataclass(frozen=True, eq=False)
class Ulysses:
    """Tokens to heads and back, for one operator call.

    Attributes:
        transport: this rank's end of the group.
        spans: where every rank's slots lie in the sequence.
    """

    transport: Transport
    spans: Sequence[Spans]

    @property
    def sizes(self) -> list[int]:
        """Tokens of every rank."""
        return [sum(stop - start for start, stop in spans) for spans in self.spans]

    def to_heads(self, inputs: Sequence[Tensor], states: Tensor) -> tuple[list[Tensor], Tensor]:
        """Turn own tokens of all heads into all tokens of own heads.

        Args:
            inputs: each [B, T, H, ...], or with fewer heads, each shared by as many of H: repeated
                where they don't divide by P.
            states: [N, H, ...], each counting on one rank only and zero on the others.

        Returns:
            The inputs [B, L, H/P, ...], tokens in the order of the sequence, and the states
            [N, H/P, ...].
        """
        P, sizes = self.transport.size, tuple(self.sizes)
        inputs = [repeat_heads(x, states.shape[1]) if x.shape[2] % P else x for x in inputs]
        swaps = [Swap(states[None], Way(2, (states.shape[1] // P,) * P, 0, (1,) * P))]
        swaps += [Swap(x, Way(2, (x.shape[2] // P,) * P, 1, sizes)) for x in inputs]
        found, *wholes = all_to_all(swaps, self.transport)
        lengths = [stop - start for start, stop in self._row]
        return [_ordered(x, lengths, self._order) for x in wholes], found.sum(0)

    def to_tokens(self, o: Tensor, finals: Tensor) -> tuple[Tensor, Tensor]:
        """Turn all tokens of own heads into own tokens of all heads.

        Args:
            o: [B, L, H/P, ...].
            finals: states [N, H/P, ...].

        Returns:
            The outputs [B, T, H, ...] and the states [N, H, ...].
        """
        P, heads = self.transport.size, finals.shape[1]
        order = self._order
        lengths = [self._row[i][1] - self._row[i][0] for i in order]
        back = sorted(range(len(order)), key=order.__getitem__)
        by_rank = _ordered(o, lengths, back)
        copies = finals.expand(P, *finals.shape)  # one for every rank
        found, states = all_to_all(
            [
                Swap(by_rank, Way(1, tuple(self.sizes), 2, (o.shape[2],) * P)),
                Swap(copies, Way(0, (1,) * P, 2, (heads,) * P)),
            ],
            self.transport,
        )
        return found, states[0]

    @property
    def _row(self) -> list[Span]:
        """The slots of all ranks, one rank after the other."""
        return [span for spans in self.spans for span in spans]

    @property
    def _order(self) -> list[int]:
        """Places in that row, in the order of the sequence."""
        return sorted(range(len(self._row)), key=lambda i: (self._row[i], i))


def _ordered(x: Tensor, lengths: Sequence[int], order: Sequence[int]) -> Tensor:
    """Put parts of dim 1 into another order; no copy is made when they have it already."""
    if list(order) == sorted(order):
        return x
    parts = x.split(list(lengths), 1)
    return torch.cat([parts[i] for i in order], 1)


def check_heads(transport: Transport, heads: int) -> None:
    """Refuse a number of heads that the ranks don't divide."""
    if heads % transport.size:
        raise UnsupportedError(
            f"method='ulysses' needs heads that divide by the ranks, got {heads} heads on "
            f"{transport.size} ranks; 'zeco', 'lasp1' and 'lasp2' have no such limit"
        )


def ask_spans(
    num_tokens: int,
    transport: Transport,
    device: torch.device,
    spans_of: Callable[[int, int], Spans] | None,
) -> list[Spans]:
    """Ask all ranks for their tokens and return where their slots lie.

    Args:
        num_tokens: tokens on this rank.
        transport: this rank's end of the group.
        device: of the tensors that the group's messages carry.
        spans_of: gives the slots of a rank from the whole length; None for one slot a rank, which may
            then be of any size.
    """
    sizes = gather_sizes(num_tokens, transport, device)
    if spans_of is None:
        return [(shard_bounds(sizes, rank),) for rank in range(transport.size)]
    return [spans_of(sum(sizes), rank) for rank in range(transport.size)]
