"""Cases of test_decay.py: run with TRITON_INTERPRET=1, one argument, "passes" or "segment"."""

from __future__ import annotations

import sys
from itertools import product

import pytest
import torch
from triton.runtime import interpreter

from zeco.core.documents import whole
from zeco.core.errors import UnsupportedError
from zeco.kernels.decay import adjoint_state_pass, output_pass, state_pass
from zeco.kernels.decay_gradients import gradient_passes
from zeco.kernels.decay_plan import make_plan
from zeco.operators.decay import DecayOperator, DecaySegment
from zeco.operators.oracle import recurrence
from zeco.operators.triton_decay import TritonDecaySegment


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
# fp16 rounds the scaled rows (2^-11) and keeps the gates in fp16 between the passes.
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


def run_passes(q, k, v, g, d_o, entering, d_leaving, scale, **options):
    plan = make_plan(q, v, g, **options)
    states, chunks = state_pass(plan, k, v, g)
    o, leaving = output_pass(
        plan, q, k, v, g, scale=scale, states=states, chunks=chunks, entering=entering
    )
    adjoints, again = adjoint_state_pass(plan, q, d_o, g, scale=scale)
    assert torch.equal(chunks.strong, again.strong)
    found = gradient_passes(
        plan, q, k, v, g, d_o, scale=scale, states=states, adjoints=adjoints, chunks=chunks,
        entering=entering, d_leaving=d_leaving,
    )  # fmt: skip
    return o, leaving, found.q, found.k, found.v, found.g, found.entering


def check(B, T, H, K, V, dtype, gates, *, scale=0.3, **options):
    q, k, v, g, d_o, entering, d_leaving = make(B, T, H, K, V, dtype, gates)
    leaves = [x.double().requires_grad_() for x in (q, k, v, g, entering)]
    o, final = recurrence(*leaves[:4], scale=scale, initial_state=leaves[4])
    grads = torch.autograd.grad((o, final), leaves, (d_o.double(), d_leaving.double()))
    found = run_passes(q, k, v, g, d_o, entering, d_leaving, scale, **options)
    errors = {
        name: relative(x, y.detach())
        for name, x, y in zip(NAMES, found, (o, final, *grads), strict=True)
    }
    bound = BOUNDS[dtype]
    assert all(e < bound for e in errors.values()), (B, T, H, K, V, dtype, gates, options, errors)


def passes():
    small = {"chunk": 16, "num_segments": 2}
    fp32, fp16 = torch.float32, torch.float16
    for gates in (0.0, -0.1, -2.0, -20.0, "mixed"):
        check(1, 40, 1, 16, 16, fp32, gates, **small)
    check(1, 40, 1, 16, 16, fp16, "mixed", **small)
    check(1, 100, 1, 16, 32, fp16, -0.1, **small)
    check(1, 1, 1, 16, 16, fp32, -1.0, **small)
    check(2, 50, 2, 24, 40, fp32, -0.5, **small)
    check(1, 100, 1, 16, 16, fp32, "mixed", chunk=16, num_segments=7)
    check(1, 20, 1, 8, 136, fp16, -0.1, chunk=16, num_segments=1)
    check(1, 20, 1, 136, 8, fp16, "mixed", chunk=16, num_segments=2)
    infinite_and_missing()
    a_wrong_decay_would_fail()


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


def a_wrong_decay_would_fail():
    q, k, v, g, d_o, entering, d_leaving = make(1, 40, 1, 16, 16, torch.float32, -0.5)
    o, *_ = run_passes(q, k, v, g, d_o, entering, d_leaving, 1.0, chunk=16)
    expected, _ = recurrence(q, k, v, g.roll(1, 1), scale=1.0, initial_state=entering)
    assert relative(o, expected) > 1e-2


def segment():
    """The segment agrees with the torch segment in every kind, through the whole contract."""
    for kind, scale in product(("identity", "scalar", "diagonal"), (0.5, -0.5)):
        q, k, v, g, d_o, entering, d_leaving = make(1, 70, 2, 16, 24, torch.float32, -0.3)
        gates = {"identity": None, "scalar": g[..., 0].contiguous(), "diagonal": g}[kind]
        operator = DecayOperator("test", kind, scale)
        results = []
        for make_segment in (DecaySegment, TritonDecaySegment):
            call = make_segment(operator, (q, k, v, gates), whole(70))
            total = call.summarize()
            call.prepare()
            o, finals = call.output(entering, None)
            back = call.fresh()
            adjoint = back.adjoint(d_o, d_leaving[None])
            decayed = back.transition()(entering)
            back.replay(entering, None)
            found = back.backward(d_o, d_leaving[None])
            tensors = [total.update, decayed, o, finals, adjoint, found.entering, *found.inputs]
            results.append([None if x is None else x.detach() for x in tensors])
        for expected, x in zip(*results, strict=True):
            assert (x is None) == (expected is None)
            if x is not None:
                assert x.shape == expected.shape
                assert x.dtype == expected.dtype
                assert relative(x, expected.double()) < 1e-5, kind
    refusals()


def refusals():
    q, k, v, g, *_ = make(1, 20, 1, 16, 16, torch.float32, -0.3)
    plain = DecayOperator("test", "diagonal", 1.0)
    refused = [
        (DecayOperator("test", "diagonal", 1.0, strict=True), (q, k, v, g)),
        (plain, (q[..., :9], k[..., :9], v, g[..., :9])),
        (plain, (q.double(), k, v, g)),
    ]
    for operator, inputs in refused:
        with pytest.raises(UnsupportedError, match="backend='torch'"):
            TritonDecaySegment(operator, inputs, whole(20))


if __name__ == "__main__":
    torch.manual_seed(0)
    let_numpy_index()
    {"passes": passes, "segment": segment}[sys.argv[1]]()
