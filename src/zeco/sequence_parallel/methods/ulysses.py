"""Ulysses (arXiv:2309.14509): every rank gets all tokens of its share of the heads, and back.

It needs no scan and suits any operator, but the heads must divide by the ranks, and all of queries,
keys, values, gates and outputs cross the network: T tokens' worth where a scan sends one state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeco.collectives.all_to_all import Swap, all_to_all, gather_sizes
from zeco.collectives.transport import Transport
from zeco.core.errors import UnsupportedError
from zeco.core.partition import shard_bounds

Spans = tuple[tuple[int, int], ...]


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

    @property
    def order(self) -> Tensor:
        """Where the tokens of all ranks, one rank after the other, lie in the sequence."""
        return torch.cat(
            [torch.arange(start, stop) for spans in self.spans for start, stop in spans]
        )

    def to_heads(self, inputs: Sequence[Tensor], states: Tensor) -> tuple[list[Tensor], Tensor]:
        """Turn own tokens of all heads into all tokens of own heads.

        Args:
            inputs: each [B, T, H, ...].
            states: [N, H, ...], each counting on one rank only and zero on the others.

        Returns:
            The inputs [B, L, H/P, ...], tokens in the order of the sequence, and the states
            [N, H/P, ...].
        """
        P = self.transport.size
        swaps = [Swap(states.split(states.shape[1] // P, 1), self._state_shapes(states))]
        for x in inputs:
            B, _, H, *rest = x.shape
            shapes = [(B, size, H // P, *rest) for size in self.sizes]
            swaps.append(Swap(x.split(H // P, 2), shapes))
        found_states, *found = all_to_all(swaps, self.transport)
        places = self.order.argsort().to(states.device)
        wholes = [torch.cat(parts, 1)[:, places] for parts in found]
        return wholes, torch.stack(found_states).sum(0)

    def to_tokens(self, o: Tensor, finals: Tensor) -> tuple[Tensor, Tensor]:
        """Turn all tokens of own heads into own tokens of all heads.

        Args:
            o: [B, L, H/P, ...].
            finals: states [N, H/P, ...].

        Returns:
            The outputs [B, T, H, ...] and the states [N, H, ...].
        """
        P, mine = self.transport.size, self.sizes[self.transport.rank]
        B, _, heads, *rest = o.shape
        parts = o[:, self.order.to(o.device)].split(self.sizes, 1)
        swaps = [
            Swap(parts, [(B, mine, heads, *rest)] * P),
            Swap([finals] * P, [tuple(finals.shape)] * P),
        ]
        found, found_finals = all_to_all(swaps, self.transport)
        return torch.cat(found, 2), torch.cat(found_finals, 1)

    def _state_shapes(self, states: Tensor) -> list[tuple[int, ...]]:
        P = self.transport.size
        N, H, *rest = states.shape
        return [(N, H // P, *rest)] * P


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
