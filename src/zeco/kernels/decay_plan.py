"""Plans of the decay kernels: how a call's tokens and channels are cut over programs."""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zeco.core.errors import UnsupportedError

# Base-2 totals below which a channel of a chunk is strong: half of it must leave room in the
# operands' dtype. fp16 ends at 2^16.
_LIMITS = {torch.bfloat16: -120.0, torch.float16: -23.0, torch.float32: -120.0}
_MAX_DIM = 256
_MAX_EXACT_DIM = 128  # fp32: shared memory ends there
_STATE_NUMBERS = 128 * 128  # of fp32 that a program of 8 warps holds without spilling


@dataclass(frozen=True)
class Plan:
    """Sizes and launch settings of one call.

    Attributes:
        B, T, H, K, V: sizes.
        chunk: tokens a chunk.
        num_segments: runs of chunks that programs walk side by side.
        chunks_per_segment: chunks a segment, the last may have fewer.
        form: how gates are summed; see `zeco.kernels.gate_sums.read_gates`.
        exact: whether products are made in fp32.
        limit: base-2 total below which a channel is strong.
        state_stages, walk_stages: loads in flight of the state pass and of the walking passes.
        num_warps: warps a program.
        pair_width, pair_bwd_width: channels a step of the kernels for pairs in strong chunks.
    """

    B: int
    T: int
    H: int
    K: int
    V: int
    chunk: int
    num_segments: int
    chunks_per_segment: int
    form: int
    exact: bool
    limit: float
    state_stages: int
    walk_stages: int
    num_warps: int
    pair_width: int = 128
    pair_bwd_width: int = 64

    @property
    def heads(self) -> int:
        """Heads of all sequences."""
        return self.B * self.H

    @property
    def num_chunks(self) -> int:
        """Chunks of a sequence."""
        return -(-self.T // self.chunk)

    @property
    def block_k(self) -> int:
        """The key dim as a power of two."""
        return max(16, 1 << (self.K - 1).bit_length())

    @property
    def block_v(self) -> int:
        """The value dim as a power of two."""
        return max(16, 1 << (self.V - 1).bit_length())

    @property
    def split_k(self) -> int:
        """Channels of the key dim a program, where all of V is needed."""
        return min(self.block_k, max(32, _STATE_NUMBERS // self.block_v))

    @property
    def split_v(self) -> int:
        """Channels of the value dim a program, where all of K is needed."""
        return min(self.block_v, max(32, _STATE_NUMBERS // self.block_k))


def make_plan(
    q: Tensor, v: Tensor, g: Tensor, *, num_segments: int | None = None, chunk: int | None = None
) -> Plan:
    """Return the plan of a call.

    Args:
        q: [B, T, H, K], as k.
        v: [B, T, H, V].
        g: gates [B, T, H, K].
        num_segments: overrides the number of segments that fills the device.
        chunk: overrides the tokens a chunk.

    Raises:
        UnsupportedError: sizes or dtypes that the kernels don't take.
    """
    B, T, H, K = q.shape
    V = v.shape[3]
    _check(q, v, g)
    exact = q.dtype == torch.float32
    form = 0 if exact else (1 if g.dtype == torch.bfloat16 else 2)
    chunk = chunk or (32 if exact else 64)
    plan = Plan(
        B=B,
        T=T,
        H=H,
        K=K,
        V=V,
        chunk=chunk,
        num_segments=1,
        chunks_per_segment=-(-T // chunk),
        form=form,
        exact=exact,
        limit=_LIMITS[q.dtype],
        state_stages=1 if exact else 3,
        walk_stages=1 if exact else (3 if max(K, V) <= 128 else 1),
        num_warps=8 if max(K, V) > 64 else 4,
    )
    splits = max(plan.block_v // plan.split_v, plan.block_k // plan.split_k)
    if num_segments is None:
        num_segments = _fill(plan.heads * splits, plan.num_chunks, _multiprocessors(q.device))
    per_segment = -(-plan.num_chunks // min(num_segments, plan.num_chunks))
    segments = -(-plan.num_chunks // per_segment)
    return replace(plan, num_segments=segments, chunks_per_segment=per_segment)


def max_dim(dtype: torch.dtype) -> int:
    """Return the largest key or value dim for inputs of a dtype."""
    return _MAX_EXACT_DIM if dtype == torch.float32 else _MAX_DIM


def _check(q: Tensor, v: Tensor, g: Tensor) -> None:
    remedy = "use backend='torch'"
    K, V = q.shape[3], v.shape[3]
    if q.dtype not in _LIMITS or v.dtype != q.dtype:
        raise UnsupportedError(
            f"triton kernels: q has dtype {q.dtype} and v {v.dtype}, but both must be the same of "
            f"bfloat16, float16 and float32; cast them or {remedy}"
        )
    if g.dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError(
            f"triton kernels: g has dtype {g.dtype}, but must be float32 or bfloat16; cast it"
        )
    most = max_dim(q.dtype)
    if K % 8 or V % 8 or most < K or most < V:
        raise UnsupportedError(
            f"triton kernels: K={K} and V={V}, but both must be multiples of 8 up to {most} in "
            f"{q.dtype}; {remedy}"
        )


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter: enough for several segments
    return torch.cuda.get_device_properties(device).multi_processor_count


def _fill(programs: int, num_chunks: int, slots: int) -> int:
    """Return the number of segments with the shortest walk, counting two chunks for each start."""

    def cost(segments: int) -> tuple[int, int]:
        waves = -(-programs * segments // slots)
        return waves * (-(-num_chunks // segments) + 2), segments

    return min(range(1, min(num_chunks, max(1, 2 * slots // programs)) + 1), key=cost)
