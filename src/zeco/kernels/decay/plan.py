"""Plans of the decay kernels: how a call's tokens and channels are cut over programs."""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeco.core.errors import UnsupportedError
from zeco.kernels.decay.cuts import ROW_BYTES, STATE_NUMBERS, Cuts, cut_programs

if TYPE_CHECKING:  # sizes are known without Triton
    from zeco.kernels.launch import Launches

# Base-2 totals below which a channel of a chunk is strong: half of it must leave room in the
# operands' dtype. fp16 ends at 2^16.
_LIMITS = {torch.bfloat16: -120.0, torch.float16: -23.0, torch.float32: -120.0}
_MAX_WIDE_KEYS = 256
# Of which programs carry states in registers; in fp32 shared memory ends there too.
_MAX_WALKED_DIM = 128

Ranges = tuple[tuple[int, int], ...]
# A size and its strides.
Layout = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Plan:
    """Sizes and launch settings of one call.

    Attributes:
        B, T, H, K, V: sizes.
        group: heads of v that share one of q, k and diagonal decays.
        chunk: tokens a chunk.
        num_segments: runs of chunks that programs walk side by side, breaks included.
        chunks_per_segment: most chunks a segment.
        table: int32 [2, S+1] if documents are packed: the first chunk of each segment and the number
            of chunks; the place among the breaks of those segments that are one, -1 for others.
        breaks: the segments that are breaks, in order; see `zeco.kernels.decay.state`.
        form: how gates are summed; see `zeco.kernels.decay.gate_sums.read_gates`.
        exact: whether products are made in fp32.
        packed: whether the state pass leaves what rows are scaled by, for later passes to read in place
            of the gates.
        limit: base-2 total below which a channel is strong.
        cuts: how programs are cut.
        multiprocessors: those of the device.
    """

    B: int
    T: int
    H: int
    K: int
    V: int
    group: int
    chunk: int
    num_segments: int
    chunks_per_segment: int
    form: int
    exact: bool
    packed: bool
    limit: float
    cuts: Cuts
    multiprocessors: int
    table: Tensor | None = None
    breaks: tuple[int, ...] = ()

    @cached_property
    def launches(self) -> Launches:
        """Launches of kernels with this plan."""
        return {}

    @cached_property
    def heads(self) -> int:
        """Heads of all sequences."""
        return self.B * self.H

    @cached_property
    def num_chunks(self) -> int:
        """Chunks of a sequence."""
        return -(-self.T // self.chunk)

    @cached_property
    def chunk_rows(self) -> Layout:
        """Rows [B, N, H, K] of a number for each channel of a chunk, laid as [B·H, N, K]."""
        N, H, K = self.num_chunks, self.H, self.K
        return (self.B, N, H, K), (H * N * K, K, N * K, 1)

    @cached_property
    def pull_rows(self) -> Layout:
        """Rows [1, K, B·H·N, C] of a number for each token of a channel, laid as [B·H, N, K, C]."""
        count, K, C = self.heads * self.num_chunks, self.K, self.chunk
        return (1, K, count, C), (count * K * C, C, K * C, 1)

    @cached_property
    def block_k(self) -> int:
        """The key dim's channels in a block."""
        return _block(self.K, exact=self.exact)

    @cached_property
    def block_v(self) -> int:
        """The value dim's channels in a block."""
        return _block(self.V, exact=self.exact)

    @cached_property
    def split_k(self) -> int:
        """Channels of the key dim a program of a gradient pass."""
        if self.cuts.chunkwise is not None:
            return self.cuts.chunkwise.gradient.width
        return self.cuts.gradient.split(self.block_k, self.block_v)

    @cached_property
    def pieces(self) -> int:
        """Pieces of 16 bits in which states enter the products that the gates' gradient is made of."""
        return 2 if self.packed else 1

    @cached_property
    def key_blocks(self) -> int:
        """Programs of a gradient pass a segment, each with its channels of the key dim."""
        return -(-self.K // self.split_k)

    @cached_property
    def split_v(self) -> int:
        """Channels of the value dim a program of an output pass."""
        return self.cuts.output.split(self.block_v, self.block_k)

    @cached_property
    def counts(self) -> tuple[int, int, int, int, int]:
        """What every walking kernel is told: H, B·H, chunks, segments, chunks a segment."""
        return (
            self.H,
            self.heads,
            self.num_chunks,
            self.num_segments,
            self.chunks_per_segment,
        )

    @cached_property
    def single_chunks(self) -> tuple[int, int, int, int, int]:
        """The same where segments are single chunks."""
        return (self.H, self.heads, self.num_chunks, self.num_chunks, 1)


def _block(width: int, *, exact: bool) -> int:
    """Return the channels of a block that holds a dim: a power of two."""
    return max(ROW_BYTES // (4 if exact else 2), 1 << (width - 1).bit_length())


def make_plan(
    q: Tensor,
    v: Tensor,
    g: Tensor | None,
    *,
    num_segments: int | None = None,
    chunk: int | None = None,
    ranges: Ranges | None = None,
    continued: bool = True,
) -> Plan:
    """Return the plan of a call.

    Args:
        q: [B, T, H, K], as k; H may be a divisor of that of v.
        v: [B, T, H, V].
        g: gates [B, T, H, K], as many heads as q; for `zeco.kernels.scalar` [B, T, H], as many as v, or
            None.
        num_segments: overrides the number of segments that fills the device.
        chunk: overrides the tokens a chunk.
        ranges: for packed documents, the first chunk of every piece and one past its last.
        continued: whether the first piece goes on from the state that enters.

    Raises:
        UnsupportedError: sizes or dtypes that the kernels don't take.
    """
    _check(q, v, g)
    gates = None if g is None else (g.ndim, g.dtype)
    sizes = (*q.shape, *v.shape[2:])
    return _plan(sizes, q.dtype, gates, num_segments, chunk, ranges, continued, q.device)


@lru_cache(maxsize=256)
def _plan(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    gates: tuple[int, torch.dtype] | None,
    num_segments: int | None,
    chunk: int | None,
    ranges: Ranges | None,
    continued: bool,
    device: torch.device,
) -> Plan:
    B, T, Hk, K, H, V = sizes
    exact, chunkwise = dtype == torch.float32, is_chunkwise(dtype, K)
    chunk = chunk or chunk_of(dtype, K)
    ranges = ranges or ((0, -(-T // chunk)),)
    diagonal = gates is not None and gates[0] == 4
    # In fp16, whose range is small, a pair of scales that cancel doesn't serve a strong channel.
    packed = dtype == torch.bfloat16
    cuts = cut_programs(K, V, dtype, diagonal=diagonal, chunkwise=chunkwise)
    plan = Plan(
        B=B,
        T=T,
        H=H,
        K=K,
        V=V,
        group=H // Hk,
        chunk=chunk,
        num_segments=1,
        chunks_per_segment=-(-T // chunk),
        form=0 if exact else (1 if diagonal and gates == (4, torch.bfloat16) else 2),
        exact=exact,
        packed=packed,
        limit=_LIMITS[dtype],
        cuts=cuts,
        multiprocessors=_multiprocessors(device),
    )
    if num_segments is None:
        counts = tuple(stop - first for first, stop in ranges)
        longest = _longest_segment(_programs(plan), counts, plan.multiprocessors)
    else:
        longest = -(-plan.num_chunks // min(num_segments, plan.num_chunks))
    if continued and len(ranges) == 1:
        count = -(-plan.num_chunks // longest)
        return replace(plan, num_segments=count, chunks_per_segment=longest)
    table, breaks = _cut(ranges, continued, longest, device)
    return replace(
        plan,
        num_segments=table.shape[1] - 1,
        chunks_per_segment=longest,
        table=table,
        breaks=breaks,
    )


def is_chunkwise(dtype: torch.dtype, K: int) -> bool:
    """Return whether states are written for every chunk, so that passes take chunks alone.

    So they are with more channels of the keys than walks can carry states of: wide ones.
    """
    return dtype != torch.float32 and K > _MAX_WALKED_DIM


def chunk_of(dtype: torch.dtype, K: int) -> int:
    """Return the tokens a chunk for inputs of a dtype, with K channels of the keys."""
    if is_chunkwise(dtype, K):
        return 128
    return 32 if dtype == torch.float32 else 64


def most_keys(dtype: torch.dtype) -> int:
    """Return the most channels of the keys for inputs of a dtype."""
    return _MAX_WALKED_DIM if dtype == torch.float32 else _MAX_WIDE_KEYS


def most_values(dtype: torch.dtype, K: int) -> int | None:
    """Return the most channels of the values beside K of the keys; None for any."""
    return None if is_chunkwise(dtype, K) else _MAX_WALKED_DIM


def _check(q: Tensor, v: Tensor, g: Tensor | None) -> None:
    remedy = "use backend='torch'"
    K, V = q.shape[3], v.shape[3]
    if q.dtype not in _LIMITS or v.dtype != q.dtype:
        raise UnsupportedError(
            f"triton kernels: q has dtype {q.dtype} and v {v.dtype}, but both must be the same of "
            f"bfloat16, float16 and float32; cast them or {remedy}"
        )
    if g is not None and g.dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError(
            f"triton kernels: g has dtype {g.dtype}, but must be float32 or bfloat16; cast it"
        )
    most_k, most_v = most_keys(q.dtype), most_values(q.dtype, K)
    if K % 8 or V % 8 or most_k < K or (most_v is not None and most_v < V):
        limit = "" if most_v is None else f" and V up to {most_v}"
        raise UnsupportedError(
            f"triton kernels: K={K} and V={V}, but both must be multiples of 8, K up to {most_k}{limit} "
            f"in {q.dtype}; {remedy}"
        )


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter: enough for several segments
    return torch.cuda.get_device_properties(device).multi_processor_count


def _programs(plan: Plan) -> tuple[int, ...]:
    """Return the programs a segment of each kind of walk, of 8 warps; one of 4 is half a program."""
    if plan.cuts.chunkwise is not None:
        return (plan.heads * max(1, plan.block_k * plan.block_v // STATE_NUMBERS),)
    warps = (
        -(-plan.V // plan.split_v) * plan.cuts.output.num_warps,
        plan.key_blocks * plan.cuts.gradient.num_warps,
    )
    return tuple(-(-plan.heads * count // 8) for count in warps)


def _longest_segment(programs: tuple[int, ...], counts: tuple[int, ...], slots: int) -> int:
    """Return the chunks of a segment with the shortest walks, counting two for each start.

    Args:
        programs: programs a segment, of each kind of walk.
        counts: chunks of each piece.
        slots: programs that run at once.
    """
    total = sum(counts)

    def cost(longest: int) -> tuple[int, int]:
        segments = sum(-(-count // longest) for count in counts)
        waves = sum(-(-number * segments // slots) for number in programs)
        return waves * (longest + 2), -longest

    most = min(total, max(1, 2 * slots // min(programs)))
    return min({-(-total // segments) for segments in range(1, most + 1)}, key=cost)


def _cut(
    ranges: Ranges, continued: bool, longest: int, device: torch.device
) -> tuple[Tensor, tuple[int, ...]]:
    """Return a plan's table and breaks: pieces in segments of at most ``longest`` chunks."""
    firsts: list[int] = []
    places: list[int] = []
    breaks: list[int] = []
    for piece, (first, stop) in enumerate(ranges):
        if piece or not continued:
            breaks.append(len(firsts))
            firsts.append(first)
            places.append(len(breaks) - 1)
        segments = range(first, stop, longest)
        firsts += segments
        places += [-1] * len(segments)
    table = [[*firsts, ranges[-1][1]], [*places, -1]]
    return torch.tensor(table, dtype=torch.int32).to(device), tuple(breaks)
