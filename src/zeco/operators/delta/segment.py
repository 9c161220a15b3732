"""The delta-rule family on chunks: states that decay and then lose or mix one direction a token.

    S_t = (diag(exp(g_t)) + p_t a_tᵀ) S_{t-1} + writes        o_t = scale · S_tᵀ q_t

| operator | g | a_t | p_t | writes |
| --- | --- | --- | --- | --- |
| delta rule | none | -β_t k_t | k_t | β_t k_t v_tᵀ |
| gated delta rule | [B, T, H] | -β_t exp(g_t) k_t | k_t | β_t k_t v_tᵀ |
| KDA | [B, T, H, K] | -β_t exp(g_t) ∘ k_t | k_t | β_t k_t v_tᵀ |
| RWKV-7 | w [B, T, H, K] | a_t | b_t | k_t v_tᵀ |

What a token adds along p_t is u_tᵀ = a_tᵀ S_{t-1} (plus β_t v_tᵀ for the delta rules, which write along
the same direction). With b the cumulative decay of a chunk and S the state that enters it,

    u_t = ã_tᵀ S + Σ_{j<t} A[t,j] u_j + source_t,      A[t,j] = a_t · exp(b - b_j) p_j,

a unit lower triangular system for all of a chunk's u: the WY form of Yang et al. (arXiv:2406.06484,
2412.06464) with a diagonal. Two passes come from it. The state pass needs the chunks' maps before
the state is there: the solutions U = W S + X make a chunk an affine map with a dense K×K matrix
(`zeco.operators.delta.scan`). The pass whose entering state is known solves for U chunk by chunk
(`zeco.operators.delta.core`), and it is the one with gradients.
Decays are taken relative to the middle of a chunk, or by bisection: `zeco.operators.decay.gates`.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Protocol, Self, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from zeco.core.documents import Pieces
from zeco.core.maps import AffineMap
from zeco.core.shapes import state_dtype
from zeco.core.transitions import Dense, Reset, Transition
from zeco.operators.decay.exact_scores import exact_scores
from zeco.operators.decay.gates import ChunkGates, causal_scores, scale_rows
from zeco.operators.delta.core import Exact, Rows, run_chunks
from zeco.operators.delta.scan import fold_maps, fold_matrices, run_back, scan_chunks
from zeco.operators.delta.triangular import unit_lower_inverse
from zeco.operators.layout import make_layout
from zeco.operators.segment import Inputs, Operator, Segment

# K and V are padded to a multiple of this, so that every matrix of a batch starts on 64 bytes:
# BLAS sums in another order where one does not, and a chunk's result would then depend on its
# place in the call.
_WIDTH = 4


class DeltaFamilyOperator(Operator, Protocol):
    """What a `DeltaFamilySegment` needs to know of its operator."""

    @property
    def scale(self) -> float:
        """Factor of the queries."""
        ...

    @property
    def chunk(self) -> int:
        """Tokens a chunk, a power of two."""
        ...


class DeltaFamilySegment(Segment):
    """One call of an operator of the family, in torch; intermediate results are kept.

    Chunks are [N, B, H, C, width], flattened to [M, C, width] where they are multiplied. Rows with
    a tilde in the module's text are scaled by their decays; what that leaves out of states and
    updates is ``gates.shift``.
    """

    def __init__(self, operator: DeltaFamilyOperator, inputs: Inputs, pieces: Pieces) -> None:
        super().__init__(inputs, pieces)
        self.operator = operator
        self.layout = make_layout(pieces, operator.chunk)
        self.dtype = state_dtype(*inputs)
        self.B, self.H, self.K, self.V = operator.state_shape(inputs)
        self._prepared: tuple[Tensor, Tensor] | None = None

    # What the operators of the family define.

    @cached_property
    @abstractmethod
    def gates(self) -> ChunkGates | None:
        """Cumulative decays, the own token's included."""

    @cached_property
    @abstractmethod
    def query(self) -> Tensor:
        """Queries, scaled by decays and ``scale``: [M, C, K]."""

    @cached_property
    @abstractmethod
    def erase(self) -> Tensor:
        """Rows ã that read the state: [M, C, K]."""

    @cached_property
    @abstractmethod
    def direction(self) -> Tensor:
        """Rows p̃ along which u is written: [M, C, K]."""

    @abstractmethod
    def exact_overlap(self) -> Exact:
        """Return the chunks whose overlaps A of ã and p̃ need the exact form, and these overlaps."""

    @abstractmethod
    def exact_scores(self) -> Exact:
        """Return the same chunks, and the scores of queries and p̃."""

    @abstractmethod
    def source(self) -> Tensor:
        """What u is without an entering state and without the u of earlier tokens: [M, C, V]."""

    def written(self) -> Tensor | None:
        """What the chunk's tokens write besides u, before ``shift`` [M, K, V]; None for nothing."""
        return None

    def attended(self) -> Tensor | None:
        """What the outputs read of that within the chunk [M, C, V]; None for nothing."""
        return None

    # What follows from it.

    def chunks(self, index: int) -> Tensor:
        """Return an input as [N, B, H, C, width] in the dtype of the states."""
        return self._split(cast("Tensor", self.inputs[index]))

    def _split(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            x = x.unsqueeze(-1)
        elif padding := -x.shape[-1] % _WIDTH:
            x = F.pad(x, (0, padding))
        return self.layout.split(x.to(self.dtype)).permute(1, 0, 3, 2, 4).contiguous()

    @property
    def needs_exact(self) -> bool:
        """Whether any chunk's decay is too strong for the fast form."""
        return self.gates is not None and self.gates.exact is not None

    def exact_part(self, x: Tensor, y: Tensor, g: Tensor | None, *, strict: bool) -> Exact:
        """Return which of the M decayed products ``x yᵀ`` need the exact form, and these."""
        gates = self.gates
        if gates is None or g is None or gates.exact is None:
            return None, None
        x, y, g = (t.flatten(0, 2)[gates.exact] for t in (x, y, g))
        return gates.exact, exact_scores(x, y, g, strict=strict)

    def _shifted(self, x: Tensor) -> Tensor:
        """Scale the K rows of states or updates [M, K, width] by what tokens' rows leave out."""
        return x if self.gates is None else x * self.gates.shift.flatten(0, 2).exp()

    @cached_property
    def _exact_overlap(self) -> Exact:
        return self.exact_overlap()

    @cached_property
    def _exact_scores(self) -> Exact:
        return self.exact_scores()

    @cached_property
    def _inverse(self) -> Tensor:
        """(I - A)⁻¹ of every chunk, outside of autograd."""
        rows, exact = self._exact_overlap
        with torch.no_grad():
            overlap = causal_scores(self.erase, self.direction, rows, exact, strict=True)
            return unit_lower_inverse(overlap)

    @cached_property
    def _read(self) -> Tensor:
        """W [M, C, K], before ``shift``."""
        return torch.bmm(self._inverse, self.erase)

    @cached_property
    def _matrices(self) -> Tensor:
        """The chunks' dense transitions [N, B*H, K, K]."""
        product = self._shifted(torch.bmm(self.direction.mT, self._read))
        if self.gates is None:
            kept = torch.ones((), dtype=self.dtype, device=product.device)
        else:
            product = product * self.gates.shift.flatten(0, 2).mT.exp()
            kept = self.gates.total.flatten(0, 2).exp()
        width = product.shape[-1]
        identity = torch.eye(width, dtype=self.dtype, device=product.device)
        matrices = torch.addcmul(product, identity, kept.unsqueeze(-1))
        return matrices.view(-1, self.B * self.H, width, width)

    @cached_property
    def _sourced(self) -> Tensor:
        """X [M, C, V]."""
        return torch.bmm(self._inverse, self.source())

    @cached_property
    def _updates(self) -> Tensor:
        """What every chunk adds to the state: [N, B*H, K, V]."""
        update = torch.bmm(self.direction.mT, self._sourced)
        written = self.written()
        update = self._shifted(update if written is None else update + written)
        return update.view(-1, self.B * self.H, *update.shape[-2:])

    def _widen(self, states: Tensor) -> Tensor:
        """Bring states [..., B, H, K, V] to [..., B*H, K, V] in the widths and dtype used inside."""
        padding = (0, -self.V % _WIDTH, 0, -self.K % _WIDTH)
        states = states.to(self.dtype)
        return (F.pad(states, padding) if any(padding) else states).flatten(-4, -3)

    def _narrow(self, states: Tensor) -> Tensor:
        """Undo `_widen`."""
        states = states[..., : self.K, : self.V].contiguous()
        return states.unflatten(-3, (self.B, self.H))

    def _starts(self, entering: Tensor | None, initials: Tensor | None) -> Tensor:
        """Return the states [n, B*H, K, V] from which the pieces start."""
        zeros = self.erase.new_zeros(1, self.B, self.H, self.K, self.V)
        states = (
            [] if not self.pieces.continued else [zeros if entering is None else entering[None]]
        )
        if fresh := len(self.pieces.fresh):
            states.append(zeros.expand(fresh, -1, -1, -1, -1) if initials is None else initials)
        return self._widen(torch.cat([x.to(self.dtype) for x in states]))

    def summarize(self, initials: Tensor | None = None) -> AffineMap:
        """Return the rank's map; ``initials`` count when the last piece starts from one of them."""
        if self.pieces.resets:
            _, finals = scan_chunks(
                self._matrices, self._updates, self._starts(None, initials), self.layout.ranges
            )
            return AffineMap(self._narrow(finals[-1]), self.transition())
        matrix, update = fold_maps(self._matrices, self._updates)
        return AffineMap(self._narrow(update), self._dense(matrix))

    def transition(self) -> Transition:
        """Return the product of the chunks' transitions, for which v and q are not needed."""
        if self.pieces.resets:
            return Reset(among="dense")
        return self._dense(fold_matrices(self._matrices))

    def _dense(self, matrix: Tensor) -> Dense:
        matrix = matrix[..., : self.K, : self.K].contiguous()
        return Dense(matrix.unflatten(0, (self.B, self.H)))

    def _effective_query(self) -> tuple[Tensor, Tensor]:
        """Return what a chunk's outputs read of its entering state [M, C, K], and the scores."""
        scores = causal_scores(self.query, self.direction, *self._exact_scores, strict=False)
        return torch.baddbmm(self.query, scores, self._read), scores

    def prepare(self) -> None:
        """Attend within the chunks, and let the queries see through what the chunk erases."""
        query, scores = self._effective_query()
        intra = torch.bmm(scores, self._sourced)
        attended = self.attended()
        self._prepared = query, intra if attended is None else intra + attended

    def output(self, entering: Tensor, initials: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the pass over chunks, or what of it `prepare` has left to do."""
        starts = self._starts(entering, initials)
        if self._prepared is None:
            return self._pass(starts)
        query, intra = self._prepared
        states, finals = scan_chunks(self._matrices, self._updates, starts, self.layout.ranges)
        o = torch.baddbmm(intra, query, self._shifted(states.flatten(0, 1)))
        return self._merge(o), self._narrow(finals)

    def _pass(self, starts: Tensor, *, outputs: bool = True) -> tuple[Tensor, Tensor]:
        """Run the differentiable pass."""
        gates = self.gates
        rows, overlap = self._exact_overlap
        core = Rows(
            self.query,
            self.erase,
            self.direction,
            self.source(),
            self.written(),
            None if gates is None else gates.total.flatten(0, 2).unsqueeze(-1),
            None if gates is None else gates.shift.flatten(0, 2),
            self._inverse,
            rows,
            overlap,
            self._exact_scores[1],
        )
        o, finals = run_chunks(core, starts, self.layout.ranges, outputs=outputs)
        attended = self.attended()
        return self._merge(o if attended is None else o + attended), self._narrow(finals)

    def _merge(self, o: Tensor) -> Tensor:
        """Bring outputs [M, C, V] to [B, T, H, V] and the dtype of the inputs."""
        o = o.view(self.layout.num_chunks, self.B, self.H, *o.shape[1:]).permute(1, 0, 3, 2, 4)
        o = self.layout.merge(o[..., : self.V]).to(cast("Tensor", self.inputs[0]).dtype)
        return o.contiguous()

    def adjoint(self, d_o: Tensor, d_finals: Tensor | None) -> Tensor:
        """Return the gradient of the entering state, from all inputs but v, and d_o."""
        if not self.pieces.continued:
            return d_o.new_zeros(self.B, self.H, self.K, self.V, dtype=self.dtype)
        query, _ = self._effective_query()
        d_states = self._shifted(torch.bmm(query.mT, self._split(d_o).flatten(0, 2)))
        stop = self.layout.ranges[0][1]
        d_states = d_states.view(-1, self.B * self.H, *d_states.shape[-2:])[:stop]
        if d_finals is not None and len(d_finals) > 1:
            start = self._widen(d_finals[0])
        else:
            start = d_states.new_zeros(self.B * self.H, *d_states.shape[-2:])
        return self._narrow(run_back(self._matrices[:stop], d_states, start))

    def replay(self, entering: Tensor, initials: Tensor | None) -> None:
        """Recompute the pass but for the outputs' values, which no gradient needs."""
        self._leaves = tuple(
            None if x is None else x.detach().requires_grad_() for x in self.inputs
        )
        entering = entering.detach().requires_grad_()
        initials = None if initials is None else initials.detach().requires_grad_()
        twin = self.fresh(self._leaves)
        if "_inverse" in self.__dict__:
            # Left by `adjoint`; it has no gradient of its own.
            twin._inverse = self._inverse
        with torch.enable_grad():
            o, finals = twin._pass(twin._starts(entering, initials), outputs=False)
        self._replayed = (entering, initials, o, finals)

    def fresh(self, inputs: Inputs | None = None) -> Self:
        """Return a segment over other inputs, with nothing kept."""
        return type(self)(self.operator, self.inputs if inputs is None else inputs, self.pieces)


def scaled(x: Tensor, exponent: Tensor | None, factor: float = 1.0) -> Tensor:
    """Return ``factor · exp(exponent) ∘ x`` of chunks, flattened to [M, C, K]."""
    return scale_rows(x, exponent, factor).flatten(0, 2)
