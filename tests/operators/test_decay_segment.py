"""Segments of the decay family: their maps chain, their adjoints are exact, and their bits repeat."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from zeco.core.documents import Pieces, local_pieces, whole
from zeco.core.transitions import Diagonal, Identity, Reset, Scalar
from zeco.operators.decay.exact_scores import FAST_LIMIT, exact_scores
from zeco.operators.decay.gates import chunk_gates
from zeco.operators.decay.scan import decay_scan, fold_chunks
from zeco.operators.decay.segment import DecayOperator, Kind
from zeco.operators.segment import Gradients, Inputs, Segment

KINDS: list[Kind] = ["identity", "scalar", "diagonal"]
every_kind = pytest.mark.parametrize("kind", KINDS)
strict_or_not = pytest.mark.parametrize("strict", [False, True], ids=["inclusive", "strict"])
C = 16


def make_inputs(
    kind: Kind,
    shape: tuple[int, int, int, int, int],
    *,
    decay: float = 0.3,
    dtype: torch.dtype = torch.float64,
) -> tuple[Inputs, Tensor]:
    """Return (q, k, v, g) and a state; decays grow from nothing to twice ``decay`` over T."""
    torch.manual_seed(0)
    B, T, H, K, V = shape
    q, k, v = (torch.randn(B, T, H, width, dtype=dtype) for width in (K, K, V))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    growth = torch.linspace(0, 2, T, dtype=wide)
    g = None
    if kind == "scalar":
        g = -2 * decay * torch.rand(B, T, H, dtype=wide) * growth[:, None]
    elif kind == "diagonal":
        g = -2 * decay * torch.rand(B, T, H, K, dtype=wide) * growth[:, None, None]
    return (q, k, v, g), torch.randn(B, H, K, V, dtype=wide)


def cut(inputs: Inputs, start: int, stop: int) -> Inputs:
    return tuple(None if x is None else x[:, start:stop] for x in inputs)


def run(
    segment: Segment, entering: Tensor, initials: Tensor | None, d_o: Tensor, d_finals: Tensor
) -> tuple[Tensor, Tensor, Gradients]:
    """Forward as an exchange runs it, and all gradients."""
    with torch.no_grad():
        o, finals = segment.fresh().output(entering, initials)
    segment.replay(entering, initials)
    return o, finals, segment.backward(d_o, d_finals)


def run_split(
    operator: DecayOperator,
    inputs: Inputs,
    entering: Tensor,
    d_o: Tensor,
    d_final: Tensor,
    cuts: Sequence[int],
) -> tuple[Tensor, Tensor, Gradients]:
    """Run consecutive segments, states passed on and their gradients passed back."""
    bounds = list(itertools.pairwise(cuts))
    segments = [operator.segment(cut(inputs, a, b), whole(b - a)) for a, b in bounds]
    states = [entering]
    outputs: list[Tensor] = []
    with torch.no_grad():
        for segment in segments:
            o, finals = segment.fresh().output(states[-1], None)
            outputs.append(o)
            states.append(finals[-1])
    found: list[Inputs] = []
    for segment, state, (a, b) in reversed(list(zip(segments, states, bounds, strict=False))):
        segment.replay(state, None)
        gradients = segment.backward(d_o[:, a:b], d_final.unsqueeze(0))
        d_final = gradients.entering
        found.insert(0, gradients.inputs)
    columns = zip(*found, strict=True)
    joined = tuple(None if column[0] is None else torch.cat(column, 1) for column in columns)
    return torch.cat(outputs, 1), states[-1], Gradients(joined, d_final, None)


@every_kind
@strict_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(16, 1, 4, 4), (16, 3, 5, 7), (16, 2, 33, 17), (64, 4, 64, 64)], ids=str
)
@pytest.mark.parametrize("decay", [0.05, 3.0])
def test_segments_cut_at_chunks_equal_one_bit_for_bit(
    kind: Kind, strict: bool, dtype: torch.dtype, shape: tuple[int, int, int, int], decay: float
) -> None:
    """With decay 3 the fast form serves the first chunks and the exact one the last."""
    C, H, K, V = shape
    T = 4 * C - 5
    operator = DecayOperator("test", kind, 0.3, strict=strict, chunk=C)
    inputs, state = make_inputs(kind, (1, T, H, K, V), decay=decay, dtype=dtype)
    d_o = torch.randn(1, T, H, V, dtype=dtype)
    d_final = torch.randn_like(state)
    segment = operator.segment(inputs, whole(T))
    o, finals, gradients = run(segment, state, None, d_o, d_final.unsqueeze(0))
    for cuts in ([0, C, T], [0, 2 * C, T], [0, C, 2 * C, 3 * C, T]):
        o_split, final, split = run_split(operator, inputs, state, d_o, d_final, cuts)
        assert torch.equal(o_split, o)
        assert torch.equal(final, finals[-1])
        assert torch.equal(split.entering, gradients.entering)
        for name, one, many in zip("qkvg", gradients.inputs, split.inputs, strict=True):
            assert one is None or torch.equal(one, many), f"d{name}"


def test_the_bitwise_test_uses_both_forms() -> None:
    (_, _, _, g), _ = make_inputs("scalar", (1, 4 * C, 1, 4, 4), decay=3.0)
    assert g is not None
    gates = chunk_gates(g.view(1, 4, C, 1, 1).transpose(2, 3), strict=False)
    assert gates.exact is not None
    assert 0 < len(gates.exact) < 4


@every_kind
@strict_or_not
def test_segments_cut_anywhere_equal_one(kind: Kind, strict: bool) -> None:
    T = 50
    operator = DecayOperator("test", kind, 1.0, strict=strict, chunk=C)
    inputs, state = make_inputs(kind, (2, T, 2, 3, 5))
    d_o, d_final = torch.randn(2, T, 2, 5, dtype=torch.float64), torch.randn_like(state)
    segment = operator.segment(inputs, whole(T))
    o, finals, gradients = run(segment, state, None, d_o, d_final.unsqueeze(0))
    cuts = [0, 0, 7, 33, 33, 34, T]
    o_split, final, split = run_split(operator, inputs, state, d_o, d_final, cuts)
    torch.testing.assert_close(o_split, o)
    torch.testing.assert_close(final, finals[-1])
    torch.testing.assert_close(split.entering, gradients.entering)
    for one, many in zip(gradients.inputs, split.inputs, strict=True):
        torch.testing.assert_close(many, one)


PIECES = {
    "whole": whole(37),
    "starts here": local_pieces([0, 37], 0, 37),
    "continued and inner": local_pieces([0, 20, 21, 21, 60], 10, 47),
    "ends exactly": local_pieces([0, 20, 47], 10, 47),
    "empty": whole(0),
}


@every_kind
@strict_or_not
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("decay", [0.1, 30.0])
def test_map_and_adjoint_agree_with_the_pass(
    kind: Kind, strict: bool, pieces: Pieces, decay: float
) -> None:
    T = pieces.num_tokens
    operator = DecayOperator("test", kind, 0.5, strict=strict, chunk=C)
    inputs, entering = make_inputs(kind, (1, T, 2, 3, 5), decay=decay)
    initials = torch.randn(len(pieces.fresh), *entering.shape, dtype=torch.float64)
    initials = initials if pieces.fresh else None
    segment = operator.segment(inputs, pieces)
    d_o = torch.randn(1, T, 2, 5, dtype=torch.float64)
    d_finals = torch.randn(len(pieces.documents), *entering.shape, dtype=torch.float64)
    with torch.no_grad():
        o, finals = segment.fresh().output(entering, initials)
        leaving = operator.segment(inputs, pieces).summarize(initials)(entering)
        torch.testing.assert_close(leaving, finals[-1])
        segment.summarize()
        segment.prepare()
        o_prepared, finals_prepared = segment.output(entering, initials)
        assert torch.equal(finals_prepared, finals)
        assert torch.equal(o_prepared, o)
        # Once more: output is a pure function.
        torch.testing.assert_close(segment.output(entering, initials)[0], o)
    for given in (d_finals, None):
        found = segment.fresh().adjoint(d_o, given)
        torch.testing.assert_close(found, Segment.adjoint(segment.fresh(), d_o, given))


@every_kind
def test_kinds_of_transition(kind: Kind) -> None:
    inputs, _ = make_inputs(kind, (1, 20, 2, 3, 5))
    operator = DecayOperator("test", kind, 1.0, chunk=C)
    transition = operator.segment(inputs, whole(20)).transition()
    assert isinstance(
        transition, {"identity": Identity, "scalar": Scalar, "diagonal": Diagonal}[kind]
    )
    g = inputs[3]
    if g is not None:
        torch.testing.assert_close(transition.parameters[0], g.sum(1))
    reset = operator.segment(inputs, local_pieces([0, 10, 20], 0, 20)).transition()
    assert isinstance(reset, Reset)
    assert reset.among == kind


@pytest.mark.parametrize("width", [None, 1, 3])
def test_scan_has_exact_gradients(width: int | None) -> None:
    torch.manual_seed(0)
    B, N, H, K, V = 2, 4, 1, 3, 2
    double = torch.float64
    update = torch.randn(B, N, H, K, V, dtype=double, requires_grad=True)
    log_decay = None
    if width is not None:
        log_decay = (-torch.rand(B, N, H, width, dtype=double)).requires_grad_()
    entering = torch.randn(B, H, K, V, dtype=double, requires_grad=True)
    initials = torch.randn(3, B, H, K, V, dtype=double, requires_grad=True)
    ranges = ((0, 2), (2, 2), (2, 4))
    for continued, fresh in ((True, initials[:2]), (False, initials), (True, None)):
        tensors = (update, log_decay, entering, fresh)

        def call(
            update: Tensor,
            log_decay: Tensor | None,
            entering: Tensor,
            fresh: Tensor | None,
            continued: bool = continued,
        ) -> tuple[Tensor, Tensor]:
            return decay_scan(
                update, log_decay, entering, fresh, ranges=ranges, continued=continued
            )

        assert torch.autograd.gradcheck(call, tensors)
        _, finals = call(*tensors)
        start = entering if continued else initials[0]
        with torch.no_grad():
            assert torch.equal(fold_chunks(update, log_decay, start, range(2)), finals[0])


@strict_or_not
@pytest.mark.parametrize("width", [1, 6])
@pytest.mark.parametrize("decay", [0.0, 0.5, 50.0])
def test_bisection_equals_the_definition(strict: bool, width: int, decay: float) -> None:
    torch.manual_seed(0)
    M, rows, K = 3, 16, 6
    q, k = (torch.randn(M, rows, K, dtype=torch.float64) for _ in range(2))
    g = -decay * torch.rand(M, rows, width, dtype=torch.float64)
    expected = torch.zeros(M, rows, rows, dtype=torch.float64)
    for i in range(rows):
        for j in range(i if strict else i + 1):
            exponent = g[:, j + 1 : i if strict else i + 1].sum(1)
            expected[:, i, j] = (q[:, i] * k[:, j] * exponent.exp()).sum(-1)
    torch.testing.assert_close(exact_scores(q, k, g, strict=strict), expected)


def test_exponents_never_exceed_half_the_limit() -> None:
    torch.manual_seed(0)
    for decay in (0.0, 0.5 * FAST_LIMIT / C, 2 * FAST_LIMIT / C, 1e4):
        g = -decay * torch.rand(2, 3, 2, C, 5)
        gates = chunk_gates(g, strict=False)
        for exponent in (gates.query, gates.key, gates.shift):
            assert exponent.max() <= FAST_LIMIT / 2
        assert (gates.exact is None) == bool((g.sum(-2) >= -FAST_LIMIT).all())
