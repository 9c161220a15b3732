"""What all token mixers share: their call, the state they leave, their projections to heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeco.core.errors import ArgumentError
from zeco.core.shapes import check_shapes
from zeco.layers.convolution import Activation, ShortConvolution
from zeco.layers.deferred import Deferred
from zeco.layers.history import History, read_history
from zeco.sequence_parallel import SequenceParallel
from zeco.sequence_parallel.methods.method import do_nothing


class MixerState(NamedTuple):
    """All that a mixer keeps of the tokens before.

    Attributes:
        recurrent: the operator's state, [B, H, K, V], or one for each packed document. Softmax
            attention keeps its tokens' keys and values here, [B, Hkv, S, K + V].
        histories: of every convolution and token shift, in the order of the calls, its last tokens
            [B, reach, D]. Softmax attention keeps the number of its tokens here, [B].
    """

    recurrent: Tensor
    histories: tuple[Tensor, ...]


class OperatorKeywords(TypedDict):
    """The keywords that every operator takes."""

    initial_state: Tensor | None
    output_final_state: bool
    cu_seqlens: Tensor | None
    bidirectional: bool
    sp: SequenceParallel | None


class Call:
    """One call of a mixer: the keywords it was given, and the state that it leaves behind.

    Args:
        sp: see `Mixer.forward`, as for all others.
        cu_seqlens: see there.
        position_ids: see there.
        bidirectional: see there.
        state: see there.
        output_state: see there.
    """

    def __init__(
        self,
        *,
        sp: SequenceParallel | None,
        cu_seqlens: Tensor | None,
        bidirectional: bool,
        position_ids: Tensor | None,
        state: MixerState | None,
        output_state: bool,
    ) -> None:
        self.sp = sp
        self.cu_seqlens = cu_seqlens
        self.bidirectional = bidirectional
        self.output_state = output_state
        self._position_ids = position_ids
        self._state = state
        self._histories: list[Tensor] = []
        self._num_read = 0
        self._recurrent: Tensor | None = None
        self._deferred: Deferred[Tensor] | None = None

    @property
    def operator_keywords(self) -> OperatorKeywords:
        """What the operator is to be called with; hand its final state to `keep`."""
        return {
            "initial_state": None if self._state is None else self._state.recurrent,
            "output_final_state": self.output_state,
            "cu_seqlens": self.cu_seqlens,
            "bidirectional": self.bidirectional,
            "sp": self.sp
            if self.sp is None or self._deferred is None
            else self.sp.meanwhile(self._deferred.run),
        }

    def later(self, work: Callable[[], Tensor], device: torch.device) -> Deferred[Tensor]:
        """Put off what is needed only after the operator until its scan is in flight.

        To be called before `operator_keywords` is read, once a call; see `Deferred`.
        """
        self._deferred = Deferred(work, device)
        return self._deferred

    def keep(self, final_state: Tensor | None) -> None:
        """Keep the operator's final state."""
        self._recurrent = final_state

    @property
    def recurrent(self) -> Tensor | None:
        """What `keep` kept in the call before."""
        return None if self._state is None else self._state.recurrent

    def convolve(
        self,
        convolution: ShortConvolution,
        x: Tensor,
        sizes: Sequence[int],
        meanwhile: Callable[[], None],
    ) -> tuple[Tensor, ...]:
        """Convolve [B, T, D], continuing from this call's state; return parts of so many channels."""
        parts, leaving = convolution(
            x,
            sp=self.sp,
            cu_seqlens=self.cu_seqlens,
            state=self.take_history(),
            output_state=self.output_state,
            sizes=sizes,
            meanwhile=meanwhile,
        )
        if leaving is not None:
            self.keep_history(leaving)
        return parts

    def look_back(self, x: Tensor, reach: int) -> History:
        """Put the tokens before them in front of tokens [B, T, D], continuing from the state."""
        history = read_history(
            x, reach, sp=self.sp, cu_seqlens=self.cu_seqlens, state=self.take_history()
        )
        self.keep_history(history.leaving)
        return history

    def position_ids(self, x: Tensor) -> Tensor:
        """Return the positions [B, T] or [T] of tokens [B, T, D] in the whole sequence."""
        if self._position_ids is not None:
            return self._position_ids
        if self.sp is not None or self._state is not None:
            raise ArgumentError(
                "position_ids are missing, but a layer with rotary positions needs them when the "
                "sequence is split over ranks or continues from a state; pass the tokens' "
                "positions in the whole sequence [B, T], as shard_batch keeps them"
            )
        return torch.arange(x.shape[1], device=x.device)

    def leaving(self) -> MixerState | None:
        """Return the state after the call, if it was asked for."""
        if self._state is not None and self._num_read < len(self._state.histories):
            raise ArgumentError(
                f"state has {len(self._state.histories)} histories, but this layer has "
                f"{self._num_read} convolutions or token shifts; pass the state of the same kind "
                "of layer"
            )
        if not self.output_state:
            return None
        if self._recurrent is None:
            raise RuntimeError("a mixer did not keep its operator's final state")
        return MixerState(self._recurrent, tuple(self._histories))

    def keep_history(self, leaving: Tensor) -> None:
        """Keep what `take_history` returns, in the same order, in the next call."""
        self._histories.append(leaving)

    def take_history(self) -> Tensor | None:
        """Return the next of the state's histories; None where the sequence starts."""
        if self._state is None:
            return None
        if self._num_read == len(self._state.histories):
            raise ArgumentError(
                f"state has {self._num_read} histories, but this layer has more convolutions or "
                "token shifts; pass the state of the same kind of layer"
            )
        self._num_read += 1
        return self._state.histories[self._num_read - 1]


class Mixer(nn.Module, ABC):
    """A layer that mixes tokens [B, T, D], mostly through a linear-attention operator.

    Args:
        width: D.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(
        self,
        x: Tensor,
        *,
        sp: SequenceParallel | None = None,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
        bidirectional: bool = False,
        state: MixerState | None = None,
        output_state: bool = False,
    ) -> tuple[Tensor, MixerState | None]:
        """Mix this rank's tokens.

        Args:
            x: [B, T, D].
            sp: the sequence-parallel context when the sequence is split over ranks, else None.
            cu_seqlens: global boundaries [N+1] of packed documents (B = 1), or None.
            position_ids: positions [B, T] or [T] in the whole sequence, for the layers that use
                them; by default 0, 1, …, where the sequence is whole and starts here.
            bidirectional: whether tokens see those after them too, for encoders, which have no
                states. Convolutions and token shifts look back only, all the same.
            state: what the tokens before have left, for prefill in pieces and decoding; used on the
                first rank. With ``cu_seqlens``, one a document, the same on every rank.
            output_state: whether to return the second value.

        Returns:
            y [B, T, D], and the state that this rank's tokens leave (`zeco.gather_final_state` of
            its tensors gives every rank the last), or None.

        Raises:
            ArgumentError: a shape, dtype or device doesn't fit.
        """
        sizes = check_shapes(type(self).__name__, {"x": (x, "B T D")}, D=self.width)
        if position_ids is not None:
            layout = "T" if position_ids.ndim == 1 else "B T"
            check_shapes(
                type(self).__name__,
                {"position_ids": (position_ids, layout)},
                B=sizes["B"],
                T=sizes["T"],
            )
        if bidirectional and (state is not None or output_state):
            given = "state" if state is not None else "output_state=True"
            raise ArgumentError(
                f"{type(self).__name__}: {given} was given with bidirectional=True, but a sequence "
                "that is read from both ends has no state before or after it; leave it out"
            )
        call = Call(
            sp=sp,
            cu_seqlens=cu_seqlens,
            position_ids=position_ids,
            bidirectional=bidirectional,
            state=state,
            output_state=output_state,
        )
        y = self.mix(x, call)
        return y, call.leaving()

    @abstractmethod
    def mix(self, x: Tensor, call: Call) -> Tensor:
        """Return y [B, T, D]; everything that looks beyond one token goes through ``call``."""

    def initialize(self, generator: torch.Generator | None) -> None:
        """Set what neither matrices, biases nor norms are: those are the model's to draw."""


class HeadProjections(nn.Module):
    """Several projections of the tokens to heads, behind one short convolution.

    They share a matrix and a convolution, so that a rank exchanges one halo, not one each.

    Args:
        width: D of the tokens.
        shapes: heads and head dim of each projection.
        conv_width: kernel width of the convolution; 0 for none.
        activation: what all projections end in, ``"silu"`` or ``"none"``; None for a SiLU behind a
            convolution only.
    """

    def __init__(
        self,
        width: int,
        shapes: tuple[tuple[int, int], ...],
        *,
        conv_width: int = 0,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        self.shapes = shapes
        channels = sum(heads * dim for heads, dim in shapes)
        self.projection = nn.Linear(width, channels, bias=False)
        if activation is None:
            activation = "silu" if conv_width else "none"
        self.activation: Activation = activation
        self.convolution = (
            ShortConvolution(channels, conv_width, activation=activation) if conv_width else None
        )

    def forward(
        self, x: Tensor, call: Call, meanwhile: Callable[[], None] = do_nothing
    ) -> tuple[Tensor, ...]:
        """Return [B, T, heads, dim] for each of the shapes.

        Args:
            x: [B, T, D].
            call: the mixer's call.
            meanwhile: work to do while the convolution's halo is under way; left alone without one.
        """
        y = self.projection(x)
        sizes = [heads * dim for heads, dim in self.shapes]
        if self.convolution is not None:
            parts = call.convolve(self.convolution, y, sizes, meanwhile)
        else:
            parts = (F.silu(y) if self.activation == "silu" else y).split(sizes, -1)
        return tuple(
            part.unflatten(-1, shape) for part, shape in zip(parts, self.shapes, strict=True)
        )


def head_dim(layer: str, what: str, size: float, num_heads: int) -> int:
    """Return ``size / num_heads``, or refuse what doesn't divide.

    >>> head_dim("GatedLinearAttention", "width * expand_k", 64.0, 4)
    16
    """
    if num_heads < 1 or size < 1 or size % num_heads:
        raise ArgumentError(
            f"{layer}: {what} = {size:g} must be a positive multiple of num_heads = {num_heads}; "
            "change one of them"
        )
    return int(size) // num_heads
