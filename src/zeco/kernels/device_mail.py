"""What ranks say to each other from inside kernels: words of a state, and room for more of them.

A word is 16 bytes of a state, seen as integers. An inbox holds words that are `EMPTY` until the sender
has written them, so data is its own signal: no flag, no fence, and the load that finds a word has it.
The receiver empties what it has read, and then says in its sender's memory that there is room again.
`EMPTY` and `LOST` are NaNs that no state holds: a sender writes those that look like them as another.

Every element of a word is looked at by itself, so nothing depends on how wide a store is atomic; loads
and stores are PTX's relaxed ones of system scope, room is given by a release and taken by an acquire.
In Triton's interpreter, where ranks run one after the other, nothing is waited for.
"""
# ruff: noqa: SIM108  (a conditional expression would compile both sides)
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

WORD_BYTES = 16

EMPTY = tl.constexpr(-1)
"""Nothing has been written here yet."""

LOST = tl.constexpr(-2)
"""What belongs here can't be known: it didn't come to the sender, or to one before it."""

LATE = tl.constexpr(1)
"""A block didn't come from the rank before this one."""

SENT_AS_LOST = tl.constexpr(2)
"""The rank before this one couldn't know a block."""

NO_ROOM = tl.constexpr(3)
"""The rank after this one didn't read what it was sent."""

PLAIN = tl.constexpr(-3)
"""The NaN as which a sender writes those of a state that look like the two above."""

CAUSE_BIT = tl.constexpr(60)
"""Where a note's cause begins; below it are the rank (12 bits), the block (16) and the scan (32)."""


def receive_asm(bits: int, pack: int) -> tuple[str, str]:
    """Return PTX that reads ``pack`` words of a thread once they are there, and its operands' kinds.

    The operands are the words' elements (first elements of all words, second ones, ...), what is wrong
    with each word (0, `LATE` or `SENT_AS_LOST`); then, given for every word though only the addresses
    differ, the words' addresses, an address to look at first, whether to read at all (else the elements
    are 0), whether to look before the first reading, when to give up, in nanoseconds of the GPU's clock,
    the two places to leave a note in if anything is wrong, and that note without its cause.

    Looking is reading only the first address until that isn't empty, so that a warp that waits asks for
    one sector at a time, not for all its words.

    Args:
        bits: of an element, 32 or 64.
        pack: words a thread.
    """
    lanes = WORD_BYTES * 8 // bits
    words = [[f"${lane * pack + word}" for lane in range(lanes)] for word in range(pack)]
    elements = [element for word in words for element in word]
    causes = [f"${lanes * pack + word}" for word in range(pack)]
    given = (lanes + 1) * pack
    addresses = [f"${given + word}" for word in range(pack)]
    first, active, looks, deadline, status, broken, what = (
        f"${given + place * pack}" for place in range(1, 8)
    )

    def any_of(values: list[str], test: str, value: int) -> list[str]:
        lines = [f"setp.{test} found, {values[0]}, {value};"]
        comparison, kind = test.split(".")
        return lines + [
            f"setp.{comparison}.or.{kind} found, {x}, {value}, found;" for x in values[1:]
        ]

    def unless_late(label: str) -> list[str]:
        # The clock is slow to read.
        return [
            "add.u32 tries, tries, 1;",
            "and.b32 turn, tries, 31;",
            "setp.ne.u32 found, turn, 0;",
            f"@found bra {label};",
            "mov.u64 now, %globaltimer;",
            f"setp.lt.s64 found, now, {deadline};",
            f"@found bra {label};",
        ]

    read = [
        f"ld.relaxed.sys.global.v{lanes}.b{bits} {{{', '.join(word)}}}, [{address}];"
        for word, address in zip(words, addresses, strict=True)
    ]
    # As unsigned numbers no others are as large.
    read += [*any_of(elements, f"ge.u{bits}", LOST.value), "@!found bra DONE;"]
    read += [*any_of(elements, f"eq.s{bits}", EMPTY.value), "@!found bra JUDGE;"]
    lines = [
        ".reg .pred found;",
        f".reg .b{bits} seen;",
        ".reg .u32 tries, turn;",
        ".reg .s64 now, note;",
        "mov.u32 tries, 0;",
        *(f"mov.b{bits} {element}, 0;" for element in elements),
        *(f"mov.b32 {cause}, 0;" for cause in causes),
        f"setp.eq.s32 found, {active}, 0;",
        "@found bra DONE;",
        f"setp.ne.s32 found, {looks}, 0;",
        "@found bra LOOK;",
        *read,
        "LOOK:",
        f"ld.relaxed.sys.global.b{bits} seen, [{first}];",
        f"setp.ne.s{bits} found, seen, {EMPTY.value};",
        "@found bra READ;",
        *unless_late("LOOK"),
        "READ:",
        *read,
        *unless_late("READ"),
        "JUDGE:",
    ]
    for word, cause in zip(words, causes, strict=True):
        lines += any_of(word, f"eq.s{bits}", LOST.value)
        lines.append(f"@found mov.b32 {cause}, {SENT_AS_LOST.value};")
        lines += any_of(word, f"eq.s{bits}", EMPTY.value)
        lines.append(f"@found mov.b32 {cause}, {LATE.value};")
        lines += [
            f"setp.ne.s32 found, {cause}, 0;",
            f"cvt.s64.s32 note, {cause};",
            f"shl.b64 note, note, {CAUSE_BIT.value};",
            f"or.b64 note, note, {what};",
            f"@found st.relaxed.sys.global.s64 [{status}], note;",
            f"@found st.relaxed.sys.global.s64 [{broken}], note;",
        ]
    lines.append("DONE:")
    kinds = ["=&r" if bits == 32 else "=&l"] * len(elements) + ["=&r"] * pack
    kinds += ["l"] * (2 * pack) + ["r"] * (2 * pack) + ["l"] * (4 * pack)
    return "{\n" + "\n".join(lines) + "\n}", ",".join(kinds)


def _send_asm(bits: int) -> tuple[str, str]:
    """Return PTX that writes a word ($2...) to an address ($1), and its operands' kinds.

    The two operands after the word say whether it is lost, and whether to write at all.
    """
    lanes = WORD_BYTES * 8 // bits
    lost, active = f"${2 + lanes}", f"${3 + lanes}"
    kept = [f"kept{lane}" for lane in range(lanes)]
    lines = [
        ".reg .pred lost, active;",
        f".reg .b{bits} {', '.join(kept)};",
        f"setp.ne.s32 lost, {lost}, 0;",
        f"setp.ne.s32 active, {active}, 0;",
        *(f"min.u{bits} {k}, ${2 + lane}, {PLAIN.value};" for lane, k in enumerate(kept)),
        *(f"selp.b{bits} {k}, {LOST.value}, {k}, lost;" for k in kept),
        f"@active st.relaxed.sys.global.v{lanes}.b{bits} [$1], {{{', '.join(kept)}}};",
        "mov.u32 $0, 0;",
    ]
    kinds = ["=r", "l", *["r" if bits == 32 else "l"] * lanes, "r", "r"]
    return "{\n" + "\n".join(lines) + "\n}", ",".join(kinds)


SEND_32, SEND_32_KINDS = (tl.constexpr(part) for part in _send_asm(32))
SEND_64, SEND_64_KINDS = (tl.constexpr(part) for part in _send_asm(64))

WAIT_FOR_ROOM = tl.constexpr(f"""{{
.reg .pred found;
.reg .u32 tries, turn;
.reg .s64 seen, now, note;
mov.u32 tries, 0;
mov.u32 $0, 1;
LOOK:
ld.acquire.sys.global.s64 seen, [$1];
setp.ge.s64 found, seen, $2;
@found bra DONE;
add.u32 tries, tries, 1;
and.b32 turn, tries, 31;
setp.ne.u32 found, turn, 0;
@found bra LOOK;
mov.u64 now, %globaltimer;
setp.lt.s64 found, now, $3;
@found bra LOOK;
mov.u32 $0, 0;
or.b64 note, $6, {NO_ROOM.value << CAUSE_BIT.value};
st.relaxed.sys.global.s64 [$4], note;
st.relaxed.sys.global.s64 [$5], note;
DONE:
}}""")

GIVE_ROOM = tl.constexpr("""{
.reg .pred one;
.reg .u32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 one, thread, 0;
@one st.release.sys.global.s64 [$1], $2;
mov.u32 $0, 0;
}""")


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
    """Return a note (int64) without its cause; see `zeco.kernels.device_scan.read_status`."""
    what = tl.cast(rank, tl.int64) << 48
    return what | ((tl.cast(block, tl.int64) & 0xFFFF) << 32) | (epoch & 0xFFFFFFFF)


@triton.jit
def receive(
    inbox,
    active,
    looks,
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
    the host to find, and so that no later scan waits. If not active (int32), all elements are 0. Whether
    it ``looks`` (int32) first, because they probably aren't there yet, makes no other difference.
    """
    words = tl.arange(0, WORDS)
    places = status.to(tl.int64), broken.to(tl.int64)
    if INTERPRETED:
        at = words[:, None] * LANES + tl.arange(0, LANES)[None, :]
        found = tl.load(inbox + at, mask=(at >= 0) & (active != 0), other=0)
        late = tl.max((found == EMPTY).to(tl.int32), 1)
        lost = tl.max((found == LOST).to(tl.int32), 1)
        cause = tl.where(late != 0, LATE, lost * SENT_AS_LOST)
        whole = what | (cause.to(tl.int64) << CAUSE_BIT)
        tl.store(status + cause * 0, whole, mask=cause != 0)
        tl.store(broken + cause * 0, whole, mask=cause != 0)
    elif LANES == 4:
        a, b, c, d, cause = tl.inline_asm_elementwise(
            RECEIVE,
            RECEIVE_KINDS,
            [inbox + words * LANES, inbox, active, looks, deadline, places[0], places[1], what],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=PACK,
        )
        found = tl.join(tl.join(a, c), tl.join(b, d)).reshape(WORDS, LANES)
    else:
        a, b, cause = tl.inline_asm_elementwise(
            RECEIVE,
            RECEIVE_KINDS,
            [inbox + words * LANES, inbox, active, looks, deadline, places[0], places[1], what],
            dtype=(tl.int64, tl.int64, tl.int32),
            is_pure=False,
            pack=PACK,
        )
        found = tl.join(a, b)
    return found, cause


@triton.jit
def is_empty(inbox, active, INTERPRETED: tl.constexpr):
    """Return whether a block's first element hasn't come yet (int32), if active; else 0."""
    if INTERPRETED:
        found = tl.load(inbox, mask=active != 0, other=0)
    else:
        found = tl.load(inbox, mask=active != 0, other=0, volatile=True)
    return (found == EMPTY).to(tl.int32)


@triton.jit
def send(
    outbox, state, lost, active, WORDS: tl.constexpr, LANES: tl.constexpr, INTERPRETED: tl.constexpr
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
        even, odd = tl.split(bits.reshape(WORDS, 2, 2))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        tl.inline_asm_elementwise(
            SEND_32,
            SEND_32_KINDS,
            [outbox + words * LANES, a, b, c, d, lost, active],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        a, b = tl.split(bits)
        tl.inline_asm_elementwise(
            SEND_64,
            SEND_64_KINDS,
            [outbox + words * LANES, a, b, lost, active],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def empty(block, active, WORDS: tl.constexpr, LANES: tl.constexpr):
    """Empty a block of the own inbox, if active."""
    at = tl.arange(0, WORDS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    nothing = tl.full([WORDS, LANES], EMPTY, block.dtype.element_ty)
    tl.store(block + at, nothing, mask=(at >= 0) & (active != 0))


@triton.jit
def wait_for_room(room, epoch, deadline, status, broken, what, INTERPRETED: tl.constexpr):
    """Return 1 once the receiver has emptied what it got in an epoch; 0, and a note, if too late."""
    if INTERPRETED:
        found = (tl.load(room) >= epoch).to(tl.int32)
        whole = what | (tl.cast(NO_ROOM, tl.int64) << CAUSE_BIT)
        tl.store(status, whole, mask=found == 0)
        tl.store(broken, whole, mask=found == 0)
    else:
        found = tl.inline_asm_elementwise(
            WAIT_FOR_ROOM,
            "=&r,l,l,l,l,l,l",
            [room, epoch, deadline, status, broken, what],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return found


@triton.jit
def give_room(room, epoch, INTERPRETED: tl.constexpr):
    """Tell the sender that the whole thread block has emptied what it got in an epoch."""
    tl.debug_barrier()
    if INTERPRETED:
        tl.store(room, epoch)
    else:
        tl.inline_asm_elementwise(
            GIVE_ROOM, "=r,l,l", [room, epoch], dtype=tl.int32, is_pure=False, pack=1
        )
