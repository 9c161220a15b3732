"""The transport over `torch.distributed`: gloo for CPU tensors, NCCL for CUDA tensors.

With gloo a worker thread drives the schedule. Messages carry tags, so they never get mixed up with
the collectives that the main thread may run on the same group. With NCCL everything is put on a side
stream and the host never waits, so that CUDA graphs capture it, once the ranks have exchanged the like
before: NCCL makes its connections at the first message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from zeco.collectives.device_ring import why_no_device_scans
from zeco.collectives.stream import StreamTask
from zeco.collectives.symmetric_ring import SymmetricRing, find_why_not_together
from zeco.collectives.transport import Message, Request, Task, Transport
from zeco.collectives.worker import Worker, WorkerTask
from zeco.core.costs import NVLINK_BY_NCCL
from zeco.core.errors import ArgumentError, GroupError, RankFailedError

ResultT = TypeVar("ResultT")


class _Work:
    """A message of the process group, whose errors say who waited for whom."""

    def __init__(self, work: dist.Work | None, what: str) -> None:
        self._work = work
        self._what = what

    def wait(self) -> None:
        """Block until the message is through (with NCCL: make the current stream wait for it)."""
        if self._work is None:
            raise GroupError(f"{self._what}: this process isn't in the group")
        try:
            self._work.wait()
        except RuntimeError as error:
            raise RankFailedError(f"{self._what}: {error}") from error


class ProcessGroupTransport(Transport):
    """One process's end of a process group.

    Args:
        group: the group; this process must be in it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        rank = dist.get_rank(group)
        if rank < 0:
            raise GroupError(
                f"process {dist.get_rank()} isn't in the group of processes "
                f"{dist.get_process_group_ranks(group)}; use a group that it is in"
            )
        super().__init__(rank, dist.get_world_size(group))
        self.group = group
        self._worker = Worker(f"zeco-scan-{rank}")
        self._store = c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        self._name = f"zeco/failed/{group.group_name}"
        self._stream: torch.cuda.Stream | None = None
        self._flying: list[StreamTask[Any]] = []
        self._why_apart: str | None = "its messages don't go from GPU to GPU; make it with NCCL"
        backend = dist.get_backend(group)
        self._carries_cuda = "nccl" in backend
        self._carries_cpu = "gloo" in backend or "mpi" in backend
        self.posts_receives_early = not self._carries_cuda
        if self._carries_cuda:
            self.fabric = NVLINK_BY_NCCL
            self.home = device = torch.device("cuda", torch.cuda.current_device())
            # A first message between two ranks alone would wait for a communicator that needs all.
            dist.barrier(group, device_ids=[device.index])
            self._why_apart = find_why_not_together(group, device)

    def check_tensor(self, tensor: Tensor) -> None:
        cuda = tensor.device.type == "cuda"
        if not (self._carries_cuda if cuda else self._carries_cpu):
            raise ArgumentError(
                f"a group with backend {dist.get_backend(self.group)!r} can't send a tensor on "
                f"{tensor.device}; "
                + ("make it with backend='nccl'" if cuda else "make it with backend='gloo'")
            )

    def post(self, sends: list[Message], receives: list[Message]) -> list[Request]:
        names = [f"rank {self.rank} sent to rank {m.peer}" for m in sends]
        names += [f"rank {self.rank} waited for rank {m.peer}" for m in receives]
        if self._carries_cuda:
            works = self._post_batch(sends, receives)
        else:
            arriving = [
                dist.irecv(m.tensor, group=self.group, group_src=m.peer, tag=m.tag)
                for m in receives
            ]
            works = [
                dist.isend(m.tensor, group=self.group, group_dst=m.peer, tag=m.tag) for m in sends
            ]
            works += arriving
        return [_Work(work, name) for work, name in zip(works, names, strict=True)]

    def _post_batch(self, sends: list[Message], receives: list[Message]) -> list[dist.Work | None]:
        """Post as one grouped NCCL call on the group's own communicator."""
        operations = [
            dist.P2POp(dist.isend, m.tensor, group=self.group, group_peer=m.peer) for m in sends
        ] + [
            dist.P2POp(dist.irecv, m.tensor, group=self.group, group_peer=m.peer) for m in receives
        ]
        if not operations:
            return []
        works = dist.batch_isend_irecv(operations)
        # NCCL coalesces the batch into one work, on which every message waits.
        return [works[min(i, len(works) - 1)] for i in range(len(operations))]

    def all_gather(self, tensor: Tensor, tag: int, purpose: str) -> list[Tensor]:
        if not self._carries_cuda:
            return super().all_gather(tensor, tag, purpose)
        num_bytes = tensor.numel() * tensor.element_size()
        self.ledger.count_sent(purpose, num_bytes * (self.size - 1), self.size - 1)
        found = list(tensor.new_empty(self.size, *tensor.shape))
        dist.all_gather(found, tensor, group=self.group)
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.check_device_scans()
        self.check_tensor(tensor)
        total = tensor.clone()
        self.ledger.count_sent("reduce", total.numel() * total.element_size())
        dist.all_reduce(total, group=self.group)
        return total

    def why_no_device_scans(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return why_no_device_scans(device)
        return self._why_no_ring or self._why_apart

    def make_device_ring(self, device: torch.device) -> SymmetricRing:
        return SymmetricRing(self.group, device, timeout_s=self._timeout_s(device))

    def _timeout_s(self, device: torch.device) -> float:
        """Return how long the group's own operations wait."""
        backend = self.group._get_backend(device)  # pyright: ignore[reportPrivateUsage]
        return backend.options._timeout.total_seconds()  # pyright: ignore

    def as_group(self) -> dist.ProcessGroup:
        return self.group

    def submit(self, program: Callable[[], ResultT]) -> Task[ResultT]:
        if not self._carries_cuda:
            return self._worker.submit(WorkerTask(program, self))
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)
        task = StreamTask(program, self._stream)
        if torch.cuda.is_current_stream_capturing():
            # Nothing may be asked of the GPU then. Nor need be: a graph refuses a scan that isn't
            # waited for, and until then the caller holds the task.
            return task
        # Not every scan is waited for. What it reads was allocated on another stream, which would
        # use the memory again as soon as nobody here holds it.
        self._flying = [t for t in self._flying if not t.has_ended()]
        self._flying.append(task)
        return task

    def post_failure(self, number: int, message: str) -> None:
        self._store.set(f"{self._name}/{number}", f"rank {self.rank} raised {message}")

    def find_failure(self, number: int) -> str | None:
        key = f"{self._name}/{number}"
        return self._store.get(key).decode() if self._store.check([key]) else None
