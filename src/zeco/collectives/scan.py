"""Scans on tensors, without autograd: start one, go on computing, wait for its states."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from zeco.collectives.executor import Execution, Pass
from zeco.collectives.stream import StreamTask
from zeco.collectives.transport import TAGS_A_SEQUENCE, Ended, Task, Transport
from zeco.core.blocks import make_algebra
from zeco.core.costs import Plan, choose_plan
from zeco.core.errors import ArgumentError, UnsupportedError, unknown_name
from zeco.core.fabric import StateShape
from zeco.core.maps import AffineMap
from zeco.core.precision import true_fp32
from zeco.core.schedule import BUILDERS, DEVICE_CHAIN, build_schedule
from zeco.core.transitions import Dense, Reset

FORWARD, BACKWARD = "forward", "backward"
"""Purposes of scans, in the ledger."""

_LOGGER = logging.getLogger("zeco.scans")

ALGORITHMS = ("auto", *BUILDERS, DEVICE_CHAIN)


@dataclass(eq=False)
class ScanHandle:
    """A scan under way.

    Attributes:
        transport: this rank's end of the group.
        task: the scan.
        output_leaving: whether this rank asked for its leaving state.
    """

    transport: Transport
    task: Task[tuple[Tensor, Tensor | None]]
    output_leaving: bool = True

    @property
    def can_be_held_up(self) -> bool:
        """Whether large kernels that are launched from now on would delay the scan on every rank.

        So it is where a scan is a row of small kernels and messages on a stream: a matrix product
        that holds all multiprocessors lets none of them in until it ends, and the next rank waits.
        A scan inside one kernel is delayed once at most, until the last programs of such a product
        leave room for it.
        """
        return isinstance(self.task, StreamTask)

    def wait(self) -> tuple[Tensor, Tensor | None]:
        """Return (entering, leaving) [B, H, K, V]; the ledger counts the time until they are there.

        The latter is None where this rank didn't ask for it, whatever the algorithm.
        """
        start = time.perf_counter()
        entering, leaving = self.task.wait()
        self.transport.ledger.count_wait(time.perf_counter() - start)
        return entering, leaving if self.output_leaving else None

    def wait_for_both(self) -> tuple[Tensor, Tensor]:
        """Return what `wait` does, on a rank that asked for the leaving state.

        Raises:
            ArgumentError: it didn't. A None that is passed on as an initial state would be zeros.
        """
        entering, leaving = self.wait()
        if leaving is None:
            raise ArgumentError(
                "this scan was started without its leaving state; start it with output_leaving=True"
            )
        return entering, leaving


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
    output_leaving: bool = True,
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
        output_leaving: whether this rank wants its leaving state; else the handle gives None, and a
            scan inside a kernel doesn't write it. Ranks needn't agree.
    """
    plan = make_plan(transport, own, algorithm, num_blocks)
    if plan.algorithm == DEVICE_CHAIN:
        return _start_device_scan(
            transport,
            own,
            initial,
            reverse=reverse,
            purpose=purpose,
            output_leaving=output_leaving,
        )
    transport.check_tensor(own.update)
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
        return ScanHandle(transport, Ended(states), output_leaving)
    return ScanHandle(transport, transport.submit(program), output_leaving)


def _start_device_scan(
    transport: Transport,
    own: AffineMap,
    initial: Tensor | None,
    *,
    reverse: bool,
    purpose: str,
    output_leaving: bool,
) -> ScanHandle:
    """Start a scan inside kernels; the ledger counts its blocks as messages."""
    with torch.no_grad():
        task = transport.start_device_scan(
            own, initial, reverse=reverse, output_leaving=output_leaving
        )
    transport.ledger.count_scan(purpose)
    if transport.rank != (0 if reverse else transport.size - 1):
        num_bytes = own.update.numel() * own.update.element_size()
        num_blocks = transport.device_ring(own.update.device).layout_of(own).num_blocks
        transport.ledger.count_sent(purpose, num_bytes, num_blocks)
    return ScanHandle(transport, task, output_leaving)


def make_plan(transport: Transport, own: AffineMap, algorithm: str, num_blocks: int | None) -> Plan:
    """Choose what a scan leaves open: the algorithm, the number of blocks.

    Raises:
        ArgumentError: an unknown algorithm, or blocks that it doesn't take.
        UnsupportedError: a scan inside kernels that this group can't run.
    """
    if algorithm not in ALGORITHMS:
        raise ArgumentError(unknown_name("algorithm", algorithm, ALGORITHMS))
    if num_blocks is not None and not 1 <= num_blocks < TAGS_A_SEQUENCE:
        raise ArgumentError(f"num_blocks={num_blocks}, but must be from 1 to {TAGS_A_SEQUENCE - 1}")
    device = own.update.device
    B, H, K, V = own.update.shape
    kind = own.transition.among if isinstance(own.transition, Reset) else own.transition.kind
    if algorithm == "auto" and num_blocks is None and transport.scans_only_in_kernels(device):
        algorithm = DEVICE_CHAIN
    if algorithm == DEVICE_CHAIN:
        if num_blocks is not None:
            raise ArgumentError(
                f"num_blocks={num_blocks}, but algorithm={DEVICE_CHAIN!r} cuts states by itself; leave "
                "num_blocks out"
            )
        # Said now, by all ranks alike, and not by the launch.
        transport.device_ring(device).layout_of(own)
        return Plan(DEVICE_CHAIN, 0, transport.nodes)
    plan = choose_plan(
        transport.size,
        (B, H, K, V),
        kind,
        own.update.element_size(),
        algorithm=algorithm,
        num_blocks=num_blocks,
        nodes=transport.nodes,
        fabric=transport.fabric,
        on_device=algorithm == "auto"
        and can_scan_in_kernels(transport, (B, H, K, V), kind, device),
    )
    if plan.algorithm == DEVICE_CHAIN:
        try:
            transport.device_ring(device)
        except UnsupportedError as error:
            _LOGGER.warning("auto takes no scan inside kernels: %s", error)
            return make_plan(transport, own, algorithm, num_blocks)
    return plan


def can_scan_in_kernels(
    transport: Transport, shape: StateShape, kind: str, device: torch.device
) -> bool:
    """Return whether ``auto`` weighs a scan inside kernels; asks no other rank."""
    if transport.nodes is not None and len(transport.nodes) > 1:
        return False
    if transport.size == 1 or transport.why_no_device_scans(device) is not None:
        return False
    if kind != Dense.kind:
        return True
    from zeco.kernels.device.scan import MAX_K

    return shape[2] <= MAX_K
