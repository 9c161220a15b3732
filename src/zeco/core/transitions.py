"""The linear part of a segment's affine map, ``leaving = transition(entering) + update``.

| class | acts on a state [B, H, K, V] as | parameters |
| --- | --- | --- |
| `Identity` | itself | none |
| `Scalar` | ``exp(log_decay)`` a head | log_decay [B, H] |
| `Diagonal` | ``exp(log_decay)`` a key channel | log_decay [B, H, K] |
| `Dense` | ``matrix @ state`` | matrix [B, H, K, K] |
| `Reset` | zero: a document starts inside the segment | none |

Compositions are written in the order of function application: ``a.after(b)`` applies b first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zeco.core.errors import ArgumentError
from zeco.core.shapes import check_shapes


class Transition(ABC):
    """A linear map of states [B, H, K, V]; see the module's table for the kinds."""

    kind: ClassVar[str]

    @abstractmethod
    def __call__(self, state: Tensor) -> Tensor:
        """Apply the map to a state [B, H, K, V]."""

    @abstractmethod
    def transpose(self) -> Transition:
        """Return the adjoint map."""

    @abstractmethod
    def gradient(self, adjoint: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient of each parameter, given that of the output and the input state."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The tensors that define the map, in a fixed order."""
        return ()

    def with_parameters(self, parameters: tuple[Tensor, ...]) -> Transition:
        """Return the same kind of map over other tensors."""
        return type(self)(*parameters)

    def check(self, state: Tensor) -> None:
        """Refuse a state whose shape, dtype or device does not fit the parameters."""
        for parameter in self.parameters:
            if parameter.dtype != state.dtype:
                raise ArgumentError(
                    f"transition {self.kind}: dtype {parameter.dtype} differs from the update's "
                    f"{state.dtype}; cast one of them (states are fp32 or fp64)"
                )
            if parameter.device != state.device:
                raise ArgumentError(
                    f"transition {self.kind}: on {parameter.device}, but the update is on "
                    f"{state.device}; move one of them"
                )


@dataclass(frozen=True, eq=False)
class Identity(Transition):
    """The identity: linear attention without decay."""

    kind: ClassVar[str] = "identity"

    def __call__(self, state: Tensor) -> Tensor:
        return state

    def transpose(self) -> Identity:
        return self

    def gradient(self, adjoint: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return ()


@dataclass(frozen=True, eq=False)
class Scalar(Transition):
    """One decay a head, ``exp(log_decay)`` with log_decay [B, H]: RetNet, Lightning, Mamba-2."""

    log_decay: Tensor
    kind: ClassVar[str] = "scalar"

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.log_decay,)

    def __call__(self, state: Tensor) -> Tensor:
        return self.log_decay.exp()[..., None, None] * state

    def transpose(self) -> Scalar:
        return self

    def gradient(self, adjoint: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return ((adjoint * state).sum((-2, -1)) * self.log_decay.exp(),)

    def check(self, state: Tensor) -> None:
        check_shapes("Scalar", {"update": (state, "B H K V"), "log_decay": (self.log_decay, "B H")})
        super().check(state)


@dataclass(frozen=True, eq=False)
class Diagonal(Transition):
    """One decay a key channel, ``exp(log_decay)`` with log_decay [B, H, K]: GLA, HGRN2, RWKV-6."""

    log_decay: Tensor
    kind: ClassVar[str] = "diagonal"

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.log_decay,)

    def __call__(self, state: Tensor) -> Tensor:
        return self.log_decay.exp()[..., None] * state

    def transpose(self) -> Diagonal:
        return self

    def gradient(self, adjoint: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return ((adjoint * state).sum(-1) * self.log_decay.exp(),)

    def check(self, state: Tensor) -> None:
        check_shapes(
            "Diagonal", {"update": (state, "B H K V"), "log_decay": (self.log_decay, "B H K")}
        )
        super().check(state)


@dataclass(frozen=True, eq=False)
class Dense(Transition):
    """A K×K matrix a head, matrix [B, H, K, K]: DeltaNet, Gated DeltaNet, KDA, RWKV-7."""

    matrix: Tensor
    kind: ClassVar[str] = "dense"

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.matrix,)

    def __call__(self, state: Tensor) -> Tensor:
        return self.matrix @ state

    def transpose(self) -> Dense:
        return Dense(self.matrix.mT)

    def gradient(self, adjoint: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return (adjoint @ state.mT,)

    def check(self, state: Tensor) -> None:
        B, H, K, _ = state.shape
        check_shapes("Dense", {"matrix": (self.matrix, "B H K K")}, B=B, H=H, K=K)
        super().check(state)


@dataclass(frozen=True, eq=False)
class Reset(Transition):
    """Zero: a document starts inside the segment, so nothing that enters leaves it.

    ``among`` is the kind of the other ranks' transitions; scans that send maps need it, to write
    this one in the same form.
    """

    among: str = "identity"
    kind: ClassVar[str] = "reset"

    def with_parameters(self, parameters: tuple[Tensor, ...]) -> Reset:
        return self

    def __call__(self, state: Tensor) -> Tensor:
        return torch.zeros_like(state)

    def transpose(self) -> Reset:
        return self

    def gradient(self, adjoint: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return ()


KINDS: dict[str, type[Transition]] = {t.kind: t for t in (Identity, Scalar, Diagonal, Dense, Reset)}
