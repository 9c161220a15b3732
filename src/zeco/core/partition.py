"""How a sequence is cut into contiguous shards, one a rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from zeco.core.errors import ArgumentError


def default_shard_sizes(total: int, num_ranks: int) -> tuple[int, ...]:
    """Return the tokens of every rank: ``total // num_ranks``, one more on the first ones.

    >>> default_shard_sizes(10, 4)
    (3, 3, 2, 2)
    """
    size, more = divmod(total, num_ranks)
    return tuple(size + (rank < more) for rank in range(num_ranks))


def shard_bounds(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the first token of a rank and one past its last.

    >>> shard_bounds((3, 3, 2, 2), 2)
    (6, 8)
    """
    ends = [0, *accumulate(sizes)]
    return ends[rank], ends[rank + 1]


def zigzag_slots(rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the two of 2P slots that a rank holds, so that causal softmax work is balanced.

    >>> [zigzag_slots(rank, 3) for rank in range(3)]
    [(0, 5), (1, 4), (2, 3)]
    """
    return rank, 2 * num_ranks - 1 - rank


def check_shard_sizes(sizes: Sequence[int], count: int, what: str = "rank") -> tuple[int, ...]:
    """Refuse another number of shard sizes than ``count``, or negative ones."""
    if len(sizes) != count or any(size < 0 for size in sizes):
        raise ArgumentError(
            f"shard_sizes={tuple(sizes)}, but must be {count} numbers of tokens, one a {what}, "
            "none negative"
        )
    return tuple(int(size) for size in sizes)


def check_nodes(nodes: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Refuse nodes whose ranks don't sum to the group's, or empty ones."""
    if sum(nodes) != num_ranks or any(count < 1 for count in nodes):
        raise ArgumentError(
            f"nodes={tuple(nodes)} must be the ranks on each node, at least 1 each, and sum to the "
            f"{num_ranks} ranks of the group"
        )
    return tuple(int(count) for count in nodes)
