"""The decay family on Triton kernels: a `Segment` with the contract of `zeco.operators.decay`.

The kernels know diagonal decays. One decay a head, or none, is written out over the channels here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from zeco.core.documents import Pieces
from zeco.core.errors import UnsupportedError
from zeco.core.maps import AffineMap
from zeco.core.transitions import Diagonal, Identity, Scalar, Transition
from zeco.operators.segment import Gradients, Inputs, Segment

if TYPE_CHECKING:
    from zeco.kernels.decay import Chunks, States
    from zeco.kernels.decay_plan import Plan

_MAX_DIM = 256
_MAX_DIM_FP32 = 128


class DecayOptions(Protocol):
    """What the segment reads of `zeco.operators.decay.DecayOperator`."""

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


def why_not_triton(
    K: int, V: int, *dtypes: torch.dtype | None, strict: bool, packed: bool
) -> str | None:
    """Return why the kernels don't take a call of the decay family; None if they do.

    Args:
        K: key dim.
        V: value dim.
        dtypes: of q, k and v.
        strict: whether queries read the state before their own token.
        packed: whether documents are packed (``cu_seqlens``).
    """
    if strict:
        return "queries that read the state before their own token (RWKV-6) aren't in the kernels"
    if packed:
        return "packed documents (cu_seqlens) aren't in the kernels yet"
    if torch.float64 in dtypes:
        return "the kernels don't compute in float64"
    most = _MAX_DIM_FP32 if torch.float32 in dtypes else _MAX_DIM
    if K % 8 or V % 8 or not 0 < K <= most or not 0 < V <= most:
        return f"K={K} and V={V} must both be multiples of 8 up to {most} with these dtypes"
    return None


class TritonDecaySegment(Segment):
    """One call of a decay operator on the kernels; the passes' states are kept once computed."""

    def __init__(self, operator: DecayOptions, inputs: Inputs, pieces: Pieces) -> None:
        super().__init__(inputs, pieces)
        self.operator = operator
        q, k, v, g = cast("tuple[Tensor, Tensor, Tensor, Tensor | None]", inputs)
        packed = pieces.resets or pieces.before is not None
        dtypes = (q.dtype, k.dtype, v.dtype)
        if g is not None and g.dtype == torch.float64:
            dtypes = (*dtypes, g.dtype)
        reason = why_not_triton(
            k.shape[3], v.shape[3], *dtypes, strict=operator.strict, packed=packed
        )
        if reason is not None:
            raise UnsupportedError(
                f"{operator.name}: backend 'triton' can't run this: {reason}; use backend='torch'"
            )
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        self.q, self.k, self.v = (_ready(x.to(dtype)) for x in (q, k, v))
        # The kernels take the scale's logarithm.
        self.scale, self.sign = (
            (operator.scale, 1.0) if operator.scale > 0 else (1.0, operator.scale)
        )
        if self.sign != 1.0:
            self.q = self.q * self.sign
        self.g = _ready(self._gates(g, k))
        self._plan: Plan | None = None
        self._states: States | None = None
        self._chunks: Chunks | None = None
        self._adjoints: States | None = None
        self._entering: Tensor | None = None

    def _gates(self, g: Tensor | None, k: Tensor) -> Tensor:
        """Write the gates out over the channels [B, T, H, K]."""
        if g is None:
            return torch.zeros(k.shape, dtype=torch.bfloat16, device=k.device)
        if g.dtype == torch.float16:
            g = g.float()
        return g if g.ndim == 4 else g.unsqueeze(-1).expand(k.shape)

    @property
    def _empty(self) -> bool:
        return self.q.numel() == 0

    @property
    def plan(self) -> Plan:
        """Sizes and launch settings."""
        if self._plan is None:
            from zeco.kernels.decay_plan import make_plan

            self._plan = make_plan(self.q, self.v, self.g)
        return self._plan

    def _run_state_pass(self) -> tuple[States, Chunks]:
        from zeco.kernels.decay import state_pass

        if self._states is None or self._chunks is None:
            gates = self.g
            self._states, self._chunks = state_pass(self.plan, self.k, self.v, gates)
        return self._states, self._chunks

    def _run_adjoint_pass(self, d_o: Tensor) -> States:
        from zeco.kernels.decay import adjoint_state_pass

        if self._adjoints is None:
            self._adjoints, chunks = adjoint_state_pass(
                self.plan, self.q, d_o, self.g, scale=self.scale
            )
            self._chunks = self._chunks or chunks
        return self._adjoints

    def summarize(self, initials: Tensor | None = None) -> AffineMap:
        """Return the rank's map; there are no documents, so ``initials`` is None."""
        if self._empty:
            return AffineMap(self._zero_state(), self._as_transition(self._zero_decay()))
        states, _ = self._run_state_pass()
        return AffineMap(states.own, self._as_transition(states.log_decay))

    def transition(self) -> Transition:
        """Return the total decay, from whichever state pass has run."""
        if self._empty:
            return self._as_transition(self._zero_decay())
        states = self._adjoints if self._states is None else self._states
        if states is None:
            states, _ = self._run_state_pass()
        return self._as_transition(states.log_decay)

    def _as_transition(self, log_decay: Tensor) -> Transition:
        if self.operator.kind == "identity":
            return Identity()
        if self.operator.kind == "scalar":
            return Scalar(log_decay[..., 0].contiguous())
        return Diagonal(log_decay)

    def _zero_state(self) -> Tensor:
        B, _, H, K = self.k.shape
        return torch.zeros(B, H, K, self.v.shape[3], device=self.k.device)

    def _zero_decay(self) -> Tensor:
        B, _, H, K = self.k.shape
        return torch.zeros(B, H, K, device=self.k.device)

    def output(self, entering: Tensor, initials: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the output pass."""
        dtype = cast("Tensor", self.inputs[0]).dtype
        if self._empty:
            return self.v.to(dtype), entering.unsqueeze(0)
        from zeco.kernels.decay import output_pass

        states, chunks = self._run_state_pass()
        o, leaving = output_pass(
            self.plan,
            self.q,
            self.k,
            self.v,
            self.g,
            scale=self.scale,
            states=states,
            chunks=chunks,
            entering=_state(entering),
        )
        return o.to(dtype), leaving.unsqueeze(0)

    def adjoint(self, d_o: Tensor, d_finals: Tensor | None) -> Tensor:
        """Return the gradient of the entering state, from queries, gates and d_o alone."""
        if self._empty:
            return self._zero_state()
        return self._run_adjoint_pass(_ready(d_o.to(self.q.dtype))).own

    def replay(self, entering: Tensor, initials: Tensor | None) -> None:
        """Run the state pass, if it hasn't run on this object."""
        self._entering = _state(entering)
        if not self._empty:
            self._run_state_pass()

    def backward(self, d_o: Tensor, d_finals: Tensor) -> Gradients:
        """Return all gradients; `replay` must have run."""
        if self._entering is None:
            raise RuntimeError("Segment.backward was called before Segment.replay")
        entering, self._entering = self._entering, None
        if self._empty:
            zeros = tuple(None if x is None else torch.zeros_like(x) for x in self.inputs)
            return Gradients(zeros, d_finals[-1], None)
        from zeco.kernels.decay_gradients import gradient_passes

        d_o = _ready(d_o.to(self.q.dtype))
        adjoints = self._run_adjoint_pass(d_o)
        states, chunks = self._run_state_pass()
        found = gradient_passes(
            self.plan,
            self.q,
            self.k,
            self.v,
            self.g,
            d_o,
            scale=self.scale,
            states=states,
            adjoints=adjoints,
            chunks=chunks,
            entering=entering,
            d_leaving=_state(d_finals[-1]),
        )
        dq = found.q if self.sign == 1.0 else found.q * self.sign
        inputs = self._as_inputs((dq, found.k, found.v, found.g))
        return Gradients(inputs, found.entering, None)

    def _as_inputs(self, found: tuple[Tensor, Tensor, Tensor, Tensor]) -> Inputs:
        """Bring gradients to the layouts and dtypes of the operator's inputs."""
        gradients: list[Tensor | None] = []
        for given, gradient in zip(self.inputs, found, strict=True):
            if given is None:
                gradients.append(None)
                continue
            if given.ndim == 3:
                gradient = gradient.sum(-1, dtype=torch.float32)
            gradients.append(gradient.to(given.dtype))
        return tuple(gradients)

    def fresh(self, inputs: Inputs | None = None) -> TritonDecaySegment:
        """Return a segment over other inputs, with nothing kept."""
        given: Any = self.inputs if inputs is None else inputs
        return TritonDecaySegment(self.operator, given, self.pieces)


def _ready(x: Tensor) -> Tensor:
    """Return x [B, T, H, D] as the kernels read it: channels side by side, rows on 16 bytes."""
    aligned = x.data_ptr() % 16 == 0 and all(
        stride * x.element_size() % 16 == 0 and stride > 0 for stride in x.stride()[:3]
    )
    if x.stride(3) == 1 and aligned:
        return x
    return x.contiguous() if not x.is_contiguous() else x.clone()


def _state(x: Tensor) -> Tensor:
    """Return a state as the kernels read it."""
    return x.to(torch.float32).contiguous()
