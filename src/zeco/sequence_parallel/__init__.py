"""The context that a user holds, the methods behind it, sharding and loss."""

from __future__ import annotations

from zeco.sequence_parallel.attention import attention
from zeco.sequence_parallel.batches import gather_final_state, shard_batch, unshard
from zeco.sequence_parallel.context import SequenceParallel
from zeco.sequence_parallel.loss import cross_entropy

__all__ = [
    "SequenceParallel",
    "attention",
    "cross_entropy",
    "gather_final_state",
    "shard_batch",
    "unshard",
]
