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


def check_shard_sizes(sizes: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Refuse shard sizes of another number of ranks, or negative ones."""
    if len(sizes) != num_ranks or any(size < 0 for size in sizes):
        raise ArgumentError(
            f"shard_sizes={tuple(sizes)}, but must be {num_ranks} numbers of tokens, one a rank, "
            "none negative"
        )
    return tuple(int(size) for size in sizes)
