"""Scans inside kernels between processes of one host, a GPU each, over CUDA symmetric memory."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from zeco.collectives.device_ring import (
    PROGRAMS,
    DeviceRing,
    has_tensor_cores,
    initialise,
    make_ports,
    memory_size,
    why_no_device_scans,
)
from zeco.core.errors import UnsupportedError
from zeco.core.topology import find_machine

if TYPE_CHECKING:
    from zeco.kernels.device.scan import Ports, ScanLayout

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch's own switch for processes that share a GPU. They take turns, milliseconds long: for tests."""


@dataclass(frozen=True)
class Place:
    """Where a rank's states are.

    Attributes:
        problem: why scans can't run inside kernels there; None if they can.
        host: the host's own number, new at every boot.
        gpu: the GPU's own number.
        multiprocessors: of the GPU.
        tensor_cores: whether it multiplies TF32 numbers.
    """

    problem: str | None
    host: str
    gpu: str
    multiprocessors: int
    tensor_cores: bool = True


def find_place(device: torch.device) -> Place:
    """Return where a rank is."""
    host = find_machine()
    problem = why_no_device_scans(device)
    if device.type != "cuda":
        return Place(problem, host, str(device), 0)
    properties = torch.cuda.get_device_properties(device)
    return Place(
        problem,
        host,
        str(properties.uuid),
        properties.multi_processor_count,
        has_tensor_cores(device),
    )


def why_not_together(places: Sequence[Place]) -> str | None:
    """Return why the ranks at these places can't scan inside kernels; None if they can.

    >>> near, far = Place(None, "a", "0", 132), Place(None, "b", "1", 132)
    >>> why_not_together([near, far])
    "rank 1 is on another host than rank 0; use algorithm='auto', which takes what crosses hosts"
    """
    for rank, place in enumerate(places):
        if place.problem is not None:
            return f"on rank {rank}, {place.problem}"
        if place.host != places[0].host:
            return (
                f"rank {rank} is on another host than rank 0; use algorithm='auto', which takes what "
                "crosses hosts"
            )
        for other in range(rank):
            if places[other].gpu == place.gpu and os.environ.get(SHARED_GPU) != "1":
                return f"ranks {other} and {rank} share a GPU; run one process a GPU"
    return None


def gather_places(group: dist.ProcessGroup, device: torch.device) -> list[Place]:
    """Return where all ranks are; every rank calls this."""
    places: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(places, find_place(device), group=group)
    return places


def find_why_not_together(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why the ranks can't scan inside kernels, as far as that shows before they try."""
    return why_not_together(gather_places(group, device))


class SymmetricRing(DeviceRing):
    """One process's end of scans inside kernels.

    All ranks make it together, and its mailboxes too.

    Args:
        group: the processes.
        device: this process's GPU.
        timeout_s: how long a kernel waits for the others.

    Raises:
        UnsupportedError: the ranks aren't on GPUs of one host that reach each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, timeout_s: float) -> None:
        places = gather_places(group, device)
        size = len(places)
        reason = why_not_together(places)
        if reason is not None:
            raise UnsupportedError(f"scans can't run inside kernels here: {reason}")
        fewest = min(place.multiprocessors for place in places)
        super().__init__(
            dist.get_rank(group),
            size,
            device,
            max_programs=min(PROGRAMS, fewest // 2),
            tensor_cores=all(place.tensor_cores for place in places),
            scope="sys",
            timeout_s=timeout_s,
        )
        self._group = group
        # The mappings of the others' memory end with these.
        self._handles: list[Any] = []
        problems: list[Any] = [None] * size
        dist.all_gather_object(problems, self._try_to_share(), group=group)
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise UnsupportedError(
                    f"scans can't run inside kernels here: on rank {rank}, {problem}"
                )

    def open_ports(self, layout: ScanLayout) -> tuple[Ports, Ports]:
        own, handle = self._share(torch.Size([memory_size(layout)]))
        initialise(own, layout)
        # No rank may be sent anything before its inboxes are empty.
        handle.barrier()
        before, after = (
            handle.get_buffer((self.rank + step) % self.size, own.shape, own.dtype)
            for step in (-1, 1)
        )
        return make_ports(layout, own, before, after, self.broken)

    def _try_to_share(self) -> str | None:
        """Return why this rank can't share its memory; None if it can."""
        try:
            self._share(torch.Size([1]))
        except UnsupportedError as error:
            return str(error)
        return None

    def _share(self, size: torch.Size) -> tuple[Tensor, Any]:
        """Return int64 memory of this rank, and what reaches that of the others."""
        own = symmetric_memory.empty(size, dtype=torch.int64, device=self.device)
        try:
            with _without_multicast():
                handle = symmetric_memory.rendezvous(own, self._group)
        except RuntimeError as error:
            raise UnsupportedError(
                f"the GPUs of this group can't map each other's memory ({error}); check peer access "
                "with nvidia-smi topo -p2p r, or use algorithm='chain'"
            ) from error
        self._handles.append(handle)
        return own, handle


@contextmanager
def _without_multicast() -> Generator[None]:
    """Keep torch from setting up multicast objects, which these scans have no use for."""
    chosen = os.environ.get(NO_MULTICAST)
    os.environ[NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if chosen is None:
            del os.environ[NO_MULTICAST]
        else:
            os.environ[NO_MULTICAST] = chosen
