"""What a scan needs of the network: tagged messages between ranks, and something to drive it.

Peers are always ranks of the *group*, so groups whose processes aren't contiguous work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeco.collectives.ledger import Ledger
from zeco.core.costs import LOOPBACK, Fabric
from zeco.core.errors import GroupError, RankFailedError, UnsupportedError
from zeco.core.maps import AffineMap

if TYPE_CHECKING:
    from zeco.collectives.device_ring import DeviceRing

ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)

MAX_SEQUENCES = 1 << 15
TAGS_A_SEQUENCE = 1 << 15


@dataclass(frozen=True, eq=False)
class Message:
    """A contiguous tensor for, or a buffer for one from, a peer."""

    tensor: Tensor
    peer: int
    tag: int


class Request(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Block until the message is out of, or in, its buffer."""
        ...


class Task(Protocol[ResultT_co]):
    """A program under way."""

    def wait(self) -> ResultT_co:
        """Block until the program has ended; return its result or raise its error."""
        ...


def wait_all(requests: list[Request]) -> None:
    """Block until all messages are through."""
    for request in requests:
        request.wait()


class Ended(Generic[ResultT]):
    """A program that has run already, in its caller's thread."""

    def __init__(self, result: ResultT) -> None:
        self._result = result

    def wait(self) -> ResultT:
        """Return its result."""
        return self._result


class Transport(ABC):
    """One rank's end of a group.

    Args:
        rank: this rank in the group.
        size: ranks in the group.
    """

    fabric: Fabric = LOOPBACK
    """What messages cost here, for the choice of scan."""

    nodes: tuple[int, ...] | None = None
    """Ranks of every node, in the order of the ranks, for scans of two levels; None: one node."""

    posts_receives_early = True
    """Whether receives may be posted long before their sends, in any order."""

    home = torch.device("cpu")
    """Where the tensors are that messages carry; of several such places, the fastest."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.ledger = Ledger()
        self.broken: str | None = None
        self._sequence = 0
        self._failures = 0
        self._ring: DeviceRing | None = None
        self._why_no_ring: str | None = None

    @abstractmethod
    def post(self, sends: list[Message], receives: list[Message]) -> list[Request]:
        """Start messages together; what is sent must stay as it is until its request ends."""

    @abstractmethod
    def submit(self, program: Callable[[], ResultT]) -> Task[ResultT]:
        """Run a program of messages while the caller goes on; programs run in order."""

    def check_tensor(self, tensor: Tensor) -> None:  # noqa: B027 (most carry everything)
        """Refuse a tensor that this transport can't carry."""

    def why_no_device_scans(self, device: torch.device) -> str | None:
        """Return why scans can't run inside kernels on a device; None if nothing is known against it.

        No other rank is asked, so that a single rank may; all ranks get the same answer.
        """
        return self._why_no_ring or f"{type(self).__name__} has no scans inside kernels"

    def scans_only_in_kernels(self, device: torch.device) -> bool:
        """Return whether states on a device can be scanned, but no message carries them."""
        return False

    def exchange(
        self, sends: list[Message], receives: list[Message], purpose: str
    ) -> list[Request]:
        """Start messages together, those sent put into the ledger under their purpose."""
        for message in sends:
            num_bytes = message.tensor.numel() * message.tensor.element_size()
            self.ledger.count_sent(purpose, num_bytes)
        return self.post(sends, receives)

    def all_gather(self, tensor: Tensor, tag: int, purpose: str) -> list[Tensor]:
        """Return every rank's tensor, this one's included, in the order of the ranks.

        Messages with tags, not the group's own all-gather: a thread may drive this while the main
        thread runs collectives, and these have no tags that would keep them apart.
        """
        found = [
            tensor if peer == self.rank else tensor.new_empty(tensor.shape)
            for peer in range(self.size)
        ]
        # Each rank's own next ones first, so that they don't all crowd one.
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        sends = [Message(tensor, peer, tag) for peer in others]
        receives = [Message(found[peer], peer, tag) for peer in others]
        wait_all(self.exchange(sends, receives, purpose))
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, added up in the order of the ranks."""
        found = self.all_gather(tensor.contiguous(), self.next_tags(), "reduce")
        return torch.stack(found).sum(0)

    def as_group(self) -> dist.ProcessGroup | Transport | None:
        """Return what stands for this group in calls that take one."""
        return self

    def device_ring(self, device: torch.device) -> DeviceRing:
        """Return what scans inside kernels on a device; all ranks ask at the same point.

        Args:
            device: of this rank's states, the same at every call.

        Raises:
            UnsupportedError: why this group can't, with the remedy.
        """
        if self._why_no_ring is not None:
            raise UnsupportedError(self._why_no_ring)
        if self._ring is None:
            try:
                self._ring = self.make_device_ring(device)
            except UnsupportedError as error:
                self._why_no_ring = str(error)
                raise
        return self._ring

    def make_device_ring(self, device: torch.device) -> DeviceRing:
        """Make what `device_ring` returns."""
        raise UnsupportedError(str(self.why_no_device_scans(device)))

    def start_device_scan(
        self, own: AffineMap, initial: Tensor | None, *, reverse: bool, output_leaving: bool
    ) -> Task[tuple[Tensor, Tensor | None]]:
        """Start a scan inside kernels; see `zeco.collectives.scan.start_scan`."""
        ring = self.device_ring(own.update.device)
        return ring.scan(
            own,
            initial,
            reverse=reverse,
            check=self.check_device_scans,
            output_leaving=output_leaving,
        )

    def check_device_scans(self) -> None:
        """Raise if a scan inside a kernel was found to have failed, without waiting for any."""
        message = None if self._ring is None else self._ring.find_failure()
        if message is not None:
            self.broken = message
            raise RankFailedError(message)

    def next_tags(self) -> int:
        """Return the first tag of a new range; every rank of the group asks in the same order."""
        self.check_device_scans()
        if self.broken is not None:
            raise GroupError(f"this group can't be used any more: {self.broken}; make a new one")
        self._sequence = (self._sequence + 1) % MAX_SEQUENCES
        return self._sequence * TAGS_A_SEQUENCE

    def report_failure(self, error: BaseException) -> None:
        """Tell the ranks that may be waiting for this one that it won't come.

        Every failure has a number, and all ranks count them alike: where all ranks raise, nobody
        looks the report up, and the next failure has the next number.
        """
        if getattr(error, "_zeco_reported", False) or self.size == 1:
            return
        error._zeco_reported = True  # type: ignore[attr-defined]
        if not isinstance(error, RankFailedError):
            self.post_failure(self._failures, f"{type(error).__name__}: {error}")
        self._failures += 1

    def look_for_failure(self) -> None:
        """Raise when another rank has reported that it failed."""
        message = self.find_failure(self._failures)
        if message is not None:
            self.broken = message
            raise RankFailedError(f"rank {self.rank} stopped waiting: {message}")

    @abstractmethod
    def post_failure(self, number: int, message: str) -> None:
        """Leave a message that the other ranks find with `find_failure`."""

    @abstractmethod
    def find_failure(self, number: int) -> str | None:
        """Return the message left under a number, if there is one, without waiting."""
