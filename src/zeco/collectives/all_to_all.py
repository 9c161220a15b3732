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
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Swap:
    """One tensor's all-to-all.

    Attributes:
        parts: what goes to each rank, this one included.
        shapes: of what comes from each rank.
    """

    parts: Sequence[Tensor]
    shapes: Sequence[Shape]


class _AllToAllFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        transport: Transport,
        shapes: list[Shape],
        slot: Slot | None,
        *parts: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.transport, ctx.shapes = transport, [tuple(p.shape) for p in parts]
        kept = None if slot is None else slot.read()
        if kept is not None:
            return tuple(k.clone() for k in kept)
        found = _exchange(transport, parts, shapes)
        if slot is not None:
            slot.write(*found)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_found: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_exchange(ctx.transport, d_found, ctx.shapes)


def _exchange(
    transport: Transport, parts: Sequence[Tensor], shapes: Sequence[Shape]
) -> list[Tensor]:
    """Send part i to rank i % P and return what came in its place; empty parts aren't sent."""
    P, tag = transport.size, transport.next_tags()
    found = [part.new_empty(shape) for part, shape in zip(parts, shapes, strict=True)]
    sends: list[Message] = []
    receives: list[Message] = []
    for i, (part, place) in enumerate(zip(parts, found, strict=True)):
        if i % P == transport.rank:
            place.copy_(part)
            continue
        if part.numel():
            sends.append(Message(part.contiguous(), i % P, tag + i // P))
        if place.numel():
            receives.append(Message(place, i % P, tag + i // P))
    wait_all(transport.exchange(sends, receives, PURPOSE))
    return found


def all_to_all(swaps: Sequence[Swap], transport: Transport) -> list[list[Tensor]]:
    """For each of several tensors, send a part to every rank and receive one from each.

    Differentiable, all of it as one: if any part needs a gradient, the adjoint exchanges all of
    them, so the ranks needn't agree on which tensors do. When a checkpointed region is recomputed, no
    message is sent again.

    Args:
        swaps: the tensors' parts and the shapes that come back.
        transport: this rank's end of the group.

    Returns:
        For each tensor what came, in the order of the ranks.
    """
    parts = [part for swap in swaps for part in swap.parts]
    shapes = [shape for swap in swaps for shape in swap.shapes]
    for part in parts:
        transport.check_tensor(part)
    found = _AllToAllFunction.apply(transport, shapes, take_slot(), *parts)
    P = transport.size
    return [list(found[i * P : (i + 1) * P]) for i in range(len(swaps))]


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
