"""Scans on CUDA: the whole program is put on a side stream, and the host never waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

ResultT = TypeVar("ResultT")


class StreamTask(Generic[ResultT]):
    """A program put on a side stream after what the current stream holds.

    Args:
        program: launches kernels and messages; returns tensors, alone or in tuples.
        stream: where it runs.
    """

    def __init__(self, program: Callable[[], ResultT], stream: torch.cuda.Stream) -> None:
        # Kept: what the program reads must not be freed, and so reused, before it has been read.
        self._program = program
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._result = program()
        self._ended = torch.cuda.Event()
        self._ended.record(stream)

    def has_ended(self) -> bool:
        """Whether the GPU is through with the program."""
        return self._ended.query()

    def wait(self) -> ResultT:
        """Make the current stream wait for the program; return its result."""
        current = torch.cuda.current_stream()
        current.wait_event(self._ended)
        _record(self._result, current)
        return self._result


def _record(result: object, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that a stream uses what another one made."""
    if isinstance(result, Tensor):
        result.record_stream(stream)
    elif isinstance(result, (tuple, list)):
        for part in result:  # pyright: ignore[reportUnknownVariableType]
            _record(part, stream)  # pyright: ignore[reportUnknownArgumentType]
