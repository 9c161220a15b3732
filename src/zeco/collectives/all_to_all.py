"""All-to-all of tensors of any shapes, differentiable: the adjoint sends every gradient back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeco.collectives.recompute import Slot, take_slot
from zeco.collectives.transport import Message, Transport, wait_all

PURPOSE = "all-to-all"


@dataclass(frozen=True)
class Way:
    """How a tensor is cut for the ranks, and put together from what they send.

    Attributes:
        cut: the dim that is cut.
        leaving: its sizes in the parts for each rank, this one included.
        join: the dim along which the parts that come are put together.
        arriving: its sizes in the parts from each rank.
    """

    cut: int
    leaving: tuple[int, ...]
    join: int
    arriving: tuple[int, ...]

    def back(self) -> Way:
        """Return the way of the gradient."""
        return Way(self.join, self.arriving, self.cut, self.leaving)

    def shape(self, x: Tensor, rank: int) -> list[int]:
        """Return the shape of what comes for a tensor."""
        shape = list(x.shape)
        shape[self.cut] = self.leaving[rank]
        shape[self.join] = sum(self.arriving)
        return shape


@dataclass(frozen=True, eq=False)
class Swap:
    """One tensor's all-to-all.

    Attributes:
        x: what is cut.
        way: how, and what it becomes.
    """

    x: Tensor
    way: Way


class _AllToAllFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, transport: Transport, ways: Sequence[Way], slot: Slot | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.transport, ctx.ways = transport, ways
        kept = None if slot is None else slot.read()
        if kept is not None:
            return tuple(k.clone() for k in kept)
        found = _exchange(transport, tensors, ways)
        if slot is not None:
            slot.write(*found)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_found: Tensor) -> tuple[Any, ...]:
        ways = [way.back() for way in ctx.ways]
        return None, None, None, *_exchange(ctx.transport, d_found, ways)


def _exchange(transport: Transport, tensors: Sequence[Tensor], ways: Sequence[Way]) -> list[Tensor]:
    """Send every rank its parts and return what came, put together; empty parts aren't sent.

    A part that lies in one piece where it belongs is received there.
    """
    rank, tag = transport.rank, transport.next_tags()
    found: list[Tensor] = []
    sends: list[Message] = []
    receives: list[Message] = []
    elsewhere: list[tuple[Tensor, Tensor]] = []
    for number, (x, way) in enumerate(zip(tensors, ways, strict=True)):
        whole = x.new_empty(way.shape(x, rank))
        found.append(whole)
        parts = x.split(way.leaving, way.cut)
        places = whole.split(way.arriving, way.join)
        for peer, (part, place) in enumerate(zip(parts, places, strict=True)):
            if peer == rank:
                _copy(part, place)
                continue
            if part.numel():
                sends.append(Message(_in_one_piece(part), peer, tag + number))
            if place.numel():
                buffer = place if place.is_contiguous() else place.new_empty(place.shape)
                receives.append(Message(buffer, peer, tag + number))
                if buffer is not place:
                    elsewhere.append((place, buffer))
    wait_all(transport.exchange(sends, receives, PURPOSE))
    for place, buffer in elsewhere:
        _copy(buffer, place)
    return found


def _in_one_piece(x: Tensor) -> Tensor:
    if x.is_contiguous():
        return x
    found = x.new_empty(x.shape)
    _copy(x, found)
    return found


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy 8 bytes at a time where rows allow it: torch's kernel for cut tensors goes by elements."""
    if _has_long_rows(source) and _has_long_rows(target):
        source, target = source.view(torch.int64), target.view(torch.int64)
    target.copy_(source)


def _has_long_rows(x: Tensor) -> bool:
    """Return whether a tensor's last dim can be seen as 8-byte numbers."""
    size, itemsize = torch.int64.itemsize, x.dtype.itemsize
    if x.ndim == 0 or x.stride(-1) != 1 or itemsize >= size:
        return False
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return all(step * itemsize % size == 0 for step in steps)


def all_to_all(swaps: Sequence[Swap], transport: Transport) -> list[Tensor]:
    """For each of several tensors, send a part to every rank and put together what comes.

    Differentiable, all of it as one: if any tensor needs a gradient, the adjoint exchanges all of
    them, so the ranks needn't agree on which tensors do. When a checkpointed region is recomputed, no
    message is sent again.

    Args:
        swaps: the tensors and how each is cut and put together.
        transport: this rank's end of the group.

    Returns:
        For each tensor what came.
    """
    tensors = [swap.x for swap in swaps]
    for x in tensors:
        transport.check_tensor(x)
    ways = [swap.way for swap in swaps]
    return list(_AllToAllFunction.apply(transport, ways, take_slot(), *tensors))


def gather_sizes(size: int, transport: Transport, device: torch.device) -> tuple[int, ...]:
    """Return a number of every rank; when a checkpointed region is recomputed, what it was."""
    return tuple(numbers[0] for numbers in gather_numbers([size], transport, device))


def gather_numbers(
    numbers: Sequence[int], transport: Transport, device: torch.device
) -> list[tuple[int, ...]]:
    """Return a few integers of every rank, as many on each; when recomputed, what they were."""
    slot = take_slot()
    kept = None if slot is None else slot.read()
    if kept is None:
        mine = torch.tensor(list(numbers), device=device)
        found = torch.stack(transport.all_gather(mine, transport.next_tags(), PURPOSE))
        if slot is not None:
            slot.write(found)
        kept = (found,)
    return [tuple(row) for row in kept[0].tolist()]
