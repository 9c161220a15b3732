"""What ranks say to each other from inside kernels: words of a state, and room for more of them.

A word is 16 bytes of a state, seen as integers. An inbox holds words that are `EMPTY` until the sender
has written them, so data is its own signal: no flag, no fence, and the load that finds a word has it.
The thread that has received a word empties it at once; when a thread block has emptied all of its own,
it says in its sender's memory that there is room again. `EMPTY` and `LOST` are NaNs that no state
holds: a sender writes those that look like them as another.

Every element of a word is looked at by itself, so nothing depends on how wide a store is atomic; the
instructions are in `zeco.kernels.device.ptx`. In Triton's interpreter, where ranks run one after the
other, nothing is waited for.
"""
# ruff: noqa: SIM108  (a conditional expression would compile both sides)
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.device.ptx import (
    CAUSE_BIT,
    EMPTY,
    EMPTY_WORD,
    GIVE_ROOM_GPU,
    GIVE_ROOM_SYS,
    LATE,
    LOST,
    NO_ROOM,
    PLAIN,
    READ_ROOM_GPU,
    READ_ROOM_SYS,
    SEND_32_GPU,
    SEND_32_KINDS,
    SEND_32_SYS,
    SEND_64_GPU,
    SEND_64_KINDS,
    SEND_64_SYS,
    SENT_AS_LOST,
    WAIT_FOR_ROOM_GPU,
    WAIT_FOR_ROOM_SYS,
)


@triton.jit
def read_clock(INTERPRETED: tl.constexpr):
    """Return the GPU's time in nanoseconds; 0 in the interpreter."""
    if INTERPRETED:
        now = tl.cast(0, tl.int64)
    else:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    return now


@triton.jit
def begin_note(rank, block, epoch):
    """Return a note (int64) without its cause; see `zeco.kernels.device.scan.read_status`."""
    what = tl.cast(rank, tl.int64) << 48
    return what | ((tl.cast(block, tl.int64) & 0xFFFF) << 32) | (epoch & 0xFFFFFFFF)


@triton.jit
def split_in_four(x, ROWS: tl.constexpr):
    """Return the four columns of a tensor [ROWS, 4]."""
    even, odd = tl.split(x.reshape(ROWS, 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def look(words, there, WORDS: tl.constexpr, LANES: tl.constexpr):
    """Return a block's elements [WORDS, LANES] as they are now, where ``there``; else zeros."""
    at = tl.arange(0, WORDS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    return tl.load(words + at, mask=there, other=0, volatile=True)


@triton.jit
def receive(
    seen,
    inbox,
    waits,
    deadline,
    status,
    broken,
    what,
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
    PACK: tl.constexpr,
    RECEIVE: tl.constexpr,
    RECEIVE_KINDS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return a block's elements [WORDS, LANES] as integers once they are there.

    Also which words [WORDS] can't be known (not 0): those that didn't come by the deadline, in which
    something is `EMPTY`, and those that the sender had `LOST`. Their cause is left in the two places for
    the host to find, and so that no later scan waits. What was ``seen`` by an earlier look isn't read
    again if it is all there, or if nothing is waited for (``waits``, int32, is 0).
    """
    words = tl.arange(0, WORDS)
    places = status.to(tl.int64), broken.to(tl.int64)
    if INTERPRETED:
        found = seen
        late = tl.max((found == EMPTY).to(tl.int32), 1)
        lost = tl.max((found == LOST).to(tl.int32), 1)
        cause = tl.where(late != 0, LATE, lost * SENT_AS_LOST) * waits
        whole = what | (cause.to(tl.int64) << CAUSE_BIT)
        tl.store(status + cause * 0, whole, mask=cause != 0)
        tl.store(broken + cause * 0, whole, mask=cause != 0)
    elif LANES == 4:
        a, b, c, d = split_in_four(seen, WORDS)
        a, b, c, d, cause = tl.inline_asm_elementwise(
            RECEIVE,
            RECEIVE_KINDS,
            [a, b, c, d, inbox + words * LANES, waits, deadline, places[0], places[1], what],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=PACK,
        )
        found = tl.join(tl.join(a, c), tl.join(b, d)).reshape(WORDS, LANES)
    else:
        a, b = tl.split(seen)
        a, b, cause = tl.inline_asm_elementwise(
            RECEIVE,
            RECEIVE_KINDS,
            [a, b, inbox + words * LANES, waits, deadline, places[0], places[1], what],
            dtype=(tl.int64, tl.int64, tl.int32),
            is_pure=False,
            pack=PACK,
        )
        found = tl.join(a, b)
    return found, cause


@triton.jit
def send(
    outbox,
    state,
    lost,
    active,
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
    SCOPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write a block's elements [WORDS, LANES] into an inbox, if active.

    Words whose ``lost`` [WORDS] (int32) isn't 0 are written as `LOST`.
    """
    words = tl.arange(0, WORDS)
    if LANES == 4:
        bits = state.to(tl.int32, bitcast=True)
    else:
        bits = state.to(tl.int64, bitcast=True)
    if INTERPRETED:
        at = words[:, None] * LANES + tl.arange(0, LANES)[None, :]
        bits = tl.where((bits == EMPTY) | (bits == LOST), PLAIN, bits)
        bits = tl.where((lost != 0)[:, None], LOST, bits)
        tl.store(outbox + at, bits, mask=(at >= 0) & (active != 0))
    elif LANES == 4:
        a, b, c, d = split_in_four(bits, WORDS)
        tl.inline_asm_elementwise(
            SEND_32_GPU if SCOPE == "gpu" else SEND_32_SYS,
            SEND_32_KINDS,
            [outbox + words * LANES, a, b, c, d, lost, active],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        a, b = tl.split(bits)
        tl.inline_asm_elementwise(
            SEND_64_GPU if SCOPE == "gpu" else SEND_64_SYS,
            SEND_64_KINDS,
            [outbox + words * LANES, a, b, lost, active],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def empty(inbox, lost, active, WORDS: tl.constexpr, LANES: tl.constexpr, INTERPRETED: tl.constexpr):
    """Empty a block of the own inbox, if active, each word by the thread that has received it.

    What `receive` returned as ``lost`` isn't needed, but ties the words to these threads: another might
    empty a word before it is read.
    """
    words = tl.arange(0, WORDS)
    if INTERPRETED:
        at = words[:, None] * LANES + tl.arange(0, LANES)[None, :]
        nothing = tl.full([WORDS, LANES], EMPTY, inbox.dtype.element_ty)
        tl.store(inbox + at, nothing, mask=(at >= 0) & (active != 0))
    else:
        tl.inline_asm_elementwise(
            EMPTY_WORD,
            "=r,l,r,r",
            [inbox + words * LANES, lost, active],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def read_room(room, SCOPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return the last epoch of which the receiver has emptied what it got."""
    if INTERPRETED:
        seen = tl.load(room)
    else:
        seen = tl.inline_asm_elementwise(
            READ_ROOM_GPU if SCOPE == "gpu" else READ_ROOM_SYS,
            "=l,l",
            [room],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    return seen


@triton.jit
def wait_for_room(
    seen,
    room,
    epoch,
    deadline,
    status,
    broken,
    what,
    SCOPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return 1 once the receiver has emptied what it got in an epoch; 0, and a note, if too late.

    If it was ``seen`` to have done so earlier, nothing is read.
    """
    if INTERPRETED:
        found = (seen >= epoch).to(tl.int32)
        whole = what | (tl.cast(NO_ROOM, tl.int64) << CAUSE_BIT)
        tl.store(status, whole, mask=found == 0)
        tl.store(broken, whole, mask=found == 0)
    else:
        found = tl.inline_asm_elementwise(
            WAIT_FOR_ROOM_GPU if SCOPE == "gpu" else WAIT_FOR_ROOM_SYS,
            "=&r,l,l,l,l,l,l,l",
            [room, epoch, deadline, status, broken, what, seen],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return found


@triton.jit
def give_room(room, epoch, SCOPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Tell the sender that the whole thread block has emptied what it got in an epoch."""
    tl.debug_barrier()
    if INTERPRETED:
        tl.store(room, epoch)
    else:
        tl.inline_asm_elementwise(
            GIVE_ROOM_GPU if SCOPE == "gpu" else GIVE_ROOM_SYS,
            "=r,l,l",
            [room, epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
