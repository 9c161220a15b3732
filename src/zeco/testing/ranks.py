"""Run a function on P ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from zeco.collectives.in_process import InProcessTransport, InProcessWorld

ResultT = TypeVar("ResultT")


def run_ranks(
    num_ranks: int, function: Callable[[InProcessTransport], ResultT], *, timeout_s: float = 60.0
) -> list[ResultT]:
    """Call a function once on every rank, each in a thread of its own, and return all results.

    A rank that raises makes the others stop waiting; the first error is raised here.

    Args:
        num_ranks: P.
        function: called with the rank's transport, which every function of this package takes as
            a group.
        timeout_s: how long a rank waits for a message.

    >>> run_ranks(3, lambda group: group.rank)
    [0, 1, 2]
    """
    world = InProcessWorld(num_ranks, timeout_s=timeout_s)
    results: list[ResultT | None] = [None] * num_ranks
    errors: list[tuple[int, BaseException]] = []
    grad = torch.is_grad_enabled()

    def run(rank: int) -> None:
        try:
            with torch.set_grad_enabled(grad):
                results[rank] = function(world.transport(rank))
        except BaseException as error:  # raised again in the caller's thread
            errors.append((rank, error))
            world.abort(f"rank {rank} raised {type(error).__name__}: {error}")
        finally:
            world.transport(rank).close()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0][1]
    return results  # type: ignore[return-value]
