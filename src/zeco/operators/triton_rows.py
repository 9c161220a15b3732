"""How a call's tensors are arranged for the decay kernels, and their results brought back.

*Rows.* The kernels walk rows in chunks, and row t reads the state after row t. Each piece of packed
documents starts a chunk of its own. Strict queries read the state before their own token, so each
piece gets one row more: queries and outputs have the rows from its first, keys, values and gates those
from its second::

    tokens    |  0  1  2 | 3 |            strict, two pieces in chunks of 4
    queries   |  0  1  2  _ | 3  _  _  _ |
    keys      |  _  0  1  2 | _  3  _  _ |        _ zero rows, which leave a state as it is

*Slices.* The columns of a state don't mix. More of them than the kernels take become further heads,
for which queries, keys and gates are repeated and their gradients summed. Their number is brought to a
multiple of 8 with zeros, which rows of 16 bytes need.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from zeco.core.documents import Pieces
from zeco.operators.arguments import repeat_heads
from zeco.operators.layout import make_layout

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Rows:
    """Which of R rows hold the tokens.

    Attributes:
        num_rows: R.
        ranges: for each piece, its first chunk and one past its last.
        queries: the rows [T] of queries and outputs; None when the rows are the tokens.
        keys: the rows [T] of keys, values and gates.
    """

    num_rows: int
    ranges: Ranges
    queries: Tensor | slice | None
    keys: Tensor | slice | None

    def spread(self, x: Tensor, rows: Tensor | slice | None) -> Tensor:
        """Bring tokens [B, T, ...] to their rows [B, R, ...], zeros in the others."""
        if rows is None:
            return x
        spread = x.new_zeros(x.shape[0], self.num_rows, *x.shape[2:])
        if isinstance(rows, slice):
            spread[:, rows] = x
            return spread
        return spread.index_copy_(1, rows, x)

    def collect(self, y: Tensor, rows: Tensor | slice | None) -> Tensor:
        """Take the tokens [B, T, ...] back out of their rows [B, R, ...]."""
        if rows is None:
            return y
        return y[:, rows] if isinstance(rows, slice) else y.index_select(1, rows)


@lru_cache(maxsize=256)
def make_rows(pieces: Pieces, chunk: int, strict: bool, device: torch.device) -> Rows:
    """Lay the pieces' tokens into rows.

    Args:
        pieces: the documents' pieces.
        chunk: rows a chunk.
        strict: whether queries read the state before their own token.
        device: where the tensors of the result live.

    >>> from zeco.core.documents import local_pieces
    >>> rows = make_rows(local_pieces([0, 3, 4], 0, 4), 4, True, torch.device("cpu"))
    >>> rows.queries, rows.keys, rows.ranges
    (tensor([0, 1, 2, 4]), tensor([1, 2, 3, 5]), ((0, 1), (1, 2)))
    """
    T = pieces.num_tokens
    lengths = torch.tensor(pieces.bounds).diff()
    if strict:
        lengths += lengths > 0
    bounds = (0, *lengths.cumsum(0).tolist())
    layout = make_layout(
        Pieces(bounds, pieces.documents, pieces.continued, pieces.continues), chunk
    )
    if T == 0 or (not strict and all(bound % chunk == 0 for bound in bounds[:-1])):
        return Rows(T, layout.ranges, None, None)
    if len(lengths) == 1:
        return Rows(T + 1, layout.ranges, slice(0, T), slice(1, T + 1))
    starts = torch.tensor([first * chunk for first, _ in layout.ranges])
    shift = starts - torch.tensor(pieces.bounds[:-1])
    rows = torch.arange(T) + shift.repeat_interleave(torch.tensor(pieces.bounds).diff())
    queries, keys = rows.to(device), (rows + int(strict)).to(device)
    return Rows(layout.num_chunks * chunk, layout.ranges, queries, keys)


@dataclass(frozen=True)
class Slices:
    """How V columns become ``count`` heads in place of one, of ``width`` columns; zeros at the end."""

    V: int
    count: int
    width: int

    def repeat(self, x: Tensor) -> Tensor:
        """Give queries, keys or gates [B, R, H, K] a copy for each slice, [B, R, H·n, K]."""
        return x if self.count == 1 else repeat_heads(x, x.shape[2] * self.count)

    def add(self, gradient: Tensor) -> Tensor:
        """Sum gradients [B, R, H·n, K] over the slices, in fp32."""
        if self.count == 1:
            return gradient
        return gradient.unflatten(2, (-1, self.count)).sum(3, dtype=torch.float32)

    def cut(self, values: Tensor) -> Tensor:
        """Cut values [B, R, H, V] into [B, R, H·n, W]."""
        return values if self._whole else self._cut(values).flatten(2, 3)

    def join(self, values: Tensor) -> Tensor:
        """Undo `cut`."""
        if self._whole:
            return values
        return values.unflatten(2, (-1, self.count)).flatten(3)[..., : self.V]

    def cut_states(self, states: Tensor) -> Tensor:
        """Cut states [..., H, K, V] into [..., H·n, K, W]."""
        return states if self._whole else self._cut(states).transpose(-3, -2).flatten(-4, -3)

    def join_states(self, states: Tensor) -> Tensor:
        """Undo `cut_states`."""
        if self._whole:
            return states
        joined = states.unflatten(-3, (-1, self.count)).transpose(-3, -2).flatten(-2)
        return joined[..., : self.V]

    @property
    def _whole(self) -> bool:
        return self.count == 1 and self.width == self.V

    def _cut(self, x: Tensor) -> Tensor:
        missing = self.count * self.width - self.V
        x = F.pad(x, (0, missing)) if missing else x
        return x.unflatten(-1, (self.count, self.width))


@lru_cache(maxsize=256)
def make_slices(V: int, most: int) -> Slices:
    """Cut V columns into the fewest slices of at most ``most``, a multiple of 8 wide.

    >>> make_slices(264, 256)
    Slices(V=264, count=2, width=136)
    """
    count = -(-V // most)
    return Slices(V, count, -(-V // (8 * count)) * 8)
