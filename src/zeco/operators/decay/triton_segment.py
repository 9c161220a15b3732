"""The decay family on Triton kernels: a `Segment` with the contract of `zeco.operators.decay.segment`.

Diagonal decays run on `zeco.kernels.decay`; one decay a head, or none, on `zeco.kernels.scalar`. Both
know one run of rows for each head; what else a call may have is arranged for them in
`zeco.operators.decay.triton_rows`.
"""

from __future__ import annotations

from functools import cache, cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from zeco.core.captures import hold
from zeco.core.documents import Pieces
from zeco.core.maps import AffineMap
from zeco.core.transitions import Diagonal, Identity, Reset, Scalar, Transition
from zeco.operators.decay.triton_rows import DecayOptions, arrange
from zeco.operators.segment import Gradients, Inputs, Segment

if TYPE_CHECKING:
    from zeco.kernels.decay.gradients import DecayGradients, QueryGradient
    from zeco.kernels.decay.passes import Chunks, States
    from zeco.kernels.decay.plan import Plan
    from zeco.kernels.scalar.passes import Sums

# States at the boundaries of segments are kept for the backward pass up to this part of the values.
_KEPT_PART = 3 / 8


@cache
def _launchers() -> Any:
    """Return the modules that launch kernels; Triton, which they import, need not be installed."""
    from zeco.kernels.decay import gradients as decay_gradients
    from zeco.kernels.decay import passes as decay
    from zeco.kernels.head_sums import head_sums
    from zeco.kernels.scalar import gradients as scalar_gradients
    from zeco.kernels.scalar import passes as scalar

    return SimpleNamespace(
        decay=decay,
        decay_gradients=decay_gradients,
        scalar=scalar,
        scalar_gradients=scalar_gradients,
        head_sums=head_sums,
    )


class TritonDecaySegment(Segment):
    """One call of a decay operator on the kernels; the passes' states are kept once computed."""

    takes_none = True

    def __init__(self, operator: DecayOptions, inputs: Inputs, pieces: Pieces) -> None:
        super().__init__(inputs, pieces)
        self.operator = operator
        q, k, v, g = cast("tuple[Tensor, Tensor, Tensor, Tensor | None]", inputs[:4])
        dtypes = (q.dtype, k.dtype, v.dtype, None if g is None else g.dtype)
        found = arrange(operator, pieces, (k.shape, v.shape), dtypes, q.device)
        hold(found, q.device)
        self._arrangement, self.scale, self.sign = found, found.scale, found.sign
        self.rows, self.slices = rows, slices = found.rows, found.slices
        dtype = found.dtype
        q = _cast(q if self.sign == 1.0 else q * self.sign, dtype)
        self.q = _ready(rows.spread(q, rows.queries))
        self.k = _ready(rows.spread(_cast(k, dtype), rows.keys))
        self.v = _ready(slices.cut(rows.spread(_cast(v, dtype), rows.keys)))
        self.g = None if g is None else self._as_gates(g)
        # What weighs tokens has the layout of one gate a head.
        self.step, self.skip = (
            None if x is None else self._as_gates(x) for x in (*inputs[4:], None, None)[:2]
        )
        self._states: States | None = None
        self._chunks: Chunks | None = None
        self._adjoints: States | None = None
        self._has_replayed = False
        self._entering: Tensor | None = None
        self._initials: Tensor | None = None
        self._d_o: Tensor | None = None
        self._queries: QueryGradient | None = None

    def _as_outputs(self, d_o: Tensor) -> Tensor:
        """Arrange gradients of the outputs [B, T, H, V]."""
        d_o = _cast(d_o, self.q.dtype)
        return _ready(self.slices.cut(self.rows.spread(d_o, self.rows.queries)))

    def _as_state(self, x: Tensor | None) -> Tensor | None:
        """Arrange states [..., H, K, V]; None, which stands for zeros, stays None."""
        return None if x is None else self.slices.cut_states(_cast(x, torch.float32)).contiguous()

    def _as_gates(self, g: Tensor) -> Tensor:
        g = g.float() if g.dtype == torch.float16 else g
        g = self.rows.spread(g, self.rows.keys)
        return _ready(g) if g.ndim == 4 else self.slices.repeat(g)

    @property
    def _diagonal(self) -> bool:
        return self.operator.kind == "diagonal"

    @property
    def _empty(self) -> bool:
        return self.q.numel() == 0

    @property
    def plan(self) -> Plan:
        """Sizes and launch settings."""
        found = self._arrangement.plan
        if found is None:
            from zeco.kernels.decay.plan import make_plan

            ranges, continued = self.rows.ranges, self.pieces.continued
            found = make_plan(self.q, self.v, self.g, ranges=ranges, continued=continued)
            self._arrangement.plan = found
        return found

    @property
    def _wanted_weights(self) -> tuple[Tensor | None, ...]:
        """Gates, steps and skips of one decay a head, None where nobody uses their gradient.

        Decays that are fixed for each head are gates without one.
        """
        wanted = (True,) * 6 if self.wanted is None else (*self.wanted, False, False)
        weights = (self.g, self.step, self.skip)
        return tuple(x if use else None for x, use in zip(weights, wanted[3:], strict=False))

    @cached_property
    def _sums(self) -> Sums:
        return _launchers().scalar.chunk_sums(self.plan, self.g, self.step, self.skip)

    def _run_state_pass(self, initials: Tensor | None) -> States:
        found = self._states
        if found is None:
            kernels = _launchers()
            given = self._as_state(initials)
            if self._diagonal:
                found, self._chunks = kernels.decay.state_pass(
                    self.plan, self.k, self.v, cast("Tensor", self.g), given
                )
            else:
                found = kernels.scalar.state_pass(self.plan, self.k, self.v, self._sums, given)
            self._states = found
        return cast("States", found)

    def _run_adjoint_pass(self, d_o: Tensor, d_finals: Tensor | None) -> States:
        found = self._adjoints
        if found is None:
            kernels = _launchers()
            # The last final's gradient comes in later, through the rank's transition.
            inner = d_finals is not None and len(d_finals) > 1
            given = self._as_state(d_finals if inner else None)
            if self._diagonal:
                found, self._chunks = kernels.decay.adjoint_state_pass(
                    self.plan, self.q, d_o, cast("Tensor", self.g), given, scale=self.scale
                )
            else:
                found = kernels.scalar.adjoint_state_pass(
                    self.plan, self.q, d_o, self._sums, given, scale=self.scale
                )
            self._adjoints = found
        return cast("States", found)

    def summarize(self, initials: Tensor | None = None) -> AffineMap:
        """Return the rank's map."""
        if self._empty:
            update = self._zero_state()
            if initials is not None and self.pieces.resets:
                update = initials[-1].to(torch.float32)
            return AffineMap(update, self.transition())
        states = self._run_state_pass(initials)
        return AffineMap(self.slices.join_states(states.own), self.transition())

    def transition(self) -> Transition:
        """Return the total decay, from whichever state pass has run."""
        kind = self.operator.kind
        if self.pieces.resets:
            return Reset(among=cast("Any", kind))
        if kind == "identity":
            return Identity()
        if self._empty:
            B, H, K, _ = self.operator.state_shape(self.inputs)
            log_decay = torch.zeros(B, H, K, device=self.k.device)
        else:
            states = self._adjoints if self._states is None else self._states
            if states is None:
                states = self._run_state_pass(None)
            log_decay = states.log_decay[:, :: self.slices.count]
        if kind == "scalar":
            return Scalar(log_decay[..., 0].contiguous())
        return Diagonal(log_decay.contiguous())

    def _zero_state(self) -> Tensor:
        return torch.zeros(self.operator.state_shape(self.inputs), device=self.k.device)

    def _piece_starts(self, entering: Tensor | None, initials: Tensor | None) -> Tensor:
        """Return the state [n, B, H, K, V] from which each piece starts."""
        entering = self._zero_state() if entering is None else entering
        if initials is None:
            initials = entering.new_zeros(len(self.pieces.fresh), *entering.shape)
        kept = [entering.unsqueeze(0)] if self.pieces.continued else []
        return torch.cat([*kept, initials])

    def _finals(self, leaving: Tensor, entering: Tensor | None) -> Tensor:
        """Return the state [n, B, H, K, V] after each piece."""
        finals = [leaving.unsqueeze(0)]
        inner = self.plan.breaks[0 if self.pieces.continued else 1 :]
        if inner and self._states is not None:
            finals.insert(0, self._states.at(list(inner), entering))
        return self.slices.join_states(torch.cat(finals) if inner else finals[0])

    def output(self, entering: Tensor | None, initials: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the output pass."""
        dtype = self.operator.results or cast("Tensor", self.inputs[0]).dtype
        if self._empty:
            values = cast("Tensor", self.inputs[2])
            return torch.zeros_like(values, dtype=dtype), self._piece_starts(entering, initials)
        kernels = _launchers()
        given: dict[str, Any] = {
            "states": self._run_state_pass(initials),
            "scale": self.scale,
            "entering": (entering := self._as_state(entering)),
            "dtype": dtype,
        }
        tensors = (self.plan, self.q, self.k, self.v)
        if self._diagonal:
            g, chunks = cast("Tensor", self.g), self._known_chunks()
            o, leaving = kernels.decay.output_pass(*tensors, g, **given, chunks=chunks)
        else:
            o, leaving = kernels.scalar.output_pass(*tensors, self._sums, **given)
        o = self.rows.collect(self.slices.join(o), self.rows.queries)
        return o.contiguous(), self._finals(leaving, entering)

    def adjoint(self, d_o: Tensor, d_finals: Tensor | None) -> Tensor:
        """Return the gradient of the entering state, from queries, gates and d_o alone."""
        if self._empty:
            found = self._zero_state()
            inner = self.pieces.continued and d_finals is not None and len(d_finals) > 1
            return d_finals[0] if inner and d_finals is not None else found
        self._d_o = self._as_outputs(d_o)
        return self.slices.join_states(self._run_adjoint_pass(self._d_o, d_finals).own)

    def keep(self) -> tuple[Tensor, ...]:
        """Return the states at the boundaries of segments, if they are few."""
        states = self._states
        if states is None or states.nbytes > _KEPT_PART * self.v.nbytes:
            return ()
        return (states.states, states.passed, states.log_decay)

    def recall(self, kept: tuple[Tensor, ...]) -> None:
        """Take what `keep` gave, in place of a state pass."""
        if kept:
            self._states = _launchers().decay.States(*kept, last=self.plan.num_segments)

    def replay(self, entering: Tensor | None, initials: Tensor | None) -> None:
        """Run the state pass, if its states aren't there, and the queries' gradient pass.

        The second needs the gradient of the outputs, hence that `adjoint` has run.
        """
        self._has_replayed = True
        self._entering, self._initials = self._as_state(entering), initials
        if self._empty:
            return
        self._run_state_pass(initials)
        if self._d_o is not None:
            self._queries = self._query_gradient(self._d_o, self._entering)

    def _query_gradient(self, d_o: Tensor, entering: Tensor | None) -> QueryGradient:
        kernels = _launchers()
        given: dict[str, Any] = {
            "states": self._run_state_pass(self._initials),
            "scale": self.scale,
            "entering": entering,
        }
        tensors: Any = (self.plan, self.q, self.k, self.v, d_o)
        if self._diagonal:
            return kernels.decay_gradients.query_pass(
                *tensors, **given, chunks=self._known_chunks()
            )
        pulls = any(x is not None for x in self._wanted_weights)
        return kernels.scalar_gradients.query_pass(*tensors, **given, sums=self._sums, pulls=pulls)

    def backward(self, d_o: Tensor, d_finals: Tensor | None) -> Gradients:
        """Return all gradients; `replay` must have run."""
        if not self._has_replayed:
            raise RuntimeError("Segment.backward was called before Segment.replay")
        entering, initials = self._entering, self._initials
        first = 1 if self.pieces.continued else 0
        if self._empty:
            zeros = tuple(None if x is None else torch.zeros_like(x) for x in self.inputs)
            if d_finals is None:
                d_finals = torch.stack([self._zero_state()] * len(self.pieces.documents))
            d_entering = d_finals[0] if first else torch.zeros_like(d_finals[0])
            return Gradients(zeros, d_entering, None if initials is None else d_finals[first:])
        kernels = _launchers()
        d_o = self._as_outputs(d_o) if self._d_o is None else self._d_o
        adjoints = self._run_adjoint_pass(d_o, d_finals)
        d_leaving = self._as_state(None if d_finals is None else d_finals[-1])
        given: dict[str, Any] = {
            "states": self._run_state_pass(initials),
            "adjoints": adjoints,
            "scale": self.scale,
            "entering": entering,
            "d_leaving": d_leaving,
            "queries": self._queries or self._query_gradient(d_o, entering),
        }
        if self._diagonal:
            tensors: Any = (self.plan, self.q, self.k, self.v, self.g, d_o)
            chunks = self._known_chunks()
            found = kernels.decay_gradients.gradient_passes(*tensors, **given, chunks=chunks)
        else:
            g, step, skip = self._wanted_weights
            tensors = (self.plan, self.q, self.k, self.v, g, d_o)
            found = kernels.scalar_gradients.gradient_passes(
                *tensors, **given, sums=self._sums, step=step, skip=skip
            )
        d_initials = None
        if initials is not None:
            after = [segment + 1 for segment in self.plan.breaks]
            d_initials = self.slices.join_states(adjoints.at(after, d_leaving))
        inputs = self._as_inputs(found)
        return Gradients(inputs, self.slices.join_states(found.entering), d_initials)

    def _known_chunks(self) -> Chunks:
        if self._chunks is None:
            raise RuntimeError("no state pass has run on this segment")
        return self._chunks

    def _as_inputs(self, found: DecayGradients) -> Inputs:
        """Bring gradients to the layouts and dtypes of the operator's inputs."""
        rows = self.rows
        dq = found.q if self.sign == 1.0 else found.q * self.sign
        gradients = (dq, found.k, self.slices.join(found.v), found.g, found.step, found.skip)
        arranged: list[Tensor | None] = []
        for i, (given, x) in enumerate(zip(self.inputs, gradients, strict=False)):
            if given is None or x is None:
                arranged.append(None)
                continue
            if x.shape[2] != given.shape[2]:
                add = _launchers().head_sums
                x = add(x.contiguous(), given.shape[2], given.dtype, self.plan.launches)
            x = rows.collect(x, rows.keys if i else rows.queries)
            arranged.append(_cast(x, given.dtype))
        return tuple(arranged)

    def fresh(self, inputs: Inputs | None = None) -> TritonDecaySegment:
        """Return a segment over other inputs, with nothing kept."""
        given: Any = self.inputs if inputs is None else inputs
        return TritonDecaySegment(self.operator, given, self.pieces)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Tensor.to takes ten times as long to find that there's nothing to do.
    return x if x.dtype == dtype else x.to(dtype)


def _ready(x: Tensor) -> Tensor:
    """Return x [B, T, H, D] as the kernels read it: channels side by side, rows on 16 bytes."""
    b, t, h, d = x.stride()
    if d == 1 and min(b, t, h) > 0 and ((b | t | h) * x.element_size() | x.data_ptr()) % 16 == 0:
        return x
    return x.contiguous() if not x.is_contiguous() else x.clone()
