"""Which ranks share a node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from zeco.core.errors import ArgumentError

Nodes = tuple[int, ...]
"""Ranks of every node, in the order of the ranks."""


def check_nodes(nodes: Sequence[int] | None, num_ranks: int) -> Nodes:
    """Return the nodes as a tuple; None means that one node holds all ranks.

    Raises:
        ArgumentError: an empty node, or another sum than the number of ranks.

    >>> check_nodes(None, 3), check_nodes([2, 1], 3)
    ((3,), (2, 1))
    """
    if nodes is None:
        return (num_ranks,)
    if any(size < 1 for size in nodes) or sum(nodes) != num_ranks:
        raise ArgumentError(
            f"nodes={tuple(nodes)} sum to {sum(nodes)}, but the group has {num_ranks} ranks; give "
            "the ranks of every node (at least 1 each) in the order of the ranks"
        )
    return tuple(nodes)


def node_of_ranks(nodes: Nodes) -> list[int]:
    """Return every rank's node.

    >>> node_of_ranks((2, 1))
    [0, 0, 1]
    """
    return [node for node, size in enumerate(nodes) for _ in range(size)]


def find_machine() -> str:
    """Return what tells this machine, as long as it runs, from others: its boot's number."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else os.uname().nodename
