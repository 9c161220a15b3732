"""The transport of a group of one: there is nobody to talk to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zeco.collectives.transport import Ended, Message, Request, Transport
from zeco.core.errors import GroupError

ResultT = TypeVar("ResultT")


class SingleTransport(Transport):
    """A group of one rank."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def post(self, sends: list[Message], receives: list[Message]) -> list[Request]:
        if sends or receives:
            raise GroupError("a group of one rank has no peer to exchange messages with")
        return []

    def as_group(self) -> None:
        return None

    def submit(self, program: Callable[[], ResultT]) -> Ended[ResultT]:
        return Ended(program())

    def post_failure(self, number: int, message: str) -> None:
        """Do nothing: nobody waits."""

    def find_failure(self, number: int) -> str | None:
        return None
