"""The decay family on chunks: states that decay by the identity, a scalar or a diagonal.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ         o_t = scale · S_tᵀ q_t

| kind | g | operators |
| --- | --- | --- |
| identity | None | linear attention |
| scalar | [B, T, H] | RetNet, Lightning, simple GLA, Mamba-2 |
| diagonal | [B, T, H, K] | GLA, HGRN2, RWKV-6 |

With ``strict`` (RWKV-6) a query reads S_{t-1} in place of S_t. The chunkwise form is that of Yang
et al. (GLA, arXiv:2312.06635, section 4), with decays relative to the middle of a chunk: see
`zeco.operators.decay.gates`. Everything but the scan over chunks is a matmul or an elementwise
operation over all chunks at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from zeco.core.documents import Pieces
from zeco.core.maps import AffineMap
from zeco.core.shapes import state_dtype
from zeco.core.transitions import Diagonal, Identity, Reset, Scalar, Transition
from zeco.operators.decay.exact_scores import exact_scores
from zeco.operators.decay.gates import (
    AttendFunction,
    ChunkGates,
    attend_gradients,
    causal_scores,
    chunk_gates,
    scale_rows,
)
from zeco.operators.decay.scan import decay_scan, fold_chunks
from zeco.operators.layout import make_layout
from zeco.operators.segment import Gradients, Inputs, Segment

Kind = Literal["identity", "scalar", "diagonal"]

# K and V are padded to a multiple of this, so that every matrix of a batch starts on 64 bytes:
# BLAS sums in another order where one does not, and a chunk's result would then depend on its
# place in the call.
_WIDTH = 4


@dataclass(frozen=True)
class DecayOperator:
    """An operator of the decay family with its options fixed; inputs are q, k, v, g.

    On Triton kernels, with one decay a head, two more may follow: steps [B, T, H] that keys are
    multiplied with, and skips [B, T, H] that values are multiplied with and added to outputs. There,
    with one decay a head or none, several value heads may share a head of q and k.

    Attributes:
        name: the public name, for messages.
        kind: what the decay is; see the module's table.
        scale: factor of the queries.
        backend: which implementation runs.
        strict: whether a query reads the state before its own token's decay and update.
        chunk: tokens a chunk, a power of two.
        operands: the dtype in which kernels multiply, for inputs that were widened on the way here;
            None for that of the inputs.
        results: the dtype of the outputs, for callers who add to them; None for that of q.
    """

    name: str
    kind: Kind
    scale: float
    backend: str = "torch"
    strict: bool = False
    chunk: int = 64
    operands: torch.dtype | None = None
    results: torch.dtype | None = None

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the tensors."""
        return ("q", "k", "v", "g", "step", "skip")

    def state_shape(self, inputs: Inputs) -> tuple[int, int, int, int]:
        """Return [B, H, K, V] of the states."""
        k, v = cast("tuple[Tensor, Tensor]", inputs[1:3])
        return k.shape[0], v.shape[2], k.shape[3], v.shape[3]

    def segment(self, inputs: Inputs, pieces: Pieces) -> Segment:
        """Return the call of this operator on a rank's tokens."""
        if self.backend == "triton":
            from zeco.operators.decay.triton_segment import TritonDecaySegment

            return TritonDecaySegment(self, inputs, pieces)
        return DecaySegment(self, inputs, pieces)


@dataclass(frozen=True, eq=False)
class _Replay:
    """What backward needs of the recomputed pass: leaves, and the tensors of `AttendFunction`."""

    entering: Tensor
    initials: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    states: Tensor
    rows: Tensor | None
    exact: Tensor | None
    finals: Tensor
    scores: Tensor


class DecaySegment(Segment):
    """One call of a decay operator, in torch; intermediate results are kept once computed."""

    def __init__(self, operator: DecayOperator, inputs: Inputs, pieces: Pieces) -> None:
        super().__init__(inputs, pieces)
        self.operator = operator
        self.layout = make_layout(pieces, operator.chunk)
        self.dtype = state_dtype(*inputs)
        self._intra: Tensor | None = None
        self._recomputed: _Replay | None = None

        _, _, self.K, self.V = operator.state_shape(inputs)

    def _chunks(self, index: int) -> Tensor:
        """Return an input in chunks [B, N, H, C, width], in the dtype of the states."""
        x = cast("Tensor", self.inputs[index])
        if x.ndim == 3:
            return self.layout.split(x.to(self.dtype)).transpose(2, 3).unsqueeze(-1)
        return self._split(x)

    def _split(self, x: Tensor) -> Tensor:
        x = self.layout.split(x.to(self.dtype)).transpose(2, 3)
        padding = -x.shape[-1] % _WIDTH
        return F.pad(x, (0, padding)) if padding else x

    def _widen(self, states: Tensor) -> Tensor:
        """Bring states [..., K, V] from outside to the dtype and widths used inside."""
        states = states.to(self.dtype)
        padding = (0, -self.V % _WIDTH, 0, -self.K % _WIDTH)
        return F.pad(states, padding) if any(padding) else states

    def _narrow(self, states: Tensor) -> Tensor:
        """Take states [..., K, V] out of the widths used inside."""
        return states[..., : self.K, : self.V].contiguous()

    @cached_property
    def _gates(self) -> ChunkGates | None:
        if self.operator.kind == "identity":
            return None
        return chunk_gates(self._chunks(3).contiguous(), strict=self.operator.strict)

    @cached_property
    def _query(self) -> Tensor:
        gates = self._gates
        exponent = None if gates is None else gates.query
        return scale_rows(self._chunks(0), exponent, self.operator.scale)

    @cached_property
    def _key(self) -> Tensor:
        gates = self._gates
        return scale_rows(self._chunks(1), None if gates is None else gates.key)

    @cached_property
    def _value(self) -> Tensor:
        return self._chunks(2).contiguous()

    @cached_property
    def _updates(self) -> Tensor:
        """What every chunk adds to the state [B, N, H, K, V]."""
        return self._shifted(self._product(self._key, self._value))

    @cached_property
    def _exact(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Which of the B·N·H score matrices are outside the fast form, and these matrices."""
        gates = self._gates
        if gates is None or gates.exact is None:
            return None, None
        rows = gates.exact
        # Contiguous whatever the number of chunks: BLAS sums transposed matrices in another order.
        q, k, g = (self._chunks(index).flatten(0, 2).contiguous() for index in (0, 1, 3))
        if len(rows) < len(q):
            q, k, g = (x.index_select(0, rows) for x in (q, k, g))
        return rows, exact_scores(q * self.operator.scale, k, g, strict=self.operator.strict)

    @property
    def _log_decay(self) -> Tensor | None:
        return None if self._gates is None else self._gates.total

    def _shifted(self, x: Tensor) -> Tensor:
        """Scale states read or updates written by what their rows leave out."""
        return x if self._gates is None else x * self._gates.shift.exp()

    @staticmethod
    def _product(x: Tensor, y: Tensor) -> Tensor:
        """Return xᵀ y of every chunk and head [B, N, H, ·, ·]."""
        return torch.bmm(x.flatten(0, 2).mT, y.flatten(0, 2)).unflatten(0, x.shape[:3])

    def summarize(self, initials: Tensor | None = None) -> AffineMap:
        """Return the rank's map; ``initials`` count when the last piece starts from one of them."""
        first, stop = self.layout.ranges[-1]
        B, _, H, K, V = self._updates.shape
        start = self._updates.new_zeros(B, H, K, V)
        if initials is not None and self.pieces.resets:
            start = self._widen(initials[-1])
        update = fold_chunks(self._updates, self._log_decay, start, range(first, stop))
        return AffineMap(self._narrow(update), self.transition())

    def transition(self) -> Transition:
        """Return the total decay, from the gates alone."""
        if self.pieces.resets:
            return Reset(among=self.operator.kind)
        total = self._log_decay
        if total is None:
            return Identity()
        total = total.sum(1)
        if self.operator.kind == "scalar":
            return Scalar(total.squeeze(-1))
        return Diagonal(total[..., : self.K].contiguous())

    def prepare(self) -> None:
        """Attend within the chunks."""
        scores = causal_scores(
            self._query.flatten(0, 2),
            self._key.flatten(0, 2),
            *self._exact,
            strict=self.operator.strict,
        )
        self._intra = torch.bmm(scores, self._value.flatten(0, 2))

    def _scan(self, entering: Tensor, initials: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the states that enter the chunks, scaled for the queries, and all finals."""
        states, finals = decay_scan(
            self._updates,
            self._log_decay,
            self._widen(entering),
            None if initials is None else self._widen(initials),
            ranges=self.layout.ranges,
            continued=self.pieces.continued,
        )
        return self._shifted(states).flatten(0, 2), self._narrow(finals)

    def output(self, entering: Tensor, initials: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the scan over chunks, then attend to the states (and within chunks, if not done)."""
        states, finals = self._scan(entering, initials)
        q = self._query.flatten(0, 2)
        if self._intra is not None:
            o = torch.baddbmm(self._intra, q, states)
        else:
            k, v = self._key.flatten(0, 2), self._value.flatten(0, 2)
            attended = AttendFunction.apply(q, k, v, states, *self._exact, self.operator.strict)
            o = cast("Tensor", attended)
        o = o.unflatten(0, self._query.shape[:3]).transpose(2, 3)
        dtype = self.operator.results or cast("Tensor", self.inputs[0]).dtype
        return self.layout.merge(o[..., : self.V]).to(dtype).contiguous(), finals

    def replay(self, entering: Tensor, initials: Tensor | None) -> None:
        """Recompute the forward pass but for the outputs, which no gradient needs."""
        self._leaves = tuple(
            None if x is None else x.detach().requires_grad_() for x in self.inputs
        )
        entering = entering.detach().requires_grad_()
        initials = None if initials is None else initials.detach().requires_grad_()
        with torch.enable_grad():
            segment = self.fresh(self._leaves)
            states, finals = segment._scan(entering, initials)
            q, k, v = (x.flatten(0, 2) for x in (segment._query, segment._key, segment._value))
            rows, exact = segment._exact
        scores = causal_scores(q.detach(), k.detach(), rows, exact, strict=self.operator.strict)
        self._recomputed = _Replay(entering, initials, q, k, v, states, rows, exact, finals, scores)

    def backward(self, d_o: Tensor, d_finals: Tensor) -> Gradients:
        """Return all gradients; `replay` must have run."""
        kept, self._recomputed = self._recomputed, None
        if kept is None:
            raise RuntimeError("DecaySegment.backward was called before DecaySegment.replay")
        found = attend_gradients(
            self._split(d_o).flatten(0, 2),
            kept.q.detach(),
            kept.k.detach(),
            kept.v.detach(),
            kept.states.detach(),
            kept.rows,
            kept.scores,
            strict=self.operator.strict,
        )
        tensors = (kept.q, kept.k, kept.v, kept.states)
        outputs, gradients = [*tensors, kept.finals], [*found[:4], d_finals]
        if kept.exact is not None and found[4] is not None:
            outputs.append(kept.exact)
            gradients.append(found[4])
        wanted = [x for x in (*self._leaves, kept.entering, kept.initials) if x is not None]
        backward = torch.autograd.grad(outputs, wanted, gradients, materialize_grads=True)
        results = iter(backward)
        inputs = tuple(None if x is None else next(results) for x in self._leaves)
        d_entering = next(results)
        return Gradients(inputs, d_entering, None if kept.initials is None else next(results))

    def adjoint(self, d_o: Tensor, d_finals: Tensor | None) -> Tensor:
        """Return the gradient of the entering state, from queries, gates and d_o alone."""
        shape = self.operator.state_shape(self.inputs)
        start = d_o.new_zeros(shape, dtype=self.dtype)
        if not self.pieces.continued:
            return start
        if d_finals is not None and len(d_finals) > 1:
            start = d_finals[0]
        stop = self.layout.ranges[0][1]
        query, d_o = self._query[:, :stop], self._split(d_o)[:, :stop].contiguous()
        d_states = self._product(query, d_o)
        if self._gates is not None:
            d_states = d_states * self._gates.shift[:, :stop].exp()
        start = self._widen(start)
        return self._narrow(fold_chunks(d_states, self._log_decay, start, reversed(range(stop))))

    def fresh(self, inputs: Inputs | None = None) -> DecaySegment:
        """Return a segment over other inputs, with nothing kept."""
        return DecaySegment(self.operator, self.inputs if inputs is None else inputs, self.pieces)
