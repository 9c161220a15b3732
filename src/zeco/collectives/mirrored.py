"""A group seen from its other end: rank r is rank P - 1 - r, over the same messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from zeco.collectives.transport import Message, Request, Task, Transport
from zeco.core.maps import AffineMap

if TYPE_CHECKING:
    from zeco.collectives.device_ring import DeviceRing

ResultT = TypeVar("ResultT")


class MirroredTransport(Transport):
    """A rank's end of a group whose ranks are counted from the last one.

    Tags, ledger and failures are those of the group, so calls on both may be mixed as long as all
    ranks make them in the same order.

    Args:
        base: this rank's end of the group.
    """

    def __init__(self, base: Transport) -> None:
        super().__init__(base.size - 1 - base.rank, base.size)
        self.base = base
        self.ledger = base.ledger
        self.fabric = base.fabric
        self.home = base.home
        # Runs of ranks on a node keep together; scans want them in the order of the ranks.
        self.nodes = None if base.nodes is None else tuple(reversed(base.nodes))
        self.posts_receives_early = base.posts_receives_early

    def check_tensor(self, tensor: Tensor) -> None:
        self.base.check_tensor(tensor)

    def why_no_device_scans(self, device: torch.device) -> str | None:
        return self.base.why_no_device_scans(device)

    def scans_only_in_kernels(self, device: torch.device) -> bool:
        return self.base.scans_only_in_kernels(device)

    def post(self, sends: list[Message], receives: list[Message]) -> list[Request]:
        return self.base.post(self._turned(sends), self._turned(receives))

    def submit(self, program: Callable[[], ResultT]) -> Task[ResultT]:
        return self.base.submit(program)

    def all_gather(self, tensor: Tensor, tag: int, purpose: str) -> list[Tensor]:
        return self.base.all_gather(tensor, tag, purpose)[::-1]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.base.all_reduce(tensor)

    def device_ring(self, device: torch.device) -> DeviceRing:
        return self.base.device_ring(device)

    def start_device_scan(
        self, own: AffineMap, initial: Tensor | None, *, reverse: bool, output_leaving: bool
    ) -> Task[tuple[Tensor, Tensor | None]]:
        return self.base.start_device_scan(
            own, initial, reverse=not reverse, output_leaving=output_leaving
        )

    def check_device_scans(self) -> None:
        self.base.check_device_scans()

    def next_tags(self) -> int:
        return self.base.next_tags()

    def report_failure(self, error: BaseException) -> None:
        self.base.report_failure(error)

    def look_for_failure(self) -> None:
        self.base.look_for_failure()

    def post_failure(self, number: int, message: str) -> None:
        self.base.post_failure(number, message)

    def find_failure(self, number: int) -> str | None:
        return self.base.find_failure(number)

    def _turned(self, messages: list[Message]) -> list[Message]:
        last = self.size - 1
        return [replace(message, peer=last - message.peer) for message in messages]
