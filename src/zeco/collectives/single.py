"""The transport of a group of one: there is nobody to talk to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from zeco.collectives.device_ring import why_no_device_scans
from zeco.collectives.local_rings import LocalRing, LocalRings
from zeco.collectives.transport import Ended, Message, Request, Transport
from zeco.core.errors import GroupError, UnsupportedError

ResultT = TypeVar("ResultT")


class SingleTransport(Transport):
    """A group of one rank."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def post(self, sends: list[Message], receives: list[Message]) -> list[Request]:
        if sends or receives:
            raise GroupError("a group of one rank has no peer to exchange messages with")
        return []

    def make_device_ring(self, device: torch.device) -> LocalRing:
        reason = why_no_device_scans(device)
        if reason is not None:
            raise UnsupportedError(f"scans can't run inside kernels here: {reason}")
        return LocalRings(1, timeout_s=1.0).ring(0, device)

    def as_group(self) -> None:
        return None

    def submit(self, program: Callable[[], ResultT]) -> Ended[ResultT]:
        return Ended(program())

    def post_failure(self, number: int, message: str) -> None:
        """Do nothing: nobody waits."""

    def find_failure(self, number: int) -> str | None:
        return None
