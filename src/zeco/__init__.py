"""Zeco: sequence parallelism for linear attention whose communication hides behind computation."""

from __future__ import annotations

from zeco import ops
from zeco.collectives.all_scan import all_scan, all_scan_start
from zeco.collectives.recompute import checkpoint, checkpoint_contexts
from zeco.core.errors import ZecoError
from zeco.core.transitions import Dense, Diagonal, Identity, Reset, Scalar
from zeco.sequence_parallel import (
    SequenceParallel,
    cross_entropy,
    gather_final_state,
    shard_batch,
    unshard,
)

__all__ = [
    "Dense",
    "Diagonal",
    "Identity",
    "Reset",
    "Scalar",
    "SequenceParallel",
    "ZecoError",
    "all_scan",
    "all_scan_start",
    "checkpoint",
    "checkpoint_contexts",
    "cross_entropy",
    "gather_final_state",
    "ops",
    "shard_batch",
    "unshard",
]
