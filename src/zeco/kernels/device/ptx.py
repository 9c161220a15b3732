"""Words that ranks exchange inside kernels, and the PTX that waits for them, sends and empties them.

See `zeco.kernels.device.mail`, which calls it. Loads and stores of words are relaxed; room for more is
given by a release and taken by an acquire. Their scope is that of PTX's memory model: ``gpu`` where all
ranks are on one GPU, ``sys`` where they write to other GPUs. Notes for the host are always of ``sys``.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import triton.language as tl

WORD_BYTES = 16

SCOPES = ("gpu", "sys")
"""How far off the ranks are that words are for: all on this GPU, or on others too."""

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


def receive_asm(bits: int, pack: int, scope: str) -> tuple[str, str]:
    """Return PTX that waits for ``pack`` words of a thread, and its operands' kinds.

    The operands are the words' elements (first elements of all words, second ones, ...) and what is
    wrong with each word (0, `LATE` or `SENT_AS_LOST`); then the elements as they were seen last and the
    words' addresses; then, given for every word though the same for all, whether to wait (else the
    elements are those seen), when to give up, in nanoseconds of the GPU's clock, the two places to
    leave a note in if anything is wrong, and that note without its cause.

    The threads of a warp go on together, when all have their words. Until then they look at one word of
    the first thread, which is one sector, and read all of theirs only when that has come.

    Args:
        bits: of an element, 32 or 64.
        pack: words a thread.
        scope: of the loads of words.
    """
    lanes = WORD_BYTES * 8 // bits
    words = [[f"${lane * pack + word}" for lane in range(lanes)] for word in range(pack)]
    elements = [f"${place}" for place in range(lanes * pack)]
    causes = [f"${lanes * pack + word}" for word in range(pack)]
    seen = [f"${(lanes + 1) * pack + place}" for place in range(lanes * pack)]
    given = (2 * lanes + 1) * pack
    addresses = [f"${given + word}" for word in range(pack)]
    waits, deadline, status, broken, what = (f"${given + place * pack}" for place in range(1, 6))

    def any_of(values: list[str], value: int) -> list[str]:
        return [
            f"setp.eq.s{bits} found, {values[0]}, {value};",
            *(f"setp.eq.or.s{bits} found, {x}, {value}, found;" for x in values[1:]),
        ]

    def go_if_any_thread(test: str, label: str) -> list[str]:
        return [test, "vote.sync.any.pred found, found, 0xffffffff;", f"@found bra {label};"]

    # As unsigned numbers no others are as large as EMPTY, and LOST next to it.
    find_greatest = [f"mov.b{bits} greatest, {elements[0]};"]
    find_greatest += [f"max.u{bits} greatest, greatest, {x};" for x in elements[1:]]
    lines = [
        ".reg .pred found;",
        f".reg .b{bits} greatest;",
        ".reg .u32 tries, turn;",
        ".reg .b32 low, high;",
        ".reg .b64 first;",
        ".reg .s64 now, note;",
        *(f"mov.b{bits} {x}, {y};" for x, y in zip(elements, seen, strict=True)),
        *(f"mov.b32 {cause}, 0;" for cause in causes),
        f"setp.eq.s32 found, {waits}, 0;",
        "@found bra DONE;",
        *find_greatest,
        *go_if_any_thread(f"setp.ge.u{bits} found, greatest, {LOST.value};", "WAIT"),
        "bra DONE;",
        "WAIT:",
        "mov.u32 tries, 0;",
        f"mov.b64 {{low, high}}, {addresses[-1]};",
        "shfl.sync.idx.b32 low, low, 0, 31, 0xffffffff;",
        "shfl.sync.idx.b32 high, high, 0, 31, 0xffffffff;",
        "mov.b64 first, {low, high};",
        "bra TEST;",
        "LOOK:",
        f"ld.relaxed.{scope}.global.b{bits} greatest, [first];",
        *go_if_any_thread(f"setp.eq.s{bits} found, greatest, {EMPTY.value};", "AGAIN"),
        *(
            f"ld.relaxed.{scope}.global.v{lanes}.b{bits} {{{', '.join(word)}}}, [{address}];"
            for word, address in zip(words, addresses, strict=True)
        ),
        *find_greatest,
        "TEST:",
        *go_if_any_thread(f"setp.eq.s{bits} found, greatest, {EMPTY.value};", "AGAIN"),
        "bra JUDGE;",
        "AGAIN:",
        # The clock is slow to read.
        "add.u32 tries, tries, 1;",
        "and.b32 turn, tries, 31;",
        "setp.ne.u32 found, turn, 0;",
        "@found bra LOOK;",
        "mov.u64 now, %globaltimer;",
        *go_if_any_thread(f"setp.lt.s64 found, now, {deadline};", "LOOK"),
        "JUDGE:",
    ]
    for word, cause in zip(words, causes, strict=True):
        lines += [
            *any_of(word, LOST.value),
            f"@found mov.b32 {cause}, {SENT_AS_LOST.value};",
            *any_of(word, EMPTY.value),
            f"@found mov.b32 {cause}, {LATE.value};",
            f"setp.ne.s32 found, {cause}, 0;",
            f"cvt.s64.s32 note, {cause};",
            f"shl.b64 note, note, {CAUSE_BIT.value};",
            f"or.b64 note, note, {what};",
            f"@found st.relaxed.sys.global.s64 [{status}], note;",
            f"@found st.relaxed.sys.global.s64 [{broken}], note;",
        ]
    lines.append("DONE:")
    kind = "r" if bits == 32 else "l"
    kinds = [f"=&{kind}"] * len(elements) + ["=&r"] * pack + [kind] * len(seen)
    kinds += ["l"] * pack + ["r"] * pack + ["l"] * (4 * pack)
    return "{\n" + "\n".join(lines) + "\n}", ",".join(kinds)


def _send_asm(bits: int, scope: str) -> str:
    """Return PTX that writes a word ($2...) to an address ($1).

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
        "@!lost bra WRITE;",
        *(f"mov.b{bits} {k}, {LOST.value};" for k in kept),
        "WRITE:",
        f"@active st.relaxed.{scope}.global.v{lanes}.b{bits} [$1], {{{', '.join(kept)}}};",
        "mov.u32 $0, 0;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


SEND_32_GPU, SEND_32_SYS = (tl.constexpr(_send_asm(32, scope)) for scope in SCOPES)
SEND_64_GPU, SEND_64_SYS = (tl.constexpr(_send_asm(64, scope)) for scope in SCOPES)
SEND_32_KINDS = tl.constexpr("=r,l,r,r,r,r,r,r")
SEND_64_KINDS = tl.constexpr("=r,l,l,l,r,r")

EMPTY_WORD = tl.constexpr(f"""{{
.reg .pred active;
setp.ne.s32 active, $3, 0;
@active st.global.v2.b64 [$1], {{{EMPTY.value}, {EMPTY.value}}};
mov.u32 $0, $2;
}}""")

READ_ROOM_GPU, READ_ROOM_SYS = (
    tl.constexpr(f"ld.acquire.{scope}.global.s64 $0, [$1];") for scope in SCOPES
)


def _wait_for_room_asm(scope: str) -> str:
    """Return PTX that waits until a number ($1) is at least another one ($2).

    The operands after these are when to give up, the two places for a note, the note without its cause,
    and the number as it was seen last.
    """
    return f"""{{
.reg .pred found;
.reg .u32 tries, turn;
.reg .s64 seen, now, note;
mov.u32 tries, 0;
mov.u32 $0, 1;
mov.s64 seen, $7;
bra TEST;
LOOK:
ld.acquire.{scope}.global.s64 seen, [$1];
TEST:
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
}}"""


WAIT_FOR_ROOM_GPU, WAIT_FOR_ROOM_SYS = (tl.constexpr(_wait_for_room_asm(scope)) for scope in SCOPES)


def _give_room_asm(scope: str) -> str:
    """Return PTX by which one thread of a thread block writes a number ($2) to an address ($1)."""
    return f"""{{
.reg .pred one;
.reg .u32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 one, thread, 0;
@one st.release.{scope}.global.s64 [$1], $2;
mov.u32 $0, 0;
}}"""


GIVE_ROOM_GPU, GIVE_ROOM_SYS = (tl.constexpr(_give_room_asm(scope)) for scope in SCOPES)
