"""How programs of the decay kernels are cut: channels, warps and loads in flight, by a call's sizes."""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch

STATE_NUMBERS = 128 * 128
"""Numbers of fp32 that a program of 8 warps holds without spilling."""

# Bytes of the narrowest blocks' rows. With rows of 64 kernels have made illegal accesses on an H200 and
# wrong gradients; for one, ptxas 12.8 had taken products' descriptors from a register that it writes
# only later. With fewer, a chunk's row of ratios is too short for where tensor-memory copies may go.
ROW_BYTES = 128


@dataclass(frozen=True)
class Pairs:
    """How the programs for pairs in strong chunks are cut.

    Attributes:
        width_k, width_v: channels a step.
        num_warps: warps a program.
        resident: programs a multiprocessor.
        registers: most a thread, so that as many fit.
    """

    width_k: int
    width_v: int
    num_warps: int
    resident: int
    registers: int


@dataclass(frozen=True)
class Walk:
    """How the programs of a walking pass are cut.

    Attributes:
        numbers: numbers of the state that a program holds.
        num_warps: warps a program.
        stages: loads in flight.
    """

    numbers: int
    num_warps: int
    stages: int

    def split(self, own: int, other: int) -> int:
        """Return the channels of one dim a program holds, where all of the other are needed.

        At most 16 a warp, which are what a warp's products take at a time.
        """
        return min(own, max(ROW_BYTES // 2, min(16 * self.num_warps, self.numbers // other)))


# In 16 bits, the quickest of a few on an H200: two programs of 4 warps a multiprocessor where their
# loads leave room, else one of 8.
_WHOLE = Walk(STATE_NUMBERS, num_warps=8, stages=3)
_HALF = Walk(STATE_NUMBERS // 2, num_warps=4, stages=2)
# The same for K and V up to 64.
_SMALL = Walk(STATE_NUMBERS, num_warps=4, stages=3)
_SMALL_SCALAR_OUTPUT = Walk(STATE_NUMBERS, num_warps=4, stages=2)


@dataclass(frozen=True)
class Tiles:
    """How the programs of a pass over single chunks are cut.

    Attributes:
        width: channels of the result a program.
        step: channels that it sums over at a time.
        num_warps: warps a program.
        stages: loads in flight.
    """

    width: int
    step: int
    num_warps: int
    stages: int


@dataclass(frozen=True)
class Chunkwise:
    """How the passes of wide keys are cut; see `zeco.kernels.chunkwise.pass_kernels`.

    Attributes:
        output: the output pass and the one for dv.
        gradient: the passes for dq and dk.
    """

    output: Tiles
    gradient: Tiles


# The quickest of a few on an H200.
_TILES = Tiles(width=128, step=64, num_warps=8, stages=4)
_WIDE_TILES = Tiles(width=256, step=32, num_warps=8, stages=5)
_PAIRS = Pairs(width_k=64, width_v=64, num_warps=4, resident=3, registers=168)
_PAIRS_BWD = Pairs(width_k=64, width_v=64, num_warps=4, resident=2, registers=255)
# Of chunks of 128 tokens.
_CHUNKWISE_PAIRS = Pairs(width_k=64, width_v=64, num_warps=8, resident=1, registers=255)


@dataclass(frozen=True)
class Cuts:
    """How all programs of a call are cut.

    Attributes:
        state_stages, state_warps: loads in flight and warps of the state pass.
        output: the output pass and the one for dv.
        gradient: the passes for dq and dk.
        pairs, pairs_bwd: the kernels for pairs in strong chunks.
        chunkwise: the passes that stand in for output and gradient with wide keys; else None.
    """

    state_stages: int
    state_warps: int
    output: Walk
    gradient: Walk
    pairs: Pairs
    pairs_bwd: Pairs
    chunkwise: Chunkwise | None


def cut_programs(K: int, V: int, dtype: torch.dtype, *, diagonal: bool, chunkwise: bool) -> Cuts:
    """Return how a call's programs are cut.

    Args:
        K, V: channels of keys and values.
        dtype: of both.
        diagonal: whether decays differ by channel.
        chunkwise: whether chunks are taken alone.
    """
    exact, warps = dtype == torch.float32, 8 if max(K, V) > 64 else 4
    if exact:
        output = gradient = Walk(STATE_NUMBERS, warps, 1)
    elif diagonal and dtype == torch.float16:
        output = gradient = Walk(STATE_NUMBERS, warps, 2)
    elif max(K, V) <= 64:
        output, gradient = _SMALL if diagonal else _SMALL_SCALAR_OUTPUT, _SMALL
    else:
        # An output pass holds all key channels, a gradient pass all value channels.
        output, gradient = _WHOLE if diagonal else _HALF, _HALF
    return Cuts(
        # By channel a fourth is more than shared memory holds.
        state_stages=1 if exact else (3 if diagonal else 4),
        # By head a product's rows are the fewer channels, of which a warp takes 16.
        state_warps=warps if diagonal or min(K, V) > 64 else 4,
        output=output,
        gradient=gradient,
        pairs=_CHUNKWISE_PAIRS if chunkwise else _PAIRS,
        pairs_bwd=_CHUNKWISE_PAIRS if chunkwise else _PAIRS_BWD,
        chunkwise=_cut_chunkwise(V, diagonal=diagonal) if chunkwise else None,
    )


def _cut_chunkwise(V: int, *, diagonal: bool) -> Chunkwise:
    # By channel a gradient pass needs the registers that a wider tile would take.
    return Chunkwise(
        output=_WIDE_TILES if V > 128 else _TILES,
        gradient=_TILES if diagonal else _WIDE_TILES,
    )
