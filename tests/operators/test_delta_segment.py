"""Segments of the delta-rule family: maps chain, adjoints are exact, bits repeat; and the parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zeco.core.documents import Pieces, local_pieces, whole
from zeco.core.transitions import Dense, Reset
from zeco.operators.decay.gates import causal_scores, chunk_gates
from zeco.operators.delta.call import DeltaRuleOperator
from zeco.operators.delta.core import Rows, run_chunks
from zeco.operators.delta.scan import fold_maps, fold_matrices, run_back, scan_chunks
from zeco.operators.delta.triangular import unit_lower_inverse
from zeco.operators.rwkv7 import RWKV7Operator
from zeco.operators.segment import Gradients, Inputs, Operator, Segment

NAMES = ["delta_rule", "gated_delta_rule", "kda", "rwkv7"]
every_operator = pytest.mark.parametrize("name", NAMES)
C = 16
double = torch.float64


def make_operator(name: str, *, scale: float = 0.4) -> Operator:
    if name == "rwkv7":
        return RWKV7Operator(scale, chunk=C)
    return DeltaRuleOperator(name, scale, chunk=C)


def make_inputs(
    name: str, shape: tuple[int, int, int, int, int], *, decay: float, dtype: torch.dtype = double
) -> tuple[Inputs, Tensor]:
    """Return the inputs and a state; decays grow from nothing to twice ``decay`` over T."""
    torch.manual_seed(0)
    B, T, H, K, V = shape
    wide = double if dtype == double else torch.float32
    q, k, v = (torch.randn(B, T, H, width, dtype=dtype) for width in (K, K, V))
    k = F.normalize(k, dim=-1)
    growth = torch.linspace(0, 2, T, dtype=wide)
    g = -2 * decay * torch.rand(B, T, H, K, dtype=wide) * growth[:, None, None]
    beta = 2 * torch.rand(B, T, H, dtype=wide)
    state = torch.randn(B, H, K, V, dtype=wide)
    if name == "rwkv7":
        unit = F.normalize(torch.randn(B, T, H, K, dtype=dtype), dim=-1)
        return (q, g, k, v, -unit, unit * torch.rand_like(unit)), state
    gate = {"delta_rule": None, "gated_delta_rule": g[..., 0], "kda": g}[name]
    return (q, k, v, gate, beta), state


def cut(inputs: Inputs, start: int, stop: int) -> Inputs:
    return tuple(None if x is None else x[:, start:stop] for x in inputs)


def run_split(
    operator: Operator,
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


@every_operator
@pytest.mark.parametrize("dtype", [torch.float32, double, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 5, 7), (2, 33, 17)], ids=str)
@pytest.mark.parametrize("decay", [0.05, 8.0])
def test_segments_cut_at_chunks_equal_one_bit_for_bit(
    name: str, dtype: torch.dtype, shape: tuple[int, int, int], decay: float
) -> None:
    """With decay 8 the fast form serves the first chunks and the exact one the last."""
    H, K, V = shape
    T = 4 * C - 5
    operator = make_operator(name)
    inputs, state = make_inputs(name, (1, T, H, K, V), decay=decay, dtype=dtype)
    d_o = torch.randn(1, T, H, V, dtype=dtype)
    d_final = torch.randn_like(state)
    o, final, gradients = run_split(operator, inputs, state, d_o, d_final, [0, T])
    for cuts in ([0, C, T], [0, 2 * C, T], [0, C, 2 * C, 3 * C, T]):
        o_split, final_split, split = run_split(operator, inputs, state, d_o, d_final, cuts)
        assert torch.equal(o_split, o)
        assert torch.equal(final_split, final)
        assert torch.equal(split.entering, gradients.entering)
        names = operator.input_names
        for name, one, many in zip(names, gradients.inputs, split.inputs, strict=True):
            assert one is None or torch.equal(one, many), f"d{name}"


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_bitwise_test_uses_both_forms(name: str) -> None:
    inputs, _ = make_inputs(name, (1, 4 * C, 1, 4, 4), decay=8.0)
    g = inputs[1 if name == "rwkv7" else 3]
    assert g is not None
    gates = chunk_gates(g.view(1, 4, 1, C, -1), strict=False)
    assert gates.exact is not None
    assert 0 < len(gates.exact) < 4


@every_operator
def test_segments_cut_anywhere_equal_one(name: str) -> None:
    T = 50
    operator = make_operator(name)
    inputs, state = make_inputs(name, (2, T, 2, 3, 5), decay=0.3)
    d_o, d_final = torch.randn(2, T, 2, 5, dtype=double), torch.randn_like(state)
    o, final, gradients = run_split(operator, inputs, state, d_o, d_final, [0, T])
    cuts = [0, 0, 7, 33, 33, 34, T]
    o_split, final_split, split = run_split(operator, inputs, state, d_o, d_final, cuts)
    torch.testing.assert_close(o_split, o)
    torch.testing.assert_close(final_split, final)
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


@every_operator
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("decay", [0.1, 30.0])
def test_map_and_adjoint_agree_with_the_pass(name: str, pieces: Pieces, decay: float) -> None:
    T = pieces.num_tokens
    operator = make_operator(name)
    inputs, entering = make_inputs(name, (1, T, 2, 3, 5), decay=decay)
    initials = torch.randn(len(pieces.fresh), *entering.shape, dtype=double)
    initials = initials if pieces.fresh else None
    segment = operator.segment(inputs, pieces)
    d_o = torch.randn(1, T, 2, 5, dtype=double)
    d_finals = torch.randn(len(pieces.documents), *entering.shape, dtype=double)
    with torch.no_grad():
        o, finals = segment.fresh().output(entering, initials)
        own_map = segment.summarize(initials)
        torch.testing.assert_close(own_map(entering), finals[-1])
        segment.prepare()
        o_prepared, finals_prepared = segment.output(entering, initials)
        torch.testing.assert_close(finals_prepared, finals)
        torch.testing.assert_close(o_prepared, o)
        # Once more: output is a pure function.
        torch.testing.assert_close(segment.output(entering, initials)[0], o)
    for given in (d_finals, None):
        found = segment.fresh().adjoint(d_o, given)
        torch.testing.assert_close(found, Segment.adjoint(segment.fresh(), d_o, given))


@every_operator
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_gradients_after_an_adjoint_are_those_without(name: str, pieces: Pieces) -> None:
    """`adjoint` leaves a graph for `replay`; nothing that is in it may be lost or counted twice."""
    operator = make_operator(name)
    T = pieces.num_tokens
    inputs, entering = make_inputs(name, (1, T, 2, 3, 5), decay=3.0)
    d_o = torch.randn(1, T, 2, 5, dtype=double)
    d_finals = torch.randn(len(pieces.documents), *entering.shape, dtype=double)
    plain, after = operator.segment(inputs, pieces), operator.segment(inputs, pieces)
    with torch.no_grad():
        after.adjoint(d_o, d_finals)
        after.transition()
    for _ in range(2):
        plain.replay(entering, None)
        after.replay(entering, None)
        expected, found = plain.backward(d_o, d_finals), after.backward(d_o, d_finals)
        torch.testing.assert_close(found.entering, expected.entering)
        for x, y in zip(found.inputs, expected.inputs, strict=True):
            torch.testing.assert_close(x, y)


@every_operator
def test_two_segments_chain_by_their_maps(name: str) -> None:
    """The scanned order: maps first, states from them, adjoints back, then all gradients."""
    T, half = 70, 33
    operator = make_operator(name)
    inputs, entering = make_inputs(name, (1, T, 2, 6, 5), decay=0.2)
    d_o, d_final = torch.randn(1, T, 2, 5, dtype=double), torch.randn_like(entering)
    o, final, expected = run_split(operator, inputs, entering, d_o, d_final, [0, T])
    parts = [cut(inputs, 0, half), cut(inputs, half, T)]
    first, second = (operator.segment(part, whole(part[0].shape[1])) for part in parts)  # type: ignore[union-attr]
    with torch.no_grad():
        middle = first.summarize()(entering)
        torch.testing.assert_close(second.summarize()(middle), final)
        o_second, _ = second.output(middle, None)
        torch.testing.assert_close(o_second, o[:, half:])
        first, second = first.fresh(), second.fresh()
        d_second = second.adjoint(d_o[:, half:], None)
        d_middle = second.transition().transpose()(d_final) + d_second
        d_first = first.adjoint(d_o[:, :half], None)
        d_entering = first.transition().transpose()(d_middle) + d_first
        torch.testing.assert_close(d_entering, expected.entering)
    first.replay(entering, None)
    found = first.backward(d_o[:, :half], d_middle.unsqueeze(0))
    torch.testing.assert_close(found.entering, d_entering)
    for x, y in zip(found.inputs, cut(expected.inputs, 0, half), strict=True):
        torch.testing.assert_close(x, y)


@every_operator
def test_transitions(name: str) -> None:
    inputs, _ = make_inputs(name, (1, 20, 2, 3, 5), decay=0.2)
    operator = make_operator(name)
    assert isinstance(operator.segment(inputs, whole(20)).transition(), Dense)
    reset = operator.segment(inputs, local_pieces([0, 10, 20], 0, 20)).transition()
    assert isinstance(reset, Reset)
    assert reset.among == "dense"
    empty = operator.segment(cut(inputs, 0, 0), whole(0)).summarize()
    assert torch.equal(
        empty.transition.parameters[0], torch.eye(3, dtype=double).expand(1, 2, 3, 3)
    )
    assert not empty.update.any()


@pytest.mark.parametrize("rows", [1, 4, 8, 16, 64])
def test_unit_lower_inverse(rows: int) -> None:
    torch.manual_seed(0)
    a = torch.randn(3, rows, rows, dtype=double) / rows
    identity = torch.eye(rows, dtype=double)
    product = unit_lower_inverse(a) @ (identity - a.tril(-1))
    torch.testing.assert_close(product, identity.expand_as(a))


def test_what_lies_above_the_diagonal_is_not_read() -> None:
    a = torch.full((2, 16, 16), torch.inf).triu()
    assert torch.equal(unit_lower_inverse(a), torch.eye(16).expand(2, 16, 16))


def test_scan_and_folds_agree() -> None:
    torch.manual_seed(0)
    N, G, K, V = 5, 2, 3, 2
    matrices = torch.randn(N, G, K, K, dtype=double) / 2
    updates = torch.randn(N, G, K, V, dtype=double)
    starts = torch.randn(1, G, K, V, dtype=double)
    for count in (0, 1, 4, 5):
        T, U = matrices[:count], updates[:count]
        matrix, update = fold_maps(T, U)
        _, finals = scan_chunks(T, U, starts, ((0, count),))
        torch.testing.assert_close(matrix @ starts[0] + update, finals[0])
        assert torch.equal(fold_matrices(T), matrix)
        back = run_back(T, torch.zeros_like(U), finals[0])
        torch.testing.assert_close(back, matrix.mT @ finals[0])


@pytest.mark.parametrize("width", [None, 1, 4])
@pytest.mark.parametrize("exact", [False, True])
def test_the_pass_has_exact_gradients(width: int | None, exact: bool) -> None:
    """Every tensor, the inverse made of what the gradient reaches, as in a segment."""
    torch.manual_seed(0)
    N, G, K, V = 3, 2, 4, 2
    M, rows = N * G, 4
    given = torch.tensor([1, 4]) if exact else None

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, dtype=double) / 2).requires_grad_()

    tensors = {
        "starts": random(3, G, K, V),
        "query": random(M, rows, K),
        "erase": random(M, rows, K),
        "direction": random(M, rows, K),
        "source": random(M, rows, V),
        "written": None if width is None else random(M, K, V),
        "total": None if width is None else random(M, width, 1),
        "shift": None if width is None else random(M, width, 1),
        "overlap": random(2, rows, rows) if exact else None,
        "scores": random(2, rows, rows) if exact else None,
    }

    def call(*values: Tensor | None) -> tuple[Tensor, Tensor]:
        starts, *rest = values
        named = dict(zip(list(tensors)[1:], rest, strict=True))
        for name in ("overlap", "scores"):
            if named[name] is not None:
                named[name] = named[name].tril(-1 if name == "overlap" else 0)
        with torch.no_grad():
            overlap = causal_scores(
                named["erase"], named["direction"], given, named["overlap"], strict=True
            )
            inverse = unit_lower_inverse(overlap)
        core = Rows(**named, inverse=inverse, rows=given)
        assert starts is not None
        return run_chunks(core, starts, ((0, 2), (2, 2), (2, 3)))

    assert torch.autograd.gradcheck(call, tuple(tensors.values()))
