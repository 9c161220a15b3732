"""A middle rank on one GPU whose neighbours are stand-ins: its own work is real, the wire isn't.

What arrives is zeros, late by what every rank that it has passed would take. So the rank computes what a
lone one does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zeco.benchmarks.device import time_in_turn
from zeco.collectives.device_ring import PRIORITY, DeviceRing, DeviceScan
from zeco.collectives.halo import PURPOSE as HALO
from zeco.collectives.local_rings import LocalRing, LocalRings
from zeco.collectives.stream import StreamTask
from zeco.collectives.transport import TAGS_A_SEQUENCE, Message, Request, Task, Transport
from zeco.core.maps import AffineMap


class _Arriving:
    """A message whose kernels are on a stream already."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    def wait(self) -> None:
        """Make the current stream wait, unless it is the one that keeps the order."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class StandInTransport(Transport):
    """A rank on a GPU without neighbours.

    Args:
        rank: this rank, neither the first nor the last.
        size: of the group it stands for.
        hop_us: that a message takes from a rank to the next.
        cycles_per_us: of the GPU's clock.
    """

    posts_receives_early = False

    def __init__(self, rank: int, size: int, *, hop_us: float, cycles_per_us: float) -> None:
        super().__init__(rank, size)
        self.hop_us = hop_us
        self.hop_cycles = int(hop_us * cycles_per_us)
        self.stream, self.wire = (torch.cuda.Stream(priority=-1) for _ in range(2))
        self.tasks: list[StreamTask[Any]] = []
        self._first_tag = -1
        self._middle: _MiddleRing | None = None

    def exchange(
        self, sends: list[Message], receives: list[Message], purpose: str
    ) -> list[Request]:
        if purpose == HALO:
            # As NCCL does, on a stream beside the layer's.
            self.wire.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.wire):
                for message in receives:
                    self._arrive(message, 1)
            return [_Arriving(self.wire) for _ in (*sends, *receives)]
        for message in receives:
            hops = 1
            if message.tag // TAGS_A_SEQUENCE != self._first_tag:
                # A scan's first block has passed every rank before this one.
                self._first_tag = message.tag // TAGS_A_SEQUENCE
                hops = self.rank if message.peer < self.rank else self.size - 1 - self.rank
            self._arrive(message, hops)
        return [_Arriving(None) for _ in (*sends, *receives)]

    def _arrive(self, message: Message, hops: int) -> None:
        torch.cuda._sleep(hops * self.hop_cycles)  # pyright: ignore[reportPrivateUsage]
        message.tensor.zero_()

    def post(self, sends: list[Message], receives: list[Message]) -> list[Request]:
        return self.exchange(sends, receives, "")

    def submit(self, program: Callable[[], Any]) -> Task[Any]:
        task = StreamTask(program, self.stream)
        if not torch.cuda.is_current_stream_capturing():
            self.tasks = [*(t for t in self.tasks if not t.has_ended()), task]
        return task

    def make_device_ring(self, device: torch.device) -> DeviceRing:
        self._middle = _MiddleRing(self.rank, self.size, self.hop_us, device)
        return self._middle

    def join(self) -> None:
        """Make the current stream wait for the neighbours' kernels, as the end of a graph must."""
        if self._middle is not None:
            self._middle.join()

    def joined(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return a run at whose end the neighbours' kernels are through too: a graph may hold it."""

        def whole() -> object:
            result = run()
            self.join()
            return result

        return whole

    def post_failure(self, number: int, message: str) -> None:
        """Do nothing: nobody waits."""

    def find_failure(self, number: int) -> str | None:
        return None


class _MiddleRing(LocalRing):
    """The middle one of three rings on this GPU.

    What it hears is copied into its inbox by a copy engine, after other copies that take as long as
    the state takes to come so far: no kernel of a neighbour's needs a multiprocessor before the rank's
    own scan has ended. The neighbour that it tells runs its kernel then.
    """

    def __init__(self, rank: int, size: int, hop_us: float, device: torch.device) -> None:
        # A copy engine writes to the inbox, in place of a rank with a GPU of its own.
        three = LocalRings(3, timeout_s=10.0, scope="sys")
        super().__init__(three, 1, device, three.ring(1, device).max_programs)
        three.rings[1] = self
        self.neighbours = three.rings[0], three.rings[2]
        self.wire = torch.cuda.Stream(device, priority=PRIORITY)
        hops = rank, size - 1 - rank
        bytes_per_us = _bytes_per_us(device)
        self._lags = [
            torch.zeros(int(n * hop_us * bytes_per_us), dtype=torch.uint8, pin_memory=True)
            for n in hops
        ]
        self._sink = torch.empty_like(max(self._lags, key=len), device=device)
        self._states: dict[torch.Size, Tensor] = {}
        self._busy: set[torch.cuda.Stream] = set()

    def join(self) -> None:
        """Make the current stream wait for what the last scans have started beside them."""
        for stream in self._busy:
            torch.cuda.current_stream().wait_stream(stream)
        self._busy.clear()

    def scan(
        self,
        own: AffineMap,
        initial: Tensor | None,
        *,
        reverse: bool,
        check: Callable[[], None],
        output_leaving: bool = True,
    ) -> DeviceScan:
        inbox = self._ports_of(self.layout_of(own))[reverse].inbox
        if inbox.shape not in self._states:
            self._states[inbox.shape] = torch.zeros(inbox.shape, dtype=inbox.dtype, pin_memory=True)
        self.wire.wait_stream(torch.cuda.current_stream())
        found = super().scan(
            own, initial, reverse=reverse, check=check, output_leaving=output_leaving
        )
        with torch.cuda.stream(self.wire):
            lag = self._lags[reverse]
            self._sink[: len(lag)].copy_(lag, non_blocking=True)
            inbox.copy_(self._states[inbox.shape], non_blocking=True)
        receiver = self.neighbours[not reverse]
        with torch.cuda.stream(receiver.stream):
            receiver.stream.wait_stream(self.stream)
            nothing = AffineMap(torch.zeros_like(own.update), own.transition)
            receiver.scan(nothing, None, reverse=reverse, check=check, output_leaving=False)
        self._busy |= {self.wire, receiver.stream}
        return found


def measure_cycles_per_us(device: torch.device) -> float:
    """Return how fast a GPU's clock is, by a kernel that spins."""
    cycles = 10_000_000
    sleep = torch.cuda._sleep  # pyright: ignore[reportPrivateUsage]
    times = time_in_turn({"sleep": lambda: sleep(cycles)}, device, 5)["sleep"]
    return cycles / (min(times) * 1e6)


def _bytes_per_us(device: torch.device) -> float:
    """Return how fast copies from pinned memory are."""
    source = torch.zeros(2**26, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    copy = time_in_turn({"copy": lambda: target.copy_(source, non_blocking=True)}, device, 3)
    return len(source) / (min(copy["copy"]) * 1e6)
