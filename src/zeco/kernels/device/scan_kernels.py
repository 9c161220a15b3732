"""All-Scan inside kernels: one launch a rank takes every block of its state through.

A thread block walks over the state's blocks ``program, program + programs, ...``: it reads its own map
(before it waits), waits for the entering block, and sends the leaving block on before it writes its own
results, what leaves only where it is wanted. On the first rank what enters takes the place of the inbox,
and nothing is waited for. `zeco.kernels.device.scan` launches, and says how states are cut.
"""
# ruff: noqa: SIM108  (a conditional expression would compile both sides)
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zeco.kernels.device.mail import (
    begin_note,
    empty,
    give_room,
    look,
    read_clock,
    read_room,
    receive,
    send,
    wait_for_room,
)

FREE = ["rank", "first", "last", "resets", "has_initial", "writes_leaving", "timeout_us"]
"""Numbers whose values no kernel is compiled for: ranks and scans differ in them."""


@triton.jit
def begin(
    epochs,
    room,
    status,
    broken,
    rank,
    last,
    timeout_us,
    SCOPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return this launch's epoch, its deadline, and whether there is room to send (int32).

    After a scan that failed none waits any more.
    """
    program = tl.program_id(0)
    # All three are under way at once.
    epoch = tl.load(epochs + program) + 1
    failed = tl.load(broken)
    seen = read_room(room + program, SCOPE, INTERPRETED)
    patience = tl.where(failed == 0, tl.cast(timeout_us, tl.int64) * 1000, 0)
    deadline = read_clock(INTERPRETED) + patience
    sends = tl.cast(0, tl.int32)
    if last == 0:
        what = begin_note(rank, program, epoch)
        sends = wait_for_room(
            seen, room + program, epoch - 1, deadline, status, broken, what, SCOPE, INTERPRETED
        )
    return epoch, deadline, sends


@triton.jit
def finish(epochs, room_before, epoch, receives, SCOPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Say that this program has emptied its blocks of the inbox, once all its threads have."""
    program = tl.program_id(0)
    if receives != 0:
        give_room(room_before + program, epoch, SCOPE, INTERPRETED)
    tl.store(epochs + program, epoch)


@triton.jit
def load_rows(
    update,
    log_decay,
    block,
    NUMEL: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return a block of the update [WORDS, LANES], and its log decays [WORDS, LANES] or [WORDS, 1]."""
    SIZE: tl.constexpr = WORDS * LANES
    words = tl.arange(0, WORDS)
    element = words[:, None] * LANES + tl.arange(0, LANES)[None, :]
    start = tl.cast(block, tl.int64) * SIZE
    # Read once: what goes through the inboxes shall stay in the cache instead.
    if NUMEL % SIZE == 0:
        u = tl.load(update + start + element, eviction_policy="evict_first")
    else:
        inside = element < NUMEL - start
        u = tl.load(update + start + element, mask=inside, other=0.0, eviction_policy="evict_first")
    if KIND == "identity":
        g = tl.zeros([WORDS, 1], u.dtype)
    else:
        per: tl.constexpr = V if KIND == "diagonal" else K * V
        if per % LANES == 0:
            first = words[:, None] * LANES
        else:
            first = element
        if SIZE % per == 0:
            row = start // per + first // per
        else:
            row = (start + first) // per
        if NUMEL % SIZE == 0:
            g = tl.load(log_decay + row)
        else:
            g = tl.load(log_decay + row, mask=first < NUMEL - start, other=0.0)
    return u, g


@triton.jit
def look_at_block(
    inbox,
    block,
    receives,
    has_initial,
    NUMEL: tl.constexpr,
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return a block of what enters as it is now: of the inbox, or on the first rank of its own."""
    SIZE: tl.constexpr = WORDS * LANES
    start = tl.cast(block, tl.int64) * SIZE
    element = tl.arange(0, WORDS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    if NUMEL % SIZE == 0:
        there = (element >= 0) & ((receives | has_initial) != 0)
    else:
        there = (receives != 0) | ((element < NUMEL - start) & (has_initial != 0))
    return look(inbox + start, there, WORDS, LANES)


@triton.jit(do_not_specialize=FREE)
def elementwise_scan_kernel(
    update,
    log_decay,
    entering,
    leaving,
    inbox,
    outbox,
    room,
    room_before,
    epochs,
    status,
    broken,
    rank,
    first,
    last,
    resets,
    has_initial,
    writes_leaving,
    timeout_us,
    num_blocks,
    NUMEL: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KIND: tl.constexpr,
    UNROLL: tl.constexpr,
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
    PACK: tl.constexpr,
    RECEIVE: tl.constexpr,
    RECEIVE_KINDS: tl.constexpr,
    SCOPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Scan states whose elements don't mix: ``leaving = exp(log_decay) entering + update``.

    States are flat, [NUMEL]; blocks are runs of WORDS·LANES elements, the last one padded.
    """
    SIZE: tl.constexpr = WORDS * LANES
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    receives = (first == 0).to(tl.int32)
    element = tl.arange(0, WORDS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    u, g = load_rows(update, log_decay, program, NUMEL, K, V, KIND, WORDS, LANES)
    seen = look_at_block(inbox, program, receives, has_initial, NUMEL, WORDS, LANES)
    epoch, deadline, sends = begin(
        epochs, room, status, broken, rank, last, timeout_us, SCOPE, INTERPRETED
    )
    if resets != 0:
        # Nothing of what enters leaves, so nothing is waited for.
        never = tl.zeros([WORDS], tl.int32)
        for block in tl.range(program, num_blocks, programs):
            own, _ = load_rows(update, log_decay, block, NUMEL, K, V, "identity", WORDS, LANES)
            there = outbox + tl.cast(block, tl.int64) * SIZE
            send(there, own, never, sends, WORDS, LANES, SCOPE, INTERPRETED)
        sends = tl.cast(0, tl.int32)
    # Unrolled, so that what is read ahead needn't be moved, for which it would have to be there.
    for block in tl.range(program, num_blocks, programs, loop_unroll_factor=UNROLL):
        start = tl.cast(block, tl.int64) * SIZE
        # What the next step needs, and isn't looked at before; in the last one, anything.
        ahead = tl.minimum(block + programs, num_blocks - 1)
        next_u, next_g = load_rows(update, log_decay, ahead, NUMEL, K, V, KIND, WORDS, LANES)
        decay = tl.exp(g)
        bits, lost = receive(
            seen,
            inbox + start,
            receives,
            deadline,
            status,
            broken,
            begin_note(rank, block, epoch),
            WORDS,
            LANES,
            PACK,
            RECEIVE,
            RECEIVE_KINDS,
            INTERPRETED,
        )
        seen = look_at_block(inbox, ahead, receives, has_initial, NUMEL, WORDS, LANES)
        x = bits.to(u.dtype, bitcast=True)
        decayed = x if KIND == "identity" else decay * x
        y = tl.where(resets != 0, u, decayed + u)
        send(outbox + start, y, lost, sends, WORDS, LANES, SCOPE, INTERPRETED)
        inside = element < (NUMEL if NUMEL % SIZE == 0 else NUMEL - start)
        tl.store(entering + start + element, x, mask=inside, eviction_policy="evict_first")
        wanted = inside & (writes_leaving != 0)
        tl.store(leaving + start + element, y, mask=wanted, eviction_policy="evict_first")
        empty(inbox + start, lost, receives, WORDS, LANES, INTERPRETED)
        u, g = next_u, next_g
    finish(epochs, room_before, epoch, receives, SCOPE, INTERPRETED)


@triton.jit
def load_tile(matrix, rows, columns, NUM_ROWS: tl.constexpr, NUM_COLUMNS: tl.constexpr):
    """Return some rows and columns of a matrix; zeros outside it."""
    at = rows[:, None] * NUM_COLUMNS + columns[None, :]
    mask = (rows < NUM_ROWS)[:, None] & (columns < NUM_COLUMNS)[None, :]
    return tl.load(matrix + at, mask=mask, other=0.0)


@triton.jit
def split_matrices(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the four matrices of a tensor [ROWS, COLUMNS, 4]."""
    even, odd = tl.split(x.reshape(ROWS, COLUMNS, 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit(do_not_specialize=FREE)
def dense_scan_kernel(
    update,
    matrix,
    entering,
    leaving,
    inbox,
    outbox,
    room,
    room_before,
    epochs,
    status,
    broken,
    rank,
    first,
    last,
    resets,
    has_initial,
    writes_leaving,
    timeout_us,
    num_blocks,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STEP: tl.constexpr,
    HOLDS: tl.constexpr,
    PRECISION: tl.constexpr,
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
    PACK: tl.constexpr,
    RECEIVE: tl.constexpr,
    RECEIVE_KINDS: tl.constexpr,
    SCOPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Scan states [B·H, K, V] that are multiplied by matrices [B·H, K, K].

    A block is BV columns of a head, padded to [BK, BV], multiplied STEP channels at a time: longer sums
    on tensor cores are less exact. If the thread block HOLDS a whole matrix (of four such steps) in
    registers, it is read before the words have come. Else what entered is written out and read again,
    beside the matrix.
    """
    SIZE: tl.constexpr = WORDS * LANES
    GROUPS: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch, deadline, sends = begin(
        epochs, room, status, broken, rank, last, timeout_us, SCOPE, INTERPRETED
    )
    receives = (first == 0).to(tl.int32)
    element = tl.arange(0, WORDS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    row, column = element // BV, element % BV
    if resets != 0:
        never = tl.zeros([WORDS], tl.int32)
        for block in tl.range(program, num_blocks, programs):
            cols = (block % GROUPS) * BV + column
            at = tl.cast(block // GROUPS, tl.int64) * (K * V) + row * V + cols
            own = tl.load(update + at, mask=(row < K) & (cols < V), other=0.0)
            there = outbox + tl.cast(block, tl.int64) * SIZE
            send(there, own, never, sends, WORDS, LANES, SCOPE, INTERPRETED)
        sends = tl.cast(0, tl.int32)
    k, v = tl.arange(0, BK), tl.arange(0, BV)
    for block in tl.range(program, num_blocks, programs):
        head = tl.cast(block // GROUPS, tl.int64)
        start = tl.cast(block, tl.int64) * SIZE
        cols = (block % GROUPS) * BV + column
        at = head * (K * V) + row * V + cols
        inside = (row < K) & (cols < V)
        c = (block % GROUPS) * BV + v
        y = load_tile(update + head * (K * V), k, c, K, V)
        # The first rank's own lies as states do.
        where = tl.where(receives != 0, start + element, at)
        there = (receives != 0) | (inside & (has_initial != 0))
        seen = tl.load(inbox + where, mask=there, other=0, volatile=True)
        if HOLDS:
            whole = load_tile(matrix + head * (K * K), k, k, K, K)
            held = split_matrices(whole.reshape(BK, 4, STEP).permute(0, 2, 1), BK, STEP)
        bits, lost = receive(
            seen,
            inbox + start,
            receives,
            deadline,
            status,
            broken,
            begin_note(rank, block, epoch),
            WORDS,
            LANES,
            PACK,
            RECEIVE,
            RECEIVE_KINDS,
            INTERPRETED,
        )
        empty(inbox + start, lost, receives, WORDS, LANES, INTERPRETED)
        # Of a block all is lost or nothing: its channels are mixed, and where words lie changes.
        lost = tl.zeros([WORDS], tl.int32) + tl.max(lost, 0)
        x = bits.to(y.dtype, bitcast=True)
        tl.store(entering + at, x, mask=inside)
        if resets == 0:
            if HOLDS:
                parts = split_matrices(x.reshape(4, STEP, BV).permute(1, 2, 0), STEP, BV)
                for part in tl.static_range(0, 4):
                    y = tl.dot(
                        held[part], parts[part], acc=y, input_precision=PRECISION, out_dtype=y.dtype
                    )
            else:
                tl.debug_barrier()
                for begin_k in tl.range(0, K, STEP):
                    j = begin_k + tl.arange(0, STEP)
                    a = load_tile(matrix + head * (K * K), k, j, K, K)
                    b = load_tile(entering + head * (K * V), j, c, K, V)
                    y = tl.dot(a, b, acc=y, input_precision=PRECISION, out_dtype=y.dtype)
        out = y.reshape(WORDS, LANES)
        send(outbox + start, out, lost, sends, WORDS, LANES, SCOPE, INTERPRETED)
        tl.store(leaving + at, out, mask=inside & (writes_leaving != 0), cache_modifier=".cs")
    finish(epochs, room_before, epoch, receives, SCOPE, INTERPRETED)
