"""How the tokens of a call lie in runs: stretches of chunks whose states are computed side by side.

A pass that carries a state walks its chunks one after the other, so one long sequence of few heads
keeps few multiprocessors busy. Cut into runs, whose maps give each the state that enters it, it
keeps many. Runs are what Flash Linear Attention's kernels take for packed sequences::

    pieces    |   document 3                 | 4 |   document 5        |
    runs      |  0       |  1       |  2     | 3 |  4       |  5       |
    chunks    |  0 .. 15 |  0 .. 15 |  0 .. 7| 0 |  0 .. 15 |  0 .. 9  |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

MIN_CHUNKS = 16
"""Fewest chunks of a run in a sequence that is cut: below, composing maps costs more than it saves."""


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of sequences that lie one behind the other.

    Attributes:
        ranges: for each sequence, its first run and one past its last.
        cu_seqlens: cut points of the runs among the tokens, int32 [N+1].
        chunk_indices: for each chunk, its run and its place there, int32 [chunks, 2].
        chunk_offsets: chunks before each run, int32 [N+1].
    """

    ranges: tuple[tuple[int, int], ...]
    cu_seqlens: Tensor
    chunk_indices: Tensor
    chunk_offsets: Tensor

    @property
    def num_runs(self) -> int:
        """N."""
        return self.ranges[-1][1]


def chunks_per_run(chunks: int, programs: int, wanted: int) -> int:
    """Return how long runs are, for ``wanted`` programs at once of ``programs`` a sequence.

    >>> chunks_per_run(256, programs=32, wanted=256)
    32
    >>> chunks_per_run(256, programs=512, wanted=256)
    256
    """
    return max(MIN_CHUNKS, -(-chunks * programs // max(programs, wanted)))


@lru_cache(maxsize=64)
def make_runs(bounds: tuple[int, ...], length: int, chunk: int, device: torch.device) -> Runs:
    """Cut sequences into runs of about equally many chunks.

    Args:
        bounds: cut points 0 = b[0] <= ... <= b[S] of the sequences among the tokens.
        length: most chunks a run.
        chunk: tokens a chunk.
        device: where the kernels run.

    >>> runs = make_runs((0, 300, 300, 310), 2, 64, torch.device("cpu"))
    >>> runs.ranges, runs.cu_seqlens.tolist()
    (((0, 3), (3, 4), (4, 5)), [0, 128, 256, 300, 300, 310])
    """
    ranges: list[tuple[int, int]] = []
    cuts = [0]
    for start, stop in pairwise(bounds):
        chunks = -(-(stop - start) // chunk)
        count = max(1, -(-chunks // length))
        step = -(-chunks // count) * chunk
        ends = [*range(start + step, stop, step), stop] if step else [stop]
        ranges.append((len(cuts) - 1, len(cuts) - 1 + len(ends)))
        cuts += ends
    chunks_of = [-(-(stop - start) // chunk) for start, stop in pairwise(cuts)]
    indices = [(run, place) for run, chunks in enumerate(chunks_of) for place in range(chunks)]
    offsets = [0]
    for chunks in chunks_of:
        offsets.append(offsets[-1] + chunks)
    cu_seqlens, chunk_offsets = torch.tensor([cuts, offsets], dtype=torch.int32).unbind()
    chunk_indices = torch.tensor(indices, dtype=torch.int32).view(-1, 2)
    return Runs(
        tuple(ranges),
        cu_seqlens.to(device, copy=True),
        chunk_indices.to(device),
        chunk_offsets.to(device, copy=True),
    )
