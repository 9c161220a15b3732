"""States as rows, cut into pipeline blocks along a dim that belongs to the transition.

| transition | rows of a state [B, H, K, V] | what a row needs |
| --- | --- | --- |
| identity, scalar, diagonal | B·H·K rows of V | its log decay (none for identity) |
| dense | B·H·V rows of K (the state transposed) | its head's matrix, which mixes K |

A block is a range of rows, so the number of blocks isn't capped by one head's size. For dense
transitions it is whole heads or a part of one head's V.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from zeco.core.errors import ScheduleError
from zeco.core.schedule import Form
from zeco.core.transitions import Dense, Diagonal, Reset, Scalar, Transition

StateShape = tuple[int, int, int, int]


@dataclass(eq=False)
class Value:
    """One block of a register: a map, or (without parameters) a state.

    Attributes:
        rows: the update's rows [r, W].
        parameters: the transition's parameters for these rows; None makes it a state.
    """

    rows: Tensor
    parameters: Tensor | None

    @property
    def form(self) -> Form:
        """Whether this is a state or a map."""
        return Form.STATE if self.parameters is None else Form.MAP


class Algebra(ABC):
    """How maps of one kind act on blocks of rows.

    Args:
        shape: [B, H, K, V] of the states.
        num_blocks: blocks wanted; fewer are made when there aren't enough rows.
    """

    cuts: list[tuple[int, int]]
    """The range of rows of every block."""

    def __init__(self, shape: StateShape) -> None:
        self.shape = shape

    @property
    def num_blocks(self) -> int:
        """The number of blocks that there are."""
        return len(self.cuts)

    @abstractmethod
    def to_rows(self, state: Tensor) -> Tensor:
        """Lay out a state as contiguous rows; a view where possible."""

    @abstractmethod
    def from_rows(self, rows: Tensor) -> Tensor:
        """Undo `to_rows`."""

    @abstractmethod
    def parameters(self, transition: Transition, like: Tensor) -> list[Tensor]:
        """Return the transition's parameters block by block, in the dtype and device of ``like``."""

    @abstractmethod
    def apply(self, block: int, later: Value, earlier: Tensor, out: Tensor) -> None:
        """Write ``transition(earlier) + update`` for one block of rows into ``out``."""

    @abstractmethod
    def compose(self, block: int, later: Tensor, earlier: Tensor) -> Tensor:
        """Return the parameters of ``later ∘ earlier`` for one block."""


def _cut(length: int, pieces: int) -> list[tuple[int, int]]:
    """Cut a length into pieces that differ by at most one; there are no empty ones.

    >>> _cut(5, 2)
    [(0, 3), (3, 5)]
    """
    pieces = max(1, min(pieces, length))
    size, more = divmod(length, pieces)
    bounds = [i * size + min(i, more) for i in range(pieces + 1)]
    return list(pairwise(bounds))


class ElementwiseAlgebra(Algebra):
    """Identity, scalar and diagonal transitions: each row of V has a decay of its own.

    An identity's rows have log decays of 0 and a reset's of minus infinity, so that all of these
    compose with each other.
    """

    def __init__(self, shape: StateShape, num_blocks: int) -> None:
        super().__init__(shape)
        self.cuts = _cut(shape[0] * shape[1] * shape[2], num_blocks)

    def to_rows(self, state: Tensor) -> Tensor:
        return state.contiguous().view(-1, self.shape[3])

    def from_rows(self, rows: Tensor) -> Tensor:
        return rows.view(self.shape)

    def parameters(self, transition: Transition, like: Tensor) -> list[Tensor]:
        B, H, K, _ = self.shape
        match transition:
            case Reset():
                decays = like.new_full((B, H, K), -torch.inf)
            case Scalar(log_decay):
                decays = log_decay[..., None].expand(B, H, K)
            case Diagonal(log_decay):
                decays = log_decay
            case _:
                decays = like.new_zeros(B, H, K)
        rows = decays.reshape(-1)
        return [rows[start:stop] for start, stop in self.cuts]

    def apply(self, block: int, later: Value, earlier: Tensor, out: Tensor) -> None:
        decay = _required(later.parameters).exp()[:, None]
        torch.addcmul(later.rows, decay, earlier, out=out)

    def compose(self, block: int, later: Tensor, earlier: Tensor) -> Tensor:
        return later + earlier


class DenseAlgebra(Algebra):
    """Dense transitions: rows of K, a head's V of them, mixed by the head's matrix."""

    def __init__(self, shape: StateShape, num_blocks: int) -> None:
        super().__init__(shape)
        B, H, _, V = shape
        heads = B * H
        if num_blocks <= heads:
            self.cuts = [(start * V, stop * V) for start, stop in _cut(heads, num_blocks)]
        else:
            parts = _cut(V, -(-num_blocks // heads))
            self.cuts = [(h * V + a, h * V + b) for h in range(heads) for a, b in parts]

    def _heads(self, block: int) -> tuple[int, int]:
        start, stop = self.cuts[block]
        V = self.shape[3]
        return start // V, -(-stop // V)

    def to_rows(self, state: Tensor) -> Tensor:
        return state.mT.contiguous().view(-1, self.shape[2])

    def from_rows(self, rows: Tensor) -> Tensor:
        B, H, K, V = self.shape
        return rows.view(B, H, V, K).mT.contiguous()

    def parameters(self, transition: Transition, like: Tensor) -> list[Tensor]:
        B, H, K, _ = self.shape
        if isinstance(transition, Dense):
            matrices = transition.matrix.reshape(B * H, K, K)
        else:
            matrices = like.new_zeros(B * H, K, K)
        return [matrices[slice(*self._heads(block))] for block in range(self.num_blocks)]

    def apply(self, block: int, later: Value, earlier: Tensor, out: Tensor) -> None:
        matrices = _required(later.parameters)
        heads, K = matrices.shape[0], self.shape[2]
        product = torch.baddbmm(
            later.rows.view(heads, -1, K), earlier.view(heads, -1, K), matrices.mT
        )
        out.copy_(product.view(-1, K))

    def compose(self, block: int, later: Tensor, earlier: Tensor) -> Tensor:
        return later @ earlier


def make_algebra(transition: Transition, shape: StateShape, num_blocks: int) -> Algebra:
    """Return the algebra of a transition's kind (of ``among``, for a `Reset`).

    >>> from zeco.core.transitions import Identity
    >>> make_algebra(Identity(), (1, 2, 4, 8), 3).cuts
    [(0, 3), (3, 6), (6, 8)]
    """
    kind = transition.among if isinstance(transition, Reset) else transition.kind
    if kind == Dense.kind:
        return DenseAlgebra(shape, num_blocks)
    return ElementwiseAlgebra(shape, num_blocks)


def _required(parameters: Tensor | None) -> Tensor:
    if parameters is None:
        raise ScheduleError("a state was composed as if it were a map")
    return parameters
