"""Scans inside CUDA kernels: the memory of their mailboxes, their stream, what went wrong in them.

A ring belongs to one rank. For every layout of states it holds mailboxes in both directions of travel,
allocated once, by all ranks; then a scan is one launch a rank on a stream of high priority, and neither
the host nor the caller's stream waits before the results are asked for. What the kernels do is in
`zeco.kernels.device.scan`.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeco.collectives.stream import StreamTask
from zeco.core.errors import ArgumentError, UnsupportedError
from zeco.core.maps import AffineMap
from zeco.core.transitions import Reset

if TYPE_CHECKING:
    from zeco.kernels.device.scan import Ports, ScanLayout

States = tuple[Tensor, Tensor | None]
"""What enters and what leaves a rank; None where the rank didn't ask for the latter."""

Mailbox = tuple[Tensor, Tensor]
"""An inbox, and where its sender reads that there is room again."""

PROGRAMS = 32
"""The most thread blocks of a scan. They take as many multiprocessors from whatever runs beside them,
but half as many would take them for nearly twice as long."""

PRIORITY = -1
"""Of the scans' stream, above that of what computes."""

ALIGNMENT = 16
"""Bytes, of what the kernels are given pointers to."""

MIN_CAPABILITY = (7, 0)
"""Compute capability from which loads and stores of system scope exist."""


def has_tensor_cores(device: torch.device) -> bool:
    """Return whether a GPU multiplies TF32 numbers, from compute capability 8.0 on."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def why_no_device_scans(device: torch.device) -> str | None:
    """Return why scans can't run inside kernels on a device, with the remedy; None if they can."""
    if device.type != "cuda":
        return f"the states are on {device}; move them to a CUDA device"
    if not torch.cuda.is_available():
        return "this process sees no CUDA device; start it where it does"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is missing; install zeco-sp[gpu]"
    found = torch.cuda.get_device_capability(device)
    if found < MIN_CAPABILITY:
        return f"{device} has compute capability {found}, below {MIN_CAPABILITY}; use a newer GPU"
    return None


class DeviceScan:
    """A scan under way on the GPU.

    Args:
        task: the launch.
        check: raises if a scan of the ring has failed.
        forget: called with the task once it is waited for.
    """

    def __init__(
        self,
        task: StreamTask[States],
        check: Callable[[], None],
        forget: Callable[[StreamTask[States]], None],
    ) -> None:
        self._task = task
        self._check = check
        self._forget = forget

    def wait(self) -> States:
        """Make the current stream wait for (entering, leaving) [B, H, K, V] and return them.

        The latter is None where the rank didn't ask for it.

        Raises:
            RankFailedError: a scan was found to have failed; one that fails later makes its states
                NaN, and the next look at the ring raises.
        """
        self._check()
        states = self._task.wait()
        self._forget(self._task)
        return states


class DeviceRing(ABC):
    """One rank's end of scans inside kernels.

    Args:
        rank: in the group.
        size: ranks in the group.
        device: of the states.
        max_programs: thread blocks that a scan may have; the same on every rank.
        tensor_cores: whether the GPUs multiply TF32 numbers; the same on every rank.
        scope: of what kernels write to each other, the same on every rank; see `ScanLayout`.
        timeout_s: how long a kernel waits for the others.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        *,
        max_programs: int,
        tensor_cores: bool,
        scope: str,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.max_programs = max_programs
        self.tensor_cores = tensor_cores
        self.scope = scope
        self.timeout_s = timeout_s
        self.stream = torch.cuda.Stream(device, priority=PRIORITY)
        # Not 0 once a scan has failed: none waits after that, whatever its layout.
        self.broken = torch.zeros(1, dtype=torch.int64, device=device)
        self._ports: dict[ScanLayout, tuple[Ports, Ports]] = {}
        self._flying: list[StreamTask[States]] = []

    @abstractmethod
    def open_ports(self, layout: ScanLayout) -> tuple[Ports, Ports]:
        """Return the rank's ports of a layout, forward and reverse, ready to be sent to."""

    def check_stream(self) -> None:  # noqa: B027 (most have nothing to say)
        """Refuse a current stream from which a scan would wait for ever."""

    def layout_of(self, own: AffineMap) -> ScanLayout:
        """Return how states of a map's kind, shape and dtype are cut.

        Raises:
            UnsupportedError: the kernels don't take this kind at this shape.
        """
        from zeco.kernels.device.scan import make_layout

        transition = own.transition
        kind = transition.among if isinstance(transition, Reset) else transition.kind
        B, H, K, V = own.update.shape
        return make_layout(
            (B, H, K, V),
            own.update.dtype,
            kind,
            max_programs=self.max_programs,
            scope=self.scope,
            tensor_cores=self.tensor_cores,
        )

    def scan(
        self,
        own: AffineMap,
        initial: Tensor | None,
        *,
        reverse: bool,
        check: Callable[[], None],
        output_leaving: bool = True,
    ) -> DeviceScan:
        """Start a scan; see `zeco.collectives.scan.start_scan`.

        Args:
            own: this rank's map, in the direction of travel.
            initial: the state that enters the first rank in that direction.
            reverse: whether the state travels from the last rank to the first.
            check: raises if a scan of this ring has failed.
            output_leaving: whether this rank's leaving state is written; ranks needn't agree.
        """
        from zeco.kernels.device.scan import Role, launch_scan

        if own.update.device != self.device:
            raise ArgumentError(
                f"this group's scans run on {self.device}, but the states are on "
                f"{own.update.device}; keep a rank's states on one device"
            )
        check()
        self.check_stream()
        layout = self.layout_of(own)
        ports = self._ports_of(layout)[reverse]
        start, end = (self.size - 1, 0) if reverse else (0, self.size - 1)
        role = Role(self.rank, first=self.rank == start, last=self.rank == end)
        update = _laid_out(own.update)
        parameters = tuple(_laid_out(p) for p in own.transition.parameters)
        transition = own.transition.with_parameters(parameters)
        given = _laid_out(initial) if initial is not None and role.first else None
        entering = torch.empty_like(update)
        leaving = torch.empty_like(update) if output_leaving else None

        def program() -> States:
            launch_scan(
                layout,
                ports,
                role,
                update,
                transition,
                given,
                timeout_s=self.timeout_s,
                entering=entering,
                leaving=leaving,
            )
            return entering, leaving

        task = StreamTask(program, self.stream)
        self._keep(task)
        return DeviceScan(task, check, self._forget)

    def find_failure(self) -> str | None:
        """Return what a kernel has found wrong, if one has, without waiting for any."""
        from zeco.kernels.device.scan import read_status

        for layout, pair in self._ports.items():
            for ports, direction in zip(pair, ("forward", "reverse"), strict=True):
                loss = read_status(ports.status)
                if loss is not None:
                    return (
                        f"rank {loss.rank} gave up in device scan {loss.scan} of {layout.kind} "
                        f"states {list(layout.shape)}, {direction}, at block {loss.block}: "
                        f"{loss.cause}; states from there on are NaN"
                    )
        return None

    def _ports_of(self, layout: ScanLayout) -> tuple[Ports, Ports]:
        """Return the rank's ports, forward and reverse, made at the first call."""
        if layout not in self._ports:
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError(
                    f"a scan of {layout.kind} states {list(layout.shape)} needs its mailboxes before "
                    "a CUDA graph is captured; run it once before"
                )
            self._ports[layout] = self.open_ports(layout)
        return self._ports[layout]

    def _keep(self, task: StreamTask[States]) -> None:
        """Hold what a launch reads until it has ended, or somebody has waited for it."""
        if torch.cuda.is_current_stream_capturing():
            return
        self._flying = [t for t in self._flying if not t.has_ended()]
        self._flying.append(task)

    def _forget(self, task: StreamTask[States]) -> None:
        self._flying = [t for t in self._flying if t is not task]


def _laid_out(x: Tensor) -> Tensor:
    """Return a tensor as the kernels take it: contiguous, from a multiple of 16 bytes on.

    Elsewhere they would be compiled again, on one GPU while other ranks wait for this one.
    """
    x = x.detach().contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def memory_size(layout: ScanLayout) -> int:
    """Return how many int64 the mailboxes of a rank take, both directions."""
    inbox = layout.inbox_elements * layout.dtype.itemsize // 8
    return 2 * (inbox + _room_size(layout))


def _room_size(layout: ScanLayout) -> int:
    return layout.programs + layout.programs % (ALIGNMENT // 8)


def split_memory(memory: Tensor, layout: ScanLayout) -> tuple[Mailbox, Mailbox]:
    """Return a rank's mailboxes, forward and reverse, as views of its memory."""
    forward, reverse = (
        (half[: -_room_size(layout)].view(layout.bits), half[-_room_size(layout) :])
        for half in memory.chunk(2)
    )
    return forward, reverse


def initialise(memory: Tensor, layout: ScanLayout) -> None:
    """Make all inboxes empty."""
    for inbox, room in split_memory(memory, layout):
        inbox.fill_(-1)
        room.zero_()


def make_ports(
    layout: ScanLayout, own: Tensor, before: Tensor, after: Tensor, broken: Tensor
) -> tuple[Ports, Ports]:
    """Put a rank's ports together, forward and reverse.

    Args:
        layout: of the scans.
        own: the rank's memory.
        before: that of the rank before it, counted round.
        after: that of the rank after it.
        broken: the rank's own mark that a scan has failed.
    """
    from zeco.kernels.device.scan import Ports

    mine, lower, upper = (split_memory(memory, layout) for memory in (own, before, after))
    epochs = torch.zeros(2, _room_size(layout), dtype=torch.int64, device=own.device)

    def ports(way: int, sender: Mailbox, receiver: Mailbox) -> Ports:
        return Ports(
            inbox=mine[way][0],
            outbox=receiver[0],
            room=mine[way][1],
            room_before=sender[1],
            epochs=epochs[way],
            status=torch.zeros(1, dtype=torch.int64, pin_memory=own.is_cuda),
            broken=broken,
        )

    return ports(0, lower[0], upper[0]), ports(1, upper[1], lower[1])
