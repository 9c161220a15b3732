"""Scans on tensors, without autograd: start one, go on computing, wait for its states."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from zeco.collectives.executor import Execution, Pass
from zeco.collectives.transport import TAGS_A_SEQUENCE, Ended, Task, Transport
from zeco.core.blocks import make_algebra
from zeco.core.costs import Plan, choose_plan
from zeco.core.errors import ArgumentError
from zeco.core.maps import AffineMap
from zeco.core.precision import true_fp32
from zeco.core.schedule import build_schedule
from zeco.core.transitions import Reset

FORWARD, BACKWARD = "forward", "backward"
"""Purposes of scans, in the ledger."""


@dataclass(eq=False)
class ScanHandle:
    """A scan under way."""

    transport: Transport
    task: Task[tuple[Tensor, Tensor]]

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return (entering, leaving) [B, H, K, V]; the ledger counts the time until they are there."""
        start = time.perf_counter()
        states = self.task.wait()
        self.transport.ledger.count_wait(time.perf_counter() - start)
        return states


def start_scan(
    transport: Transport,
    own: AffineMap,
    initial: Tensor | None = None,
    *,
    reverse: bool = False,
    algorithm: str = "auto",
    num_blocks: int | None = None,
    purpose: str = FORWARD,
    local_pass: Pass | None = None,
) -> ScanHandle:
    """Start a scan over the ranks' maps.

    Args:
        transport: this rank's end of the group.
        own: this rank's map, in the direction of travel.
        initial: the state that enters the first rank in that direction; not used elsewhere.
        reverse: whether the state travels from the last rank to the first.
        algorithm: a scan's name or ``"auto"``, for which the cost model chooses.
        num_blocks: pipeline blocks; None lets the cost model choose.
        purpose: under which the ledger counts the messages.
        local_pass: see `Execution`; it runs at once, in the caller's thread.
    """
    transport.check_tensor(own.update)
    plan = make_plan(transport, own, algorithm, num_blocks)
    B, H, K, V = own.update.shape
    algebra = make_algebra(own.transition, (B, H, K, V), plan.num_blocks)
    # The algebra has the last word on the blocks: there can't be more than there are rows.
    schedule = build_schedule(
        plan.algorithm, transport.size, algebra.num_blocks, reverse=reverse, nodes=plan.nodes
    )
    execution = Execution(
        schedule,
        transport,
        algebra,
        own,
        initial,
        tags=transport.next_tags(),
        purpose=purpose,
        local_pass=local_pass,
    )
    transport.ledger.count_scan(purpose)

    def program() -> tuple[Tensor, Tensor]:
        with torch.no_grad(), true_fp32(own.update.device):
            return execution.run()

    if local_pass is not None:
        start = time.perf_counter()
        states = program()
        transport.ledger.count_wait(time.perf_counter() - start - execution.pass_s)
        return ScanHandle(transport, Ended(states))
    return ScanHandle(transport, transport.submit(program))


def make_plan(transport: Transport, own: AffineMap, algorithm: str, num_blocks: int | None) -> Plan:
    """Choose what a scan leaves open: the algorithm, the number of blocks."""
    if num_blocks is not None and not 1 <= num_blocks < TAGS_A_SEQUENCE:
        raise ArgumentError(f"num_blocks={num_blocks}, but must be from 1 to {TAGS_A_SEQUENCE - 1}")
    B, H, K, V = own.update.shape
    return choose_plan(
        transport.size,
        (B, H, K, V),
        own.transition.among if isinstance(own.transition, Reset) else own.transition.kind,
        own.update.element_size(),
        algorithm=algorithm,
        num_blocks=num_blocks,
        nodes=transport.nodes,
        fabric=transport.fabric,
    )
