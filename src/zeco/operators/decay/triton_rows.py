"""How a call's tensors are arranged for the decay kernels, and their results brought back.

*Rows.* The kernels walk rows in chunks, and row t reads the state after row t. Each piece of packed
documents starts a chunk of its own. Strict queries read the state before their own token, so each
piece gets one row more: queries and outputs have the rows from its first, keys, values and gates those
from its second::

    tokens    |  0  1  2 | 3 |            strict, two pieces in chunks of 4
    queries   |  0  1  2  _ | 3  _  _  _ |
    keys      |  _  0  1  2 | _  3  _  _ |        _ zero rows, which leave a state as it is

*Slices.* The columns of a state don't mix. More of them than programs hold side by side become further
heads, which share queries, keys and gates and whose gradients are summed. Their number is brought to a
multiple of 8 with zeros, which rows of 16 bytes need.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from zeco.core.documents import Pieces
from zeco.core.errors import UnsupportedError
from zeco.operators.arguments import repeat_heads
from zeco.operators.layout import make_layout
from zeco.operators.segment import Inputs

if TYPE_CHECKING:
    from zeco.kernels.decay.plan import Plan

Ranges = tuple[tuple[int, int], ...]

# Few: with packed documents each holds two numbers a token on the device.
_KEPT = 16


class DecayOptions(Protocol):
    """What the segment reads of `zeco.operators.decay.segment.DecayOperator`."""

    @property
    def name(self) -> str:
        """The public name, for messages."""
        ...

    @property
    def kind(self) -> str:
        """Which decay: "identity", "scalar" or "diagonal"."""
        ...

    @property
    def scale(self) -> float:
        """Factor of the queries."""
        ...

    @property
    def strict(self) -> bool:
        """Whether queries read the state before their own token."""
        ...

    @property
    def operands(self) -> torch.dtype | None:
        """The dtype of the products' factors; None for that of q, k and v."""
        ...

    @property
    def results(self) -> torch.dtype | None:
        """The dtype of the outputs; None for that of q."""
        ...

    def state_shape(self, inputs: Inputs) -> tuple[int, int, int, int]:
        """Return [B, H, K, V] of the states."""
        ...


def why_not_triton(K: int, V: int, *dtypes: torch.dtype | None) -> str | None:
    """Return why the kernels don't take a call of the decay family; None if they do.

    Args:
        K: key dim.
        V: value dim.
        dtypes: of q, k, v and g.
    """
    from zeco.kernels.decay.plan import most_keys

    if torch.float64 in dtypes:
        return "the kernels don't compute in float64"
    most = most_keys(torch.float32 if torch.float32 in dtypes else torch.bfloat16)
    if K % 8 or not 0 < K <= most:
        return f"K={K} must be a multiple of 8 up to {most} with these dtypes"
    return None if V > 0 else "V is 0"


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


@lru_cache(maxsize=_KEPT)
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
        """Give numbers of each token [B, R, H] a copy for each slice, [B, R, H·n]."""
        return x if self.count == 1 else repeat_heads(x, x.shape[2] * self.count)

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

    >>> make_slices(136, 128)
    Slices(V=136, count=2, width=72)
    """
    count = -(-V // most)
    return Slices(V, count, -(-V // (8 * count)) * 8)


class Arrangement:
    """What a call's tensors are brought to, which is the same for all calls alike.

    Attributes:
        dtype: of q, k and v.
        rows, slices: the layout.
        scale, sign: the queries' factor; the kernels take its logarithm.
        plan: sizes and launch settings, once a call has needed them.
    """

    def __init__(self, dtype: torch.dtype, rows: Rows, slices: Slices, scale: float) -> None:
        self.dtype, self.rows, self.slices = dtype, rows, slices
        self.scale, self.sign = (scale, 1.0) if scale > 0 else (1.0, scale)
        self.plan: Plan | None = None


@lru_cache(maxsize=_KEPT)
def arrange(
    operator: DecayOptions,
    pieces: Pieces,
    shapes: tuple[torch.Size, torch.Size],
    dtypes: tuple[torch.dtype | None, ...],
    device: torch.device,
) -> Arrangement:
    """Return the arrangement of calls whose k and v have these shapes, q, k, v and g these dtypes."""
    *products, gates = dtypes
    dtype = operator.operands
    if dtype is None:
        dtype = reduce(torch.promote_types, cast("list[torch.dtype]", products))
    if gates == torch.float64:
        dtype = torch.float64
    K, V = shapes[0][3], shapes[1][3]
    reason = why_not_triton(K, V, dtype)
    if reason is not None:
        raise UnsupportedError(
            f"{operator.name}: backend 'triton' can't run this: {reason}; use backend='torch'"
        )
    from zeco.kernels.decay.plan import chunk_of, most_values

    # More of them a head than walks carry take longer than two heads with half of them each.
    slices = make_slices(V, most_values(dtype, K) or V)
    rows = make_rows(pieces, chunk_of(dtype, K), operator.strict, device)
    return Arrangement(dtype, rows, slices, operator.scale)
