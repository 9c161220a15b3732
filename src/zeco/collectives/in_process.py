"""Ranks that are threads of one process: for tests, documentation and debugging."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from zeco.collectives.device_ring import why_no_device_scans
from zeco.collectives.local_rings import LocalRing, LocalRings
from zeco.collectives.transport import Message, Request, Task, Transport
from zeco.collectives.worker import Worker, WorkerTask
from zeco.core.errors import ArgumentError, RankFailedError, UnsupportedError

ResultT = TypeVar("ResultT")
Address = tuple[int, int, int]


class InProcessWorld:
    """The mailboxes of a group of threads.

    Args:
        size: ranks in the group.
        timeout_s: how long a receive, or a scan inside a kernel, waits before it gives up.
    """

    def __init__(self, size: int, *, timeout_s: float = 60.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.mail: dict[Address, deque[Tensor]] = {}
        self.failures: dict[int, str] = {}
        self.aborted: str | None = None
        self.rings = LocalRings(size, timeout_s=timeout_s)
        self._transports = [InProcessTransport(self, rank) for rank in range(size)]

    def transport(self, rank: int) -> InProcessTransport:
        """Return a rank's end of the group."""
        return self._transports[rank]

    def abort(self, message: str) -> None:
        """Make every receive that waits, now or later, raise."""
        with self.changed:
            self.aborted = self.aborted or message
            self.changed.notify_all()


class _Sent:
    """A message that is out: it was copied into the mailbox."""

    def wait(self) -> None:
        """Return at once."""


class _Receiving:
    """A message that is awaited."""

    def __init__(self, world: InProcessWorld, tensor: Tensor, address: Address) -> None:
        self._world = world
        self._tensor = tensor
        self._address = address

    def wait(self) -> None:
        """Block until the message is in its buffer."""
        world, box = self._world, self._address
        with world.changed:
            arrived = world.changed.wait_for(
                lambda: world.mail.get(box) or world.aborted, timeout=world.timeout_s
            )
            if world.aborted is not None:
                raise RankFailedError(f"rank {box[1]} stopped waiting: {world.aborted}")
            if not arrived:
                raise RankFailedError(
                    f"rank {box[1]} waited {world.timeout_s:g} s for rank {box[0]}, message tag "
                    f"{box[2]}"
                )
            message = world.mail[box].popleft()
            if not world.mail[box]:
                del world.mail[box]
        if message.shape != self._tensor.shape or message.dtype != self._tensor.dtype:
            raise RankFailedError(
                f"rank {box[1]} expected {list(self._tensor.shape)} {self._tensor.dtype} from "
                f"rank {box[0]}, but got {list(message.shape)} {message.dtype}"
            )
        self._tensor.copy_(message)


class InProcessTransport(Transport):
    """A thread's end of an `InProcessWorld`."""

    def __init__(self, world: InProcessWorld, rank: int) -> None:
        super().__init__(rank, world.size)
        self.world = world
        self._worker = Worker(f"zeco-scan-{rank}")

    def check_tensor(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            raise ArgumentError(
                f"in-process ranks exchange CPU tensors, got one on {tensor.device}; move it, use a "
                "process group, or scan with algorithm='device_chain'"
            )

    def why_no_device_scans(self, device: torch.device) -> str | None:
        return self._why_no_ring or why_no_device_scans(device)

    def scans_only_in_kernels(self, device: torch.device) -> bool:
        return device.type == "cuda" and self.why_no_device_scans(device) is None

    def make_device_ring(self, device: torch.device) -> LocalRing:
        reason = why_no_device_scans(device)
        if reason is not None:
            raise UnsupportedError(f"scans can't run inside kernels here: {reason}")
        return self.world.rings.ring(self.rank, device)

    def post(self, sends: list[Message], receives: list[Message]) -> list[Request]:
        world = self.world
        with world.changed:
            for message in sends:
                box = world.mail.setdefault((self.rank, message.peer, message.tag), deque())
                box.append(message.tensor.detach().clone())
            world.changed.notify_all()
        awaited = [_Receiving(world, m.tensor, (m.peer, self.rank, m.tag)) for m in receives]
        return [*(_Sent() for _ in sends), *awaited]

    def submit(self, program: Callable[[], ResultT]) -> Task[ResultT]:
        return self._worker.submit(WorkerTask(program, self))

    def close(self) -> None:
        """End the thread that drives the scans."""
        self._worker.stop()

    def post_failure(self, number: int, message: str) -> None:
        with self.world.changed:
            self.world.failures.setdefault(number, f"rank {self.rank} raised {message}")

    def find_failure(self, number: int) -> str | None:
        return self.world.failures.get(number)
