"""The contract between the mathematics of an operator and whatever exchanges its states.

To its neighbours a rank's tokens are an affine map of the state that enters them. A `Segment` is
one call of an operator on one rank's tokens; it knows the map, the outputs once the entering state
is there, and the adjoints of both. It does no communication, and an exchange (see `Exchange`) knows
no mathematics.

Forward, the order that leaves the exchange the longest time in flight::

    map = segment.summarize(initials)   # the state pass: starts the scan
    segment.prepare()                   # whatever needs no entering state
    o, finals = segment.output(entering, initials)

Backward::

    G = segment.adjoint(d_o, d_finals)  # from q, gates and d_o alone: starts the reverse scan
    segment.replay(entering, initials)  # recomputation, in flight
    gradients = segment.backward(d_o, d_finals)

Packed documents are *pieces* (`zeco.core.documents`): ``initials`` [n, B, H, K, V] holds the states
from which the pieces start that do not continue from the previous rank (row i for the i-th of
``pieces.fresh``; None means zeros), ``finals`` [n, B, H, K, V] the state after every piece. The last
final is the rank's leaving state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zeco.core.documents import Pieces
from zeco.core.maps import AffineMap
from zeco.core.transitions import Transition

Inputs = tuple[Tensor | None, ...]


class Gradients(NamedTuple):
    """What a segment's backward returns.

    Attributes:
        inputs: one gradient for each operator input (None where the input was None or needs none).
        entering: gradient [B, H, K, V] of the entering state, through everything.
        initials: gradient of ``initials``, or None.
    """

    inputs: Inputs
    entering: Tensor
    initials: Tensor | None


class Segment(ABC):
    """One call of an operator on one rank's tokens.

    Args:
        inputs: the operator's tensors, [B, T, ...], in its own order.
        pieces: the documents' pieces among the T tokens.

    Attributes:
        wanted: for each input, whether anybody uses its gradient; None when all may be used. A
            segment may save work by it: gradients that nobody uses may be left out.
    """

    takes_none = False
    """Whether None stands for zeros in ``entering`` and ``d_finals``."""

    def __init__(self, inputs: Inputs, pieces: Pieces) -> None:
        self.inputs = inputs
        self.pieces = pieces
        self.wanted: Sequence[bool] | None = None
        self._leaves: Inputs = ()
        self._replayed: tuple[Tensor, Tensor | None, Tensor, Tensor] | None = None

    @abstractmethod
    def summarize(self, initials: Tensor | None = None) -> AffineMap:
        """Return the rank's map: update [B, H, K, V] and total transition.

        When a document starts on the rank, the transition is `Reset` and the update is the state
        that leaves, for which the last of ``initials`` counts.
        """

    @abstractmethod
    def output(self, entering: Tensor, initials: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs [B, T, H, V] and the state after every piece, given what enters.

        A pure function of the inputs and of both arguments: `run` differentiates through it.
        """

    def prepare(self) -> None:  # noqa: B027 (not every operator has such work)
        """Do the work that needs no entering state, and keep it for `output`."""

    def transition(self) -> Transition:
        """Return the total transition alone, as `summarize` would."""
        return self.summarize().transition

    def adjoint(self, d_o: Tensor, d_finals: Tensor | None) -> Tensor:
        """Return the gradient of the entering state through outputs and inner finals.

        An exchange that calls it does so before `replay`, which may then make what needs ``d_o``. The
        last final is left out: its gradient goes through the rank's transition.

        Args:
            d_o: gradient of the outputs [B, T, H, V].
            d_finals: gradient of the finals [n, B, H, K, V], or None.
        """
        entering = torch.zeros_like(self.summarize().update).requires_grad_()
        constants = tuple(None if x is None else x.detach() for x in self.inputs)
        with torch.enable_grad():
            o, finals = self.fresh(constants).output(entering, None)
            outputs, gradients = [o], [d_o]
            if d_finals is not None and len(d_finals) > 1:
                outputs.append(finals[:-1])
                gradients.append(d_finals[:-1])
        outputs, gradients = _differentiable(outputs, gradients)
        if not outputs:
            return torch.zeros_like(entering)
        (gradient,) = torch.autograd.grad(outputs, entering, gradients, allow_unused=True)
        return _zeros_for_none(gradient, entering)

    @abstractmethod
    def fresh(self, inputs: Inputs | None = None) -> Segment:
        """Return a segment over other inputs (default: the same), with nothing kept from before."""

    def keep(self) -> tuple[Tensor, ...]:
        """Return small results of the forward pass that spare `replay` work; none by default."""
        return ()

    def recall(self, kept: tuple[Tensor, ...]) -> None:  # noqa: B027 (most keep nothing)
        """Take what `keep` of another segment gave, whose inputs and starting states were the same."""

    def replay(self, entering: Tensor, initials: Tensor | None) -> None:
        """Recompute the forward pass for `backward`."""
        self._leaves = tuple(
            None if x is None else x.detach().requires_grad_(x.is_floating_point())
            for x in self.inputs
        )
        entering = entering.detach().requires_grad_()
        initials = None if initials is None else initials.detach().requires_grad_()
        with torch.enable_grad():
            o, finals = self.fresh(self._leaves).output(entering, initials)
        self._replayed = (entering, initials, o, finals)

    def backward(self, d_o: Tensor, d_finals: Tensor) -> Gradients:
        """Return all gradients; `replay` must have run.

        Args:
            d_o: gradient of the outputs [B, T, H, V].
            d_finals: gradient of the finals [n, B, H, K, V]; the last one includes what the later
                ranks sent back.
        """
        if self._replayed is None:
            raise RuntimeError("Segment.backward was called before Segment.replay")
        entering, initials, o, finals = self._replayed
        self._replayed = None
        wanted = [x for x in (*self._leaves, entering, initials) if x is not None]
        outputs, gradients = _differentiable([o, finals], [d_o, d_finals])
        found = iter(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True))
        inputs = tuple(None if x is None else next(found) for x in self._leaves)
        d_entering = next(found)
        d_initials = None if initials is None else next(found)
        return Gradients(inputs, _zeros_for_none(d_entering, entering), d_initials)


def _zeros_for_none(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _differentiable(
    outputs: list[Tensor], gradients: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    return [o for o, _ in pairs], [g for _, g in pairs]


class Operator(Protocol):
    """A linear-attention operator with its options fixed."""

    @property
    def name(self) -> str:
        """The public name, for messages."""
        ...

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the tensors, in the order of `segment`'s inputs."""
        ...

    def state_shape(self, inputs: Inputs) -> tuple[int, int, int, int]:
        """Return [B, H, K, V] of the states."""
        ...

    def segment(self, inputs: Inputs, pieces: Pieces) -> Segment:
        """Return the call of this operator on a rank's tokens."""
        ...


class Outcome(NamedTuple):
    """What a forward exchange returns, one entry for each of the rank's slots.

    Attributes:
        o: outputs [B, T, H, V].
        finals: the state after every piece [n, B, H, K, V].
        entering: the state that entered [B, H, K, V].
    """

    o: list[Tensor]
    finals: list[Tensor]
    entering: list[Tensor]


class HeadExchange(Protocol):
    """How a rank swaps its tokens of all heads for its share of the heads of all tokens."""

    def to_heads(self, inputs: Sequence[Tensor], states: Tensor) -> tuple[list[Tensor], Tensor]:
        """Turn inputs [B, T, H, ...] into [B, L, H/P, ...].

        States [N, H, ...] are summed over the ranks and become [N, H/P, ...].
        """
        ...

    def to_tokens(self, o: Tensor, finals: Tensor) -> tuple[Tensor, Tensor]:
        """Turn [B, L, H/P, ...] into [B, T, H, ...], and states [N, H/P, ...] into [N, H, ...]."""
        ...


class Exchange(Protocol):
    """A sequence-parallel method, as seen by an operator call: how entering states are found.

    A rank holds one *slot* of consecutive tokens, or several (layout "zigzag"); each is a segment.
    """

    check: bool
    """Whether values are looked at (NaN, gates above zero) and ranks compare their calls."""

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one raised, so that none waits for it."""
        ...

    def mirrored(self) -> Exchange:
        """Return the exchange of the reversed sequence, each rank's tokens reversed where they are."""
        ...

    def is_first(self) -> bool:
        """Whether the sequence starts on this rank, so that ``initial`` is used here."""
        ...

    def locate(self, num_tokens: int, cu_seqlens: Tensor | None, batch: int) -> tuple[Pieces, ...]:
        """Return, for each slot, the pieces of documents among this rank's tokens."""
        ...

    def swap_heads(
        self, num_tokens: int, cu_seqlens: Tensor | None, num_heads: int, device: torch.device
    ) -> HeadExchange | None:
        """Return how tokens are swapped for heads, for a method that does this instead of a scan."""
        ...

    def forward(
        self, segments: Sequence[Segment], initial: Tensor, initials: Sequence[Tensor | None]
    ) -> Outcome:
        """Find the entering states and run the segments.

        Args:
            segments: this rank's call, slot by slot.
            initial: state [B, H, K, V] that enters the first rank; not used on the others.
            initials: for each slot, the states of the pieces that start afresh.
        """
        ...

    def backward(
        self,
        segments: Sequence[Segment],
        entering: Sequence[Tensor],
        initials: Sequence[Tensor | None],
        d_o: Sequence[Tensor],
        d_finals: Sequence[Tensor],
    ) -> list[Gradients]:
        """Return all gradients, slot by slot; ``entering`` of the first slot is that of ``initial``
        on the first rank."""
        ...
