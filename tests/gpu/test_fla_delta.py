"""The delta family on Flash Linear Attention's kernels on a GPU, against the torch backend in fp64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from zeco import ops
from zeco.benchmarks.fla_settings import one_setting_each
from zeco.core.documents import local_pieces, whole
from zeco.core.errors import UnsupportedError
from zeco.operators.fla import segment as fla_delta

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOUNDED = "rwkv7, bounded"
NAMES = ("delta_rule", "gated_delta_rule", "kda", "rwkv7", BOUNDED)
# FLA rounds what it keeps between its kernels to 16 bits; the torch backend only rounds results.
BOUNDS = {torch.bfloat16: 9e-3, torch.float16: 1.5e-3}
GATE_BOUNDS = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
H, K, V = 16, 128, 128
every_operator = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module", autouse=True)
def no_tuning():
    """FLA times dozens of settings of each kernel for minutes before it runs the first time."""
    pytest.importorskip("fla")
    with one_setting_each():
        yield


def relative(found, expected):
    return float((found.double() - expected.double()).norm() / (expected.double().norm() + 1e-30))


def make(name, T, *, dtype=torch.bfloat16, B=1, size=(H, K, V), key_heads=None, decay=0.3, n=1):
    torch.manual_seed(0)
    heads, key_dim, value_dim = size
    keyed = heads if key_heads is None else key_heads
    q = torch.randn(B, T, keyed, key_dim, device="cuda").to(dtype)
    k = F.normalize(torch.randn(B, T, keyed, key_dim, device="cuda"), dim=-1).to(dtype)
    v, d_o = (torch.randn(B, T, heads, value_dim, device="cuda").to(dtype) for _ in range(2))
    g = -decay * torch.rand(B, T, heads, key_dim, device="cuda")
    beta = torch.rand(B, T, heads, device="cuda").to(dtype)
    states = torch.randn(2, n if n > 1 else B, heads, key_dim, value_dim, device="cuda")
    if name in ("rwkv7", BOUNDED):
        a, rate = k[..., torch.randperm(key_dim)], torch.rand(B, T, keyed, key_dim, device="cuda")
        return (q, g[:, :, :keyed], k, v, -a, a * rate.to(dtype)), states[0], d_o, states[1]
    gates = {"delta_rule": (), "gated_delta_rule": (g[..., 0],), "kda": (g,)}[name]
    return (q, k, v, *(x.contiguous() for x in gates), beta), states[0], d_o, states[1]


def gradient_names(name):
    if name in ("rwkv7", BOUNDED):
        return ("o", "final", "dr", "dg", "dk", "dv", "da", "db", "d_initial")
    gates = () if name == "delta_rule" else ("dg",)
    return ("o", "final", "dq", "dk", "dv", *gates, "dbeta", "d_initial")


def run(name, inputs, initial, d_o, d_final, backend, **options):
    leaves = [x.clone().requires_grad_() for x in (*inputs, initial)]
    if name == BOUNDED:
        options["lower_bound"] = -max(0.3, float(-inputs[1].min()))
    o, final = getattr(ops, name.split(",")[0])(
        *leaves[:-1],
        initial_state=leaves[-1],
        output_final_state=True,
        backend=backend,
        **options,
    )
    gradients = torch.autograd.grad((o, final), leaves, (d_o.to(o.dtype), d_final.to(final.dtype)))
    found = (o, final, *gradients)
    return dict(zip(gradient_names(name), (x.detach() for x in found), strict=True))


def compare(found, expected, dtype):
    errors = {key: relative(found[key], expected[key]) for key in expected}
    for key, error in errors.items():
        bound = (GATE_BOUNDS if key == "dg" else BOUNDS)[dtype]
        assert error < bound, (key, errors)
    return errors


def check(name, T, *, dtype=torch.bfloat16, cu_seqlens=None, **options):
    if cu_seqlens is not None:
        options["n"] = len(cu_seqlens) - 1
        cu_seqlens = torch.tensor(cu_seqlens, device="cuda")
    inputs, initial, d_o, d_final = make(name, T, dtype=dtype, **options)
    call = {"cu_seqlens": cu_seqlens}
    wide = [x.double() for x in (*inputs, initial, d_o, d_final)]
    count = len(inputs)
    expected = run(name, wide[:count], *wide[count:], "torch", **call)
    found = run(name, inputs, initial, d_o, d_final, "fla", **call)
    same = run(name, inputs, initial, d_o, d_final, "torch", **call)
    own = {key: relative(same[key], expected[key]) for key in expected}
    errors = compare(found, expected, dtype)
    return {key: (f"{errors[key]:.1e}", f"{own[key]:.1e}") for key in errors}


@every_operator
@pytest.mark.parametrize("T", [1, 64, 4500, 17000])
def test_right_at_any_length(name, T):
    """The longest is cut into runs, whose states come from their maps."""
    print(name, T, check(name, T))


@every_operator
@pytest.mark.parametrize("decay", [0.0, 5.0, 40.0])
def test_right_at_any_decay(name, decay):
    if name != "delta_rule":
        print(name, decay, check(name, 300, decay=decay))


@every_operator
def test_packed_documents(name):
    print(name, check(name, 4500, cu_seqlens=[0, 1, 40, 40, 103, 4400, 4500]))


@every_operator
def test_grouped_heads_and_a_batch(name):
    print(name, check(name, 1100, B=2, key_heads=4))


@every_operator
@pytest.mark.parametrize("size", [(3, 48, 80), (2, 256, 64)], ids=str)
def test_other_sizes(name, size, monkeypatch):
    """Cut into runs, so with maps of these sizes."""
    monkeypatch.setattr(fla_delta, "_UNCUT_CHUNKS", 1)
    print(name, size, check(name, 1300, size=size))


@every_operator
def test_float16(name):
    print(name, check(name, 300, dtype=torch.float16))


def split_in_four(name, inputs, initial, d_o, d_final, pieces, backend):
    """Run four segments as ranks would: maps, scan, outputs, adjoints, reverse scan, gradients."""
    from zeco.operators.delta.call import DeltaRuleOperator
    from zeco.operators.rwkv7 import RWKV7Operator

    if name == "delta_rule":
        inputs = (*inputs[:3], None, inputs[3])
    if name in ("rwkv7", BOUNDED):
        bound = -0.3 if name == BOUNDED else None
        operator = RWKV7Operator(1.0, backend, bound)
    else:
        operator = DeltaRuleOperator(name, K**-0.5, backend=backend)
    bounds = [0, *(piece.num_tokens for piece in pieces)]
    cuts = [sum(bounds[: i + 1]) for i in range(len(bounds))]
    spans = list(pairwise(cuts))

    def segments():
        return [
            operator.segment(tuple(None if x is None else x[:, a:b] for x in inputs), piece)
            for (a, b), piece in zip(spans, pieces, strict=True)
        ]

    forward, backward = segments(), segments()
    states, outputs = [initial], []
    for segment in forward:
        own = segment.summarize()
        o, finals = segment.output(states[-1], None)
        assert relative(own(states[-1]), finals[-1]) < 1e-2
        outputs.append(o)
        states.append(own(states[-1]))
    found, d_state = [], d_final
    for i in reversed(range(len(pieces))):
        segment, (a, b) = backward[i], spans[i]
        segment.recall(forward[i].keep())
        zeros = torch.zeros(len(pieces[i].documents), *d_state.shape, device="cuda")
        own = segment.adjoint(d_o[:, a:b], zeros)
        d_entering = segment.transition().transpose()(d_state) + own
        segment.replay(states[i], None)
        zeros[-1] = d_state
        gradients = segment.backward(d_o[:, a:b], zeros)
        if pieces[i].continued:
            assert relative(d_entering, gradients.entering) < 2e-2
        found.insert(0, gradients.inputs)
        d_state = d_entering
    columns = zip(*found, strict=True)
    joined = [torch.cat(column, 1) for column in columns if column[0] is not None]
    values = (torch.cat(outputs, 1), states[-1], *joined, d_state)
    return dict(zip(gradient_names(name), values, strict=True))


@every_operator
@pytest.mark.parametrize(
    "cut", [[1100, 0, 2300, 700], [64, 64, 64, 64], [7000, 0, 300, 1]], ids=str
)
def test_four_segments_by_their_maps_equal_one(name, cut):
    """The longest has runs enough for kernels of their own settings."""
    inputs, initial, d_o, d_final = make(name, sum(cut))
    wide = [x.double() for x in (*inputs, initial, d_o, d_final)]
    expected = run(name, wide[:-3], *wide[-3:], "torch")
    with torch.no_grad():
        found = split_in_four(name, inputs, initial, d_o, d_final, [whole(n) for n in cut], "fla")
    print(name, cut, compare(found, expected, torch.bfloat16))


@every_operator
def test_four_segments_of_packed_documents_equal_torch_segments(name):
    documents, cut = [0, 1000, 1300, 4400], [1100, 1400, 1200, 700]
    starts = [sum(cut[:i]) for i in range(4)]
    pieces = [local_pieces(documents, a, a + n) for a, n in zip(starts, cut, strict=True)]
    inputs, initial, d_o, d_final = make(name, sum(cut))
    with torch.no_grad():
        expected = split_in_four(
            name, [x.float() for x in inputs], initial, d_o.float(), d_final, pieces, "torch"
        )
        found = split_in_four(name, inputs, initial, d_o, d_final, pieces, "fla")
    print(name, compare(found, expected, torch.bfloat16))


def test_a_wrong_gate_would_fail():
    inputs, initial, d_o, d_final = make("gated_delta_rule", 300)
    expected = run("gated_delta_rule", inputs, initial, d_o, d_final, "torch")
    rolled = (*inputs[:3], inputs[3].roll(1, 1), inputs[4])
    found = run("gated_delta_rule", rolled, initial, d_o, d_final, "fla")
    assert relative(found["o"], expected["o"]) > 3 * BOUNDS[torch.bfloat16]


def test_auto_takes_it_and_a_call_that_it_cannot_serve_is_refused():
    (q, k, v, beta), *_ = make("delta_rule", 64)
    o, _ = ops.delta_rule(q, k, v, beta)
    assert torch.equal(o, ops.delta_rule(q, k, v, beta, backend="fla")[0])
    assert not torch.equal(o, ops.delta_rule(q, k, v, beta, backend="torch")[0])
    with pytest.raises(UnsupportedError, match=r"float32.*backend='torch'"):
        ops.delta_rule(q.float(), k.float(), v.float(), beta, backend="fla")
    assert ops.delta_rule(q.float(), k.float(), v.float(), beta)[0].dtype == torch.float32
