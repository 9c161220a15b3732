"""All-Scan inside kernels: how states are cut, what a rank's launch needs, and the launch.

| transition | a block of a state [B, H, K, V] |
| --- | --- |
| identity, scalar, diagonal | a run of its elements, across rows of V |
| dense | a group of columns of one head, all of K |

All ranks launch once a scan; what they say to each other is in `zeco.kernels.device.mail`. A sender
fills its receiver's inbox again when that says that it has emptied it, so consecutive scans need no
other synchronisation. The number of a scan, its epoch, is counted in device memory by the launches
themselves, so that launches may be captured in a graph and replayed.

A layout has one kernel for every rank, direction and `Reset`: ranks that share a GPU must not wait for
each other while one of them compiles.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from zeco.core.blocks import StateShape
from zeco.core.errors import UnsupportedError
from zeco.core.transitions import Dense, Diagonal, Identity, Reset, Scalar, Transition
from zeco.kernels.device.ptx import CAUSE_BIT, LATE, NO_ROOM, SENT_AS_LOST, WORD_BYTES, receive_asm
from zeco.kernels.device.scan_kernels import dense_scan_kernel, elementwise_scan_kernel
from zeco.kernels.launch import launch

WORDS = 2048
"""The most words of a block that isn't dense; half as many where a thread block has few of them."""

UNROLL = 2
"""Blocks that an elementwise kernel's loop takes a turn."""

HELD_BYTES = 256
"""Of a dense transition that a thread may hold in registers while it waits."""

MAX_K = 256
"""Key channels that the dense kernel takes."""


@dataclass(frozen=True)
class ScanLayout:
    """How a scan of one kind and shape is cut over thread blocks; the same on every rank.

    Attributes:
        shape: [B, H, K, V] of the states.
        dtype: of the states, fp32 or fp64.
        kind: of the transitions.
        programs: thread blocks a rank.
        words: words of 16 bytes a block of the state.
        num_warps: warps a thread block.
        scope: of what ranks write to each other: "gpu" where all are on one GPU, else "sys".
        columns: of a head in a block, for dense transitions; 0 for the others.
        precision: of their products: "ieee", or "tf32x3" (three products of tensor cores, as exact).
        step: channels of a product at a time.
        holds: whether a thread block reads a whole matrix before it waits.
    """

    shape: StateShape
    dtype: torch.dtype
    kind: str
    programs: int
    words: int
    num_warps: int
    scope: str
    columns: int = 0
    precision: str = "ieee"
    step: int = 0
    holds: bool = False

    @property
    def lanes(self) -> int:
        """Elements of a word."""
        return WORD_BYTES // self.dtype.itemsize

    @property
    def num_blocks(self) -> int:
        """Blocks of a state."""
        B, H, K, V = self.shape
        if self.columns:
            return B * H * -(-V // self.columns)
        return -(-B * H * K * V // (self.words * self.lanes))

    @property
    def inbox_elements(self) -> int:
        """Elements of an inbox."""
        return self.num_blocks * self.words * self.lanes

    @property
    def bits(self) -> torch.dtype:
        """Integers as which elements are sent."""
        return torch.int32 if self.dtype == torch.float32 else torch.int64


@lru_cache(maxsize=256)
def make_layout(
    shape: StateShape,
    dtype: torch.dtype,
    kind: str,
    *,
    max_programs: int,
    scope: str = "sys",
    tensor_cores: bool = False,
    words: int | None = None,
    columns: int | None = None,
    num_warps: int | None = None,
    step: int | None = None,
) -> ScanLayout:
    """Cut states of a shape.

    Args:
        shape: [B, H, K, V].
        dtype: of the states.
        kind: of the transitions.
        max_programs: the most thread blocks that a rank may have.
        scope: "gpu" where all ranks are on one GPU, in one process; else "sys".
        tensor_cores: whether the GPU multiplies TF32 numbers; for dense transitions in fp32.
        words: the most words of 16 bytes a block, for transitions that aren't dense; None takes
            what measured best.
        columns: of a head in a block, for dense transitions; None takes what measured best.
        num_warps: the most warps a thread block; None takes what measured best.
        step: channels of a dense product at a time; None takes what measured best.

    Raises:
        UnsupportedError: a dense transition of more key channels than the kernel takes.
    """
    B, H, K, V = shape
    lanes = WORD_BYTES // dtype.itemsize
    if kind != Dense.kind:
        total = -(-B * H * K * V // lanes)
        share = -(-total // max_programs)
        words = words or (WORDS if share >= 4 * WORDS else WORDS // 2)
        words = max(32, min(words, _power_of_two(share)))
        return ScanLayout(
            shape,
            dtype,
            kind,
            programs=min(max_programs, -(-total // words)),
            words=words,
            num_warps=max(1, min(num_warps or 32, words // 32)),
            scope=scope,
        )
    if K > MAX_K:
        raise UnsupportedError(
            f"the dense kernel takes K up to {MAX_K}, got K={K}; use another algorithm"
        )
    padded = max(16, _power_of_two(K))
    if columns is None:
        columns = max(16, min(32, 1024 * lanes // padded))
    columns = min(columns, max(16, _power_of_two(V)))
    words = padded * columns // lanes
    num_warps = max(1, min(num_warps or min(8, words // 128), words // 32))
    three = tensor_cores and dtype == torch.float32
    step = step or min(padded, 32 if three else 16)
    fits = padded**2 * dtype.itemsize <= HELD_BYTES * 32 * num_warps
    return ScanLayout(
        shape,
        dtype,
        kind,
        programs=min(max_programs, B * H * -(-V // columns)),
        words=words,
        num_warps=num_warps,
        scope=scope,
        columns=columns,
        precision="tf32x3" if three else "ieee",
        step=step,
        holds=three and fits and padded == 4 * step,
    )


def _power_of_two(number: int) -> int:
    """Return the least power of two that isn't below a number."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, eq=False)
class Ports:
    """A rank's ends of the scans of one layout and direction.

    Attributes:
        inbox: own memory [blocks, elements], written by the rank before this one.
        outbox: the inbox of the rank after this one.
        room: own memory [programs]: the last epoch that the rank after this one has emptied.
        room_before: the same of the rank before this one.
        epochs: own memory [programs]: scans that each program has run.
        status: pinned host memory, one number; see `read_status`.
        broken: own memory, one number: not 0 once a scan has failed, and then none waits.
    """

    inbox: Tensor
    outbox: Tensor
    room: Tensor
    room_before: Tensor
    epochs: Tensor
    status: Tensor
    broken: Tensor


@dataclass(frozen=True)
class Role:
    """Where a rank stands in a direction of travel.

    Attributes:
        rank: in the group.
        first: whether the direction begins here.
        last: whether it ends here.
    """

    rank: int
    first: bool
    last: bool


@lru_cache(maxsize=256)
def choose_kernel(layout: ScanLayout, *, interpreted: bool) -> tuple[Any, dict[str, Any]]:
    """Return the kernel for a layout, and the arguments that it is compiled for."""
    pack = layout.words // (32 * layout.num_warps)
    receive, receive_kinds = receive_asm(layout.dtype.itemsize * 8, pack, layout.scope)
    B, H, K, V = layout.shape
    constants = {
        "K": K,
        "V": V,
        "WORDS": layout.words,
        "LANES": layout.lanes,
        "PACK": pack,
        "RECEIVE": receive,
        "RECEIVE_KINDS": receive_kinds,
        "SCOPE": layout.scope,
        "INTERPRETED": interpreted,
    }
    if not layout.columns:
        own = {"NUMEL": B * H * K * V, "KIND": layout.kind, "UNROLL": UNROLL}
        return elementwise_scan_kernel, constants | own
    return dense_scan_kernel, constants | {
        "BK": layout.words * layout.lanes // layout.columns,
        "BV": layout.columns,
        "STEP": layout.step,
        "HOLDS": layout.holds,
        "PRECISION": layout.precision,
    }


def launch_scan(
    layout: ScanLayout,
    ports: Ports,
    role: Role,
    update: Tensor,
    transition: Transition,
    initial: Tensor | None,
    *,
    timeout_s: float,
    entering: Tensor,
    leaving: Tensor | None,
) -> None:
    """Launch a rank's part of a scan on the current stream.

    Args:
        layout: of the scan.
        ports: the rank's ends of it.
        role: the rank's place.
        update: [B, H, K, V], contiguous.
        transition: of the layout's kind, parameters contiguous, or a `Reset`.
        initial: what enters the first rank, contiguous; None for zeros; not used elsewhere.
        timeout_s: how long the kernel waits in all.
        entering: is written, [B, H, K, V], contiguous.
        leaving: is written, [B, H, K, V], contiguous; None where nobody reads it.
    """
    given = initial if role.first else None
    inbox = ports.inbox
    if role.first:
        inbox = (update if given is None else given).view(layout.bits)
    kernel, constants = choose_kernel(layout, interpreted=not update.is_cuda)
    launch(
        kernel,
        layout.programs,
        update,
        _parameter(transition, update),
        entering,
        entering if leaving is None else leaving,
        inbox,
        ports.outbox,
        ports.room,
        ports.room_before,
        ports.epochs,
        ports.status,
        ports.broken,
        role.rank,
        int(role.first),
        int(role.last),
        int(isinstance(transition, Reset)),
        int(given is not None),
        int(leaving is not None),
        int(timeout_s * 1e6),
        layout.num_blocks,
        num_warps=layout.num_warps,
        **constants,
    )


def _parameter(transition: Transition, update: Tensor) -> Tensor:
    """Return the transition's parameter; something in its place where there is none."""
    match transition:
        case Scalar(log_decay) | Diagonal(log_decay):
            return log_decay
        case Dense(matrix):
            return matrix
        case Identity() | Reset():
            return update
        case _:
            raise UnsupportedError(f"transition {transition.kind!r} has no device kernel")


@dataclass(frozen=True)
class Loss:
    """What a rank's kernel found wrong.

    Attributes:
        rank: that found it.
        block: of the state.
        scan: its number on this rank, of this layout and direction, from 1.
        cause: in words.
    """

    rank: int
    block: int
    scan: int
    cause: str


_CAUSES = {
    LATE.value: "the block didn't come in time from the rank before it",
    SENT_AS_LOST.value: "the rank before it had lost the block",
    NO_ROOM.value: "the rank after it didn't take an earlier scan's blocks in time",
}


def read_status(status: Tensor) -> Loss | None:
    """Return what a kernel has left in the status word; None if nothing."""
    word = int(status[0])
    if word == 0:
        return None
    cause = _CAUSES[word >> CAUSE_BIT.value]
    return Loss((word >> 48) & 0xFFF, (word >> 32) & 0xFFFF, word & 0xFFFFFFFF, cause)
