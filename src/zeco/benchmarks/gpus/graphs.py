"""Runs of all ranks as CUDA graphs: captured by all, or by none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from zeco.benchmarks.device import KeyT, Run, capture
from zeco.benchmarks.gpus.team import Team


def capture_runs(team: Team, runs: Mapping[KeyT, Run]) -> tuple[dict[KeyT, Run], dict[KeyT, str]]:
    """Capture every run on all ranks, in the same order.

    A capture exchanges nothing, so that one which fails leaves no other rank waiting; what fails on one
    rank is dropped on all. The graphs share their memory: only one may run at a time.

    Args:
        team: the ranks; each has run all of them before.
        runs: by name, the same names on all ranks.

    Returns:
        The replays, and why others can't be captured.
    """
    replays: dict[KeyT, Run] = {}
    refused: dict[KeyT, str] = {}
    pool = torch.cuda.graph_pool_handle()
    for name, run in runs.items():
        reason, replay = None, None
        try:
            # Other threads watch the messages of before, which a graph has nothing to do with.
            replay = capture(run, warm_up=1, pool=pool, errors="thread_local")
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        reasons: list[str | None] = [None] * team.size
        dist.all_gather_object(reasons, reason, group=team.group)
        first = next((f"rank {i}: {r}" for i, r in enumerate(reasons) if r is not None), None)
        if first is None and replay is not None:
            replays[name] = replay
        else:
            refused[name] = str(first)
    return replays, refused
