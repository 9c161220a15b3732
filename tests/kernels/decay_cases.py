"""Cases of test_decay.py: run with TRITON_INTERPRET=1 and the name of a part as argument."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from zeco.core.documents import local_pieces, whole
from zeco.core.errors import UnsupportedError
from zeco.kernels.decay.gradients import gradient_passes, query_pass
from zeco.kernels.decay.passes import adjoint_state_pass, output_pass, state_pass
from zeco.kernels.decay.plan import make_plan
from zeco.kernels.decay.row_scales import pack, unpack
from zeco.kernels.scalar import gradients as scalar_gradients
from zeco.kernels.scalar import passes as scalar
from zeco.operators.decay import triton_segment as triton_decay
from zeco.operators.decay.segment import DecayOperator, DecaySegment
from zeco.operators.decay.triton_segment import TritonDecaySegment
from zeco.operators.oracle import recurrence


def let_numpy_index():
    """Let the interpreter's scalars, arrays of one number, bound loops.

    Triton 3.6 takes int() of such an array, which numpy has refused since 2.4.
    """
    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_index


NAMES = ("o", "final", "dq", "dk", "dv", "dg", "d_initial")
# fp16 rounds the scaled rows (2^-11).
BOUNDS = {torch.float32: 5e-6, torch.float16: 5e-3}


def make_gates(kind, size):
    if kind != "mixed":
        return kind * (0.5 + torch.rand(size))
    return -torch.rand(size) * torch.tensor([0.0, 0.1, 3.0, 30.0])[torch.randint(0, 4, size)]


def relative(found, expected):
    return float((found.double() - expected).norm() / (expected.norm() + 1e-30))


def make(B, T, H, K, V, dtype, gates):
    q, k = torch.randn(B, T, H, K).to(dtype), torch.randn(B, T, H, K).to(dtype)
    v, d_o = torch.randn(B, T, H, V).to(dtype), torch.randn(B, T, H, V).to(dtype)
    states = torch.randn(2, B, H, K, V)
    return q, k, v, make_gates(gates, (B, T, H, K)), d_o, states[0], states[1]


def run_passes(q, k, v, g, d_o, entering, d_leaving, scale, *, packed=False, **options):
    plan = make_plan(q, v, g, **options)
    if packed:
        plan = replace(plan, packed=True)
    states, chunks = state_pass(plan, k, v, g)
    o, leaving = output_pass(
        plan, q, k, v, g, scale=scale, states=states, chunks=chunks, entering=entering
    )
    adjoints, again = adjoint_state_pass(plan, q, d_o, g, scale=scale)
    assert torch.equal(chunks.strong, again.strong)
    known = {"scale": scale, "states": states, "chunks": chunks, "entering": entering}
    queries = query_pass(plan, q, k, v, d_o, **known)
    found = gradient_passes(
        plan, q, k, v, g, d_o, adjoints=adjoints, d_leaving=d_leaving, queries=queries, **known
    )
    return o, leaving, found.q, found.k, found.v, found.g, found.entering


def check(B, T, H, K, V, dtype, gates, **options):
    check_inputs(*make(B, T, H, K, V, dtype, gates), **options)


def check_inputs(q, k, v, g, d_o, entering, d_leaving, *, scale=0.3, group=1, **options):
    leaves = [x.double().requires_grad_() for x in (q, k, v, g, entering)]
    if group > 1:
        # Gradients of q and k are those of every head of v.
        q, k, g = (x[:, :, ::group].contiguous() for x in (q, k, g))
        leaves[3] = g.double().requires_grad_()
        wide = [x.double().repeat_interleave(group, 2).requires_grad_() for x in (q, k)]
        leaves[:2] = wide
    gates = leaves[3].repeat_interleave(group, 2)
    o, final = recurrence(*leaves[:3], gates, scale=scale, initial_state=leaves[4])
    grads = torch.autograd.grad((o, final), leaves, (d_o.double(), d_leaving.double()))
    found = run_passes(q, k, v, g, d_o, entering, d_leaving, scale, **options)
    errors = {
        name: relative(x, y.detach())
        for name, x, y in zip(NAMES, found, (o, final, *grads), strict=True)
    }
    bound = BOUNDS[q.dtype]
    assert all(e < bound for e in errors.values()), (q.shape, v.shape, q.dtype, options, errors)


def passes():
    small = {"chunk": 16, "num_segments": 2}
    fp32, fp16 = torch.float32, torch.float16
    for gates in (0.0, -0.1, -2.0, -20.0, "mixed"):
        check(1, 40, 1, 16, 16, fp32, gates, **small)
    check(1, 40, 1, 16, 16, fp16, "mixed", **small)
    check(1, 100, 1, 16, 32, fp16, -0.1, **small)
    # What bf16 has between its passes, which serves fp16 while no channel is strong.
    check(1, 100, 1, 16, 32, fp16, -0.1, packed=True, **small)
    check(1, 40, 1, 24, 40, fp16, 0.0, packed=True, **small)
    check(2, 40, 4, 16, 16, fp16, -0.1, packed=True, group=2, **small)
    check(1, 40, 4, 16, 16, fp32, "mixed", group=2, **small)
    check(1, 1, 1, 16, 16, fp32, -1.0, **small)
    check(2, 50, 2, 24, 40, fp32, -0.5, **small)
    check(1, 100, 1, 16, 16, fp32, "mixed", chunk=16, num_segments=7)
    check(1, 20, 1, 8, 128, fp16, -0.1, chunk=16, num_segments=1)
    what_packing_keeps()
    few_strong_chunks()
    infinite_and_missing()
    a_wrong_decay_would_fail()


def make_weights(B, T, H, dtype=torch.float32):
    """Steps, of which some are zero but in fp16, which isn't told of such, and one skip a head."""
    step = 0.1 + torch.rand(B, T, H)
    if dtype != torch.float16:
        step *= torch.rand(B, T, H) > 0.2
    return step, torch.randn(H).expand(B, T, H)


def check_scalar(
    B, T, H, K, V, dtype, gates, *, scale=0.3, weighted=False, fixed=False, group=1, **options
):
    """Compare one decay a head with the recurrence; ``fixed`` weights have no gradient."""
    q, k, v, g, d_o, entering, d_leaving = make(B, T, H, K, V, dtype, gates)
    q, k = (x[:, :, ::group].contiguous() for x in (q, k))
    g = g[..., 0].contiguous()
    step, skip = make_weights(B, T, H, dtype) if weighted else (None, None)
    given = [x for x in (q, k, v, g, entering, step, skip) if x is not None]
    leaves = [x.double().requires_grad_() for x in given]
    wide = leaves[3].unsqueeze(-1).expand(*g.shape, K)
    # Gradients are those of every head of values.
    leaves[:2] = [x.detach().repeat_interleave(group, 2).requires_grad_() for x in leaves[:2]]
    keys = leaves[1] * leaves[5].unsqueeze(-1) if weighted else leaves[1]
    o, final = recurrence(leaves[0], keys, leaves[2], wide, scale=scale, initial_state=leaves[4])
    if weighted:
        o = o + leaves[6].unsqueeze(-1) * leaves[2]
    grads = torch.autograd.grad((o, final), leaves, (d_o.double(), d_leaving.double()))
    plan = make_plan(q, v, g, **options)
    sums = scalar.chunk_sums(plan, g, step, skip)
    states = scalar.state_pass(plan, k, v, sums)
    found_o, leaving = scalar.output_pass(
        plan, q, k, v, sums, scale=scale, states=states, entering=entering
    )
    adjoints = scalar.adjoint_state_pass(plan, q, d_o, sums, scale=scale)
    known = {"scale": scale, "states": states, "sums": sums, "entering": entering}
    queries = scalar_gradients.query_pass(plan, q, k, v, d_o, **known, pulls=not fixed)
    if fixed:
        assert (queries.pull, queries.kept) == (None, None)
    found = scalar_gradients.gradient_passes(
        plan,
        *(q, k, v, None if fixed else g, d_o),
        adjoints=adjoints,
        d_leaving=d_leaving,
        queries=queries,
        step=None if fixed else step,
        skip=None if fixed else skip,
        **known,
    )
    results = (found_o, leaving, found.q, found.k, found.v, found.g, found.entering)
    results += (found.step, found.skip) if weighted else ()
    names = (*NAMES, "d_step", "d_skip")[: len(results)]
    errors = {
        name: relative(x, y.detach())
        for name, x, y in zip(names, results, (o, final, *grads), strict=True)
        if x is not None
    }
    missing = {name for name in names if name not in errors}
    assert missing == ({"dg", "d_step", "d_skip"} & set(names) if fixed else set())
    assert all(e < BOUNDS[dtype] for e in errors.values()), (B, T, H, K, V, dtype, gates, errors)


def one_decay_a_head():
    for gates in (-0.1, -20.0, "mixed", -1e4):
        check_scalar(1, 100, 1, 16, 16, torch.float32, gates, chunk=16, num_segments=3)
    check_scalar(2, 40, 2, 24, 40, torch.float16, "mixed", chunk=16, num_segments=2)
    check_scalar(1, 20, 1, 8, 128, torch.float16, -0.1, chunk=16)
    check_scalar(1, 1, 1, 16, 16, torch.float32, -1.0)
    for gates in (-0.1, "mixed", -1e4):
        check_scalar(
            1, 100, 2, 16, 24, torch.float32, gates, weighted=True, chunk=16, num_segments=3
        )
    for weighted in (False, True):
        check_scalar(
            1, 100, 2, 16, 24, torch.float16, -0.1, weighted=weighted, fixed=True, group=2, chunk=16,
            num_segments=3,
        )  # fmt: skip
    check_scalar(2, 40, 6, 16, 16, torch.float32, -0.5, group=3, chunk=16, num_segments=2)
    # Fewer channels of the values than of the keys, and more heads than are summed side by side.
    check_scalar(1, 72, 2, 72, 16, torch.float32, "mixed", weighted=True, chunk=16, num_segments=2)
    check_scalar(1, 72, 2, 72, 16, torch.float16, -0.1, group=2, chunk=16, num_segments=2)
    check_scalar(1, 40, 10, 16, 16, torch.float32, -0.5, weighted=True, chunk=16, num_segments=2)


def wide():
    """Keys of more channels than programs carry states of."""
    fp16 = torch.float16
    small = {"chunk": 16, "num_segments": 2}
    check(1, 40, 1, 136, 8, fp16, "mixed", **small)
    check(2, 40, 2, 144, 24, fp16, -0.1, group=2, **small)
    check(1, 40, 1, 136, 136, fp16, -0.1, packed=True, **small)
    check(1, 72, 1, 200, 16, fp16, 0.0, packed=True, chunk=16, num_segments=3)
    check(1, 20, 1, 136, 8, fp16, -5.0)
    check_scalar(1, 72, 1, 136, 8, fp16, "mixed", chunk=16, num_segments=3)
    check_scalar(1, 72, 1, 136, 136, fp16, -0.1, weighted=True, **small)
    check_scalar(2, 40, 4, 136, 16, fp16, -0.1, weighted=True, group=2, **small)
    check_scalar(2, 40, 4, 136, 16, fp16, -0.1, weighted=True, fixed=True, group=2, **small)
    check_scalar(1, 20, 1, 256, 264, fp16, -1e4)
    pieces = local_pieces([0, 3, 40, 300], 20, 290)  # goes on, and is gone on with
    for kind in ("identity", "scalar", "diagonal"):
        operator = DecayOperator("test", kind, 0.5, operands=fp16)
        compare_segments(operator, 270, pieces, K=136, V=136, with_initials=True)
    compare_segments(operator, 200, whole(200), K=136, V=17)
    strict = DecayOperator("test", "diagonal", -0.5, strict=True, operands=fp16)
    compare_segments(strict, 270, pieces, K=136)


@triton.jit
def pack_and_unpack_kernel(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_ptr + at, unpack(pack(tl.load(x_ptr + at))))


def what_packing_keeps():
    """A scale from 2^-60 to 2^60 comes back within 2^-10, a power of two as it was."""
    x = torch.cat([torch.exp2(torch.arange(-60.0, 61.0)), torch.exp2(120 * torch.rand(7) - 60)])
    y = torch.empty_like(x)
    pack_and_unpack_kernel[(1,)](x, y, N=128)
    assert torch.equal(y[:121], x[:121])
    assert ((y - x).abs() <= 2.0**-10 * x).all()


def infinite_and_missing():
    """Gates of -inf cut the past off; NaN comes out again."""
    q, k, v, g, _, entering, _ = make(1, 20, 1, 16, 16, torch.float32, -0.5)
    g[:, 7] = -torch.inf
    plan = make_plan(q, v, g, chunk=16, num_segments=1)
    states, chunks = state_pass(plan, k, v, g)
    o, _ = output_pass(plan, q, k, v, g, scale=1.0, states=states, chunks=chunks, entering=entering)
    alone, _ = recurrence(q[:, 7:], k[:, 7:], v[:, 7:], g[:, 7:], scale=1.0)
    assert relative(o[:, 7:], alone) < 1e-6
    g[:, 3] = torch.nan
    states, _ = state_pass(plan, k, v, g)
    assert states.own.isnan().any()


def few_strong_chunks():
    """Strong chunks far apart: more chunks than programs look at in one go, most of them unflagged."""
    q, k, v, g, d_o, entering, d_leaving = make(1, 1600, 2, 16, 16, torch.float32, -0.01)
    g[:, [3, 1111, 1590], :, 4:9] = -150.0
    check_inputs(q, k, v, g, d_o, entering, d_leaving, chunk=16, num_segments=3)
    plan = make_plan(q, v, g, chunk=16)
    _, chunks = state_pass(plan, k, v, g)
    assert chunks.strong.sum() == 6
    assert chunks.strong.numel() > 16 * plan.multiprocessors * plan.cuts.pairs.resident


def a_wrong_decay_would_fail():
    q, k, v, g, d_o, entering, d_leaving = make(1, 40, 1, 16, 16, torch.float32, -0.5)
    o, *_ = run_passes(q, k, v, g, d_o, entering, d_leaving, 1.0, chunk=16)
    expected, _ = recurrence(q, k, v, g.roll(1, 1), scale=1.0, initial_state=entering)
    assert relative(o, expected) > 1e-2


def through_the_contract(make_segment, operator, inputs, pieces, d_o, entering, d_finals, initials):
    """Everything that a segment gives, forward and backward, with and without what it kept."""
    call = make_segment(operator, inputs, pieces)
    total = call.summarize(initials)
    call.prepare()
    o, finals = call.output(entering, initials)
    back = call.fresh()
    adjoint = back.adjoint(d_o, d_finals)
    decayed = back.transition()(entering)
    back.recall(call.keep())
    back.replay(entering, initials)
    found = back.backward(d_o, d_finals)
    tensors = [total.update, decayed, o, finals, adjoint, found.entering, found.initials]
    return [None if x is None else x.detach() for x in (*tensors, *found.inputs)]


def compare_segments(
    operator, T, pieces, *, K=16, V=24, with_initials=False, weighted=False, grouped=False
):
    q, k, v, g, d_o, entering, _ = make(1, T, 2, K, V, torch.float32, -0.3)
    if grouped:
        k = k[:, :, :1].expand(k.shape)
        q = q[:, :, :1].expand(q.shape)
    gates = {"identity": None, "scalar": g[..., 0].contiguous(), "diagonal": g}[operator.kind]
    d_finals = torch.randn(len(pieces.documents), *entering.shape)
    initials = torch.randn(len(pieces.fresh), *entering.shape) if with_initials else None
    given = (pieces, d_o, entering, d_finals, initials)
    inputs = (q, k, v, gates)
    if weighted:
        step, skip = make_weights(1, T, 2)
        weighed = (*inputs, step, None if operator.strict else skip)
        multiplied = (q, k, v * step.unsqueeze(-1), gates)
        expected = through_the_contract(DecaySegment, operator, multiplied, *given)
        found = through_the_contract(TritonDecaySegment, operator, weighed, *given)
        dv, d_skip = expected[9], None
        expected[9], d_step = dv * step.unsqueeze(-1), (dv * v).sum(-1)
        if not operator.strict:
            expected[2] = expected[2] + skip.unsqueeze(-1) * v
            expected[9] = expected[9] + skip.unsqueeze(-1) * d_o
            d_skip = (v * d_o).sum(-1)
        results = ([*expected, d_step, d_skip], found)
    else:
        shared = (q[:, :, :1], k[:, :, :1], v, gates) if grouped else inputs
        expected = through_the_contract(DecaySegment, operator, inputs, *given)
        found = through_the_contract(TritonDecaySegment, operator, shared, *given)
        if grouped:
            expected[7:9] = [x.sum(2, keepdim=True) for x in expected[7:9]]
        results = (expected, found)
    for i, (expected, x) in enumerate(zip(*results, strict=True)):
        assert (x is None) == (expected is None), (operator, pieces, i)
        if x is not None:
            assert x.shape == expected.shape, (operator, pieces, i)
            assert x.dtype == expected.dtype
            error = relative(x, expected.double())
            bound = 1e-5 if operator.operands is None else BOUNDS[operator.operands]
            assert error < bound, (operator, pieces, V, with_initials, i, error)


def segment():
    """The segment agrees with the torch segment in every kind, through the whole contract."""
    for kind, scale in product(("identity", "scalar", "diagonal"), (0.5, -0.5)):
        compare_segments(DecayOperator("test", kind, scale), 70, whole(70))
    queries_wait_for_no_scan()
    none_stands_for_zeros()
    unwanted_gradients_are_left_out()
    refusals()


def queries_wait_for_no_scan():
    """While the reverse scan flies, `replay` makes the gradient of the queries for good."""
    q, k, v, g, d_o, entering, _ = make(1, 40, 1, 16, 16, torch.float32, -0.3)
    operator = DecayOperator("test", "diagonal", 1.0)
    call = TritonDecaySegment(operator, (q, k, v, g), whole(40))
    d_finals = torch.zeros(1, *entering.shape)
    call.adjoint(d_o, d_finals)
    call.replay(entering, None)
    assert call._queries is not None
    made = call._queries.q.data_ptr()
    assert call.backward(d_o, d_finals).inputs[0].data_ptr() == made


def none_stands_for_zeros():
    for kind in ("scalar", "diagonal"):
        q, k, v, g, d_o, entering, _ = make(1, 40, 1, 16, 16, torch.float32, -0.3)
        gates = g if kind == "diagonal" else g[..., 0].contiguous()
        results = []
        for zeros in (torch.zeros_like(entering), None):
            operator = DecayOperator("test", kind, 1.0)
            call = TritonDecaySegment(operator, (q, k, v, gates), whole(40))
            o, finals = call.output(zeros, None)
            call.replay(zeros, None)
            found = call.backward(d_o, None if zeros is None else zeros.unsqueeze(0))
            results.append((o, finals, found.entering, *found.inputs))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def unwanted_gradients_are_left_out():
    """And so is what they are made of; without it a token's own pair is one of all pairs."""
    q, k, v, g, d_o, *_ = make(1, 40, 1, 16, 16, torch.float32, -0.3)
    operator = DecayOperator("test", "scalar", 1.0)
    results = []
    for wanted in (None, (True, True, True, False)):
        call = TritonDecaySegment(operator, (q, k, v, g[..., 0].contiguous()), whole(40))
        call.wanted = wanted
        call.replay(None, None)
        results.append(call.backward(d_o, None).inputs)
    for x, y in zip(results[0][:3], results[1][:3], strict=True):
        assert relative(x, y.double()) < 1e-6
    assert results[1][3] is None


def arranged():
    """So it does for strict queries, packed documents, their initial states, and many columns."""
    plain = DecayOperator("test", "diagonal", 0.5)
    strict = DecayOperator("test", "diagonal", -0.5, strict=True)
    triton_decay._KEPT_PART = 1e9
    compare_segments(strict, 64, whole(64))
    compare_segments(strict, 0, whole(0))
    compare_segments(plain, 20, whole(20), V=136)
    compare_segments(plain, 20, whole(20), V=17)
    packed = [
        ([0, 3, 40, 40, 70], 0, 70),  # starts with a document, an empty one inside
        ([0, 32, 96, 150], 20, 140),  # continues from the rank before and to the next
        ([0, 32, 96, 128], 0, 128),  # documents in whole chunks
        ([0, 40, 90], 40, 80),  # one document, which starts here
        ([0, 100], 30, 60),  # a part of one document
        ([0, 0], 0, 0),  # an empty document alone
    ]
    for bounds, start, stop in packed:
        pieces = local_pieces(bounds, start, stop)
        compare_segments(plain, stop - start, pieces, with_initials=True)
        compare_segments(strict, stop - start, pieces)
    compare_segments(strict, 70, local_pieces([0, 3, 40, 40, 70], 0, 70), with_initials=True)
    one_a_head = DecayOperator("test", "scalar", 0.5)
    pieces = local_pieces([0, 3, 40, 70], 0, 70)
    compare_segments(one_a_head, 70, pieces, V=136, with_initials=True)
    for more in ({}, {"V": 136}):
        compare_segments(one_a_head, 70, pieces, with_initials=True, weighted=True, **more)
        compare_segments(one_a_head, 70, pieces, grouped=True, **more)
    compare_segments(DecayOperator("test", "identity", 0.5), 40, whole(40), grouped=True)
    one_before = DecayOperator("test", "scalar", 0.5, strict=True)
    compare_segments(one_before, 70, pieces, weighted=True)
    documents_do_not_leak()
    outputs_have_the_dtype_asked_for()


def documents_do_not_leak():
    """What one document holds, NaN included, isn't in another's outputs, to the bit."""
    q, k, v, g, _, entering, _ = make(1, 50, 1, 16, 16, torch.float32, -0.3)
    pieces = local_pieces([0, 20, 50], 0, 50)
    operator = DecayOperator("test", "diagonal", 1.0)
    o, _ = TritonDecaySegment(operator, (q, k, v, g), pieces).output(entering, None)
    k[:, :20] = torch.nan
    changed, _ = TritonDecaySegment(operator, (q, k, v, g), pieces).output(entering, None)
    assert changed[:, :20].isnan().all()
    assert torch.equal(changed[:, 20:], o[:, 20:])


def outputs_have_the_dtype_asked_for():
    # No chunk is strong: pairs of such are added to what has been rounded.
    q, k, v, g, _, entering, _ = make(1, 50, 1, 16, 16, torch.float16, -0.1)
    for kind, gates in (("diagonal", g), ("scalar", g[..., 0]), ("identity", None)):
        own, wide = (
            TritonDecaySegment(
                DecayOperator("test", kind, 1.0, results=results), (q, k, v, gates), whole(50)
            ).output(entering, None)[0]
            for results in (None, torch.float32)
        )
        assert wide.dtype == torch.float32
        assert torch.equal(wide.half(), own)
        assert not torch.equal(wide, own.float())


def refusals():
    q, k, v, g, *_ = make(1, 20, 1, 16, 16, torch.float32, -0.3)
    plain = DecayOperator("test", "diagonal", 1.0)
    refused = [
        (plain, (q[..., :9], k[..., :9], v, g[..., :9])),
        (plain, (q.double(), k, v, g)),
    ]
    for operator, inputs in refused:
        with pytest.raises(UnsupportedError, match="backend='torch'"):
            TritonDecaySegment(operator, inputs, whole(20))


if __name__ == "__main__":
    torch.manual_seed(0)
    let_numpy_index()
    {
        "passes": passes,
        "one_decay_a_head": one_decay_a_head,
        "wide": wide,
        "segment": segment,
        "arranged": arranged,
    }[sys.argv[1]]()
