"""Scans inside kernels between ranks that are threads of this process, on one GPU."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from zeco.collectives.device_ring import (
    PROGRAMS,
    DeviceRing,
    has_tensor_cores,
    initialise,
    make_ports,
    memory_size,
)
from zeco.core.errors import ArgumentError, UnsupportedError
from zeco.core.transitions import Reset

if TYPE_CHECKING:
    from zeco.kernels.device.scan import Ports, ScanLayout

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The environment variable that says how many streams CUDA serves independently; 8 by default."""


def programs_that_fit(num_ranks: int, multiprocessors: int, connections: int) -> int:
    """Return how many thread blocks each rank of one GPU may have, at least one.

    All thread blocks of all ranks must run at the same time: they wait for each other. One is counted
    a multiprocessor; where ranks share the GPU, a quarter of these stays free, so that a kernel that
    one rank still has to run always finds room beside the scans of the others.

    Args:
        num_ranks: ranks on this GPU.
        multiprocessors: of the GPU.
        connections: streams that the GPU serves independently.

    Raises:
        UnsupportedError: too many ranks, for the multiprocessors or the streams.

    >>> programs_that_fit(8, 132, 32)
    12
    """
    usable = multiprocessors // 2 if num_ranks == 1 else multiprocessors * 3 // 4
    if num_ranks > usable:
        raise UnsupportedError(
            f"{num_ranks} ranks share a GPU, but at most {usable} ranks' scans fit on its "
            f"{multiprocessors} multiprocessors at once; use fewer ranks"
        )
    if num_ranks > 1 and 2 * num_ranks > connections:
        raise UnsupportedError(
            f"{num_ranks} ranks share a GPU and take {2 * num_ranks} streams, of which it serves "
            f"{connections} independently: at most {connections // 2} ranks fit; set {CONNECTIONS} "
            "(up to 32) before the process first uses CUDA, or use fewer ranks"
        )
    return min(PROGRAMS, usable // num_ranks)


class LocalRings:
    """The mailboxes of ranks that are threads of this process, on one GPU.

    Whoever comes first makes them for all, so that no rank ever waits for another on the host: the
    backward of everything on a GPU runs in one thread.

    Args:
        size: ranks.
        timeout_s: how long a kernel waits for the others.
        scope: of what kernels write to each other; "sys" if anything else writes to the inboxes.
    """

    def __init__(self, size: int, *, timeout_s: float, scope: str = "gpu") -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.scope = scope
        self.rings: list[LocalRing] = []
        self.ports: dict[ScanLayout, list[tuple[Ports, Ports]]] = {}
        self.callers: dict[int, int] = {}
        self._lock = threading.Lock()

    def ring(self, rank: int, device: torch.device) -> LocalRing:
        """Return a rank's ring.

        Raises:
            UnsupportedError: ranks on several devices, or more than fit on one.
        """
        with self._lock:
            if not self.rings:
                properties = torch.cuda.get_device_properties(device)
                connections = int(os.environ.get(CONNECTIONS, "8"))
                programs = programs_that_fit(
                    self.size, properties.multi_processor_count, connections
                )
                self.rings = [LocalRing(self, r, device, programs) for r in range(self.size)]
                # What they hold is read from streams that know nothing of this one.
                torch.cuda.current_stream(device).synchronize()
        ring = self.rings[rank]
        if ring.device != device:
            raise UnsupportedError(
                f"ranks of one process scan on one GPU, {ring.device}, but rank {rank} has states on "
                f"{device}; run one process a GPU"
            )
        return ring

    def ports_of(self, layout: ScanLayout, rank: int) -> tuple[Ports, Ports]:
        """Return a rank's ports for a layout; the first caller makes everyone's."""
        if layout not in self.ports:
            with self._lock:
                if layout not in self.ports:
                    self.ports[layout] = self._make(layout)
        return self.ports[layout][rank]

    def _make(self, layout: ScanLayout) -> list[tuple[Ports, Ports]]:
        """Make everyone's ports and load the kernel, while no kernel waits for another yet.

        Allocating pinned memory or loading a kernel may wait for all kernels that run.
        """
        size, device = memory_size(layout), self.rings[0].device
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            memory = [torch.empty(size, dtype=torch.int64, device=device) for _ in self.rings]
            for own in memory:
                initialise(own, layout)
            ports = [
                make_ports(
                    layout, memory[r], memory[r - 1], memory[(r + 1) % self.size], ring.broken
                )
                for r, ring in enumerate(self.rings)
            ]
            _load_kernel(layout, ports[0][0], device, self.timeout_s)
        # Every rank may launch at once from here on, on streams that know nothing of this one.
        stream.synchronize()
        return ports


def _load_kernel(layout: ScanLayout, ports: Ports, device: torch.device, timeout_s: float) -> None:
    """Run a layout's kernel alone, and leave no trace of that in the ports."""
    from zeco.kernels.device.scan import Role, launch_scan

    state = torch.zeros(layout.shape, dtype=layout.dtype, device=device)
    launch_scan(
        layout,
        replace(ports, epochs=torch.zeros_like(ports.epochs)),
        Role(0, first=True, last=True),
        state,
        Reset(layout.kind),
        None,
        timeout_s=timeout_s,
        entering=torch.empty_like(state),
        leaving=None,
    )


class LocalRing(DeviceRing):
    """A thread's end of `LocalRings`."""

    def __init__(
        self, rings: LocalRings, rank: int, device: torch.device, max_programs: int
    ) -> None:
        super().__init__(
            rank,
            rings.size,
            device,
            max_programs=max_programs,
            tensor_cores=has_tensor_cores(device),
            scope=rings.scope,
            timeout_s=rings.timeout_s,
        )
        self._rings = rings

    def open_ports(self, layout: ScanLayout) -> tuple[Ports, Ports]:
        return self._rings.ports_of(layout, self.rank)

    def check_stream(self) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        other = self._rings.callers.setdefault(stream, self.rank)
        if other != self.rank:
            raise ArgumentError(
                f"ranks {other} and {self.rank} both use CUDA stream {stream:#x}, so one would wait "
                "for what the other has yet to run; give each rank a stream of its own, with "
                "torch.cuda.stream(torch.cuda.Stream())"
            )
