"""The Triton kernels of the decay family on a GPU, against the recurrence in fp64."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# The gates' gradient is a sum along a segment, in which what the rounded states lose adds up: 1%.
BOUNDS = {torch.bfloat16: 1.5e-2, torch.float16: 8e-3, torch.float32: 2e-5}
GATES = {"none": 0.0, "weak": -0.1, "medium": -1.0, "strong": -20.0, "mixed": None}


def make_gates(kind, size, dtype):
    if GATES[kind] is None:
        factors = torch.tensor([0.0, 0.1, 3.0, 30.0], device="cuda")
        g = -torch.rand(size, device="cuda")
        return (g * factors[torch.randint(0, 4, size, device="cuda")]).to(dtype)
    return (GATES[kind] * (0.5 + torch.rand(size, device="cuda"))).to(dtype)


def relative(found, expected):
    return float((found.double() - expected).norm() / (expected.norm() + 1e-30))


def run_passes(q, k, v, g, d_o, entering, d_leaving, scale, **options):
    from zeco.kernels.decay.gradients import gradient_passes, query_pass
    from zeco.kernels.decay.passes import adjoint_state_pass, output_pass, state_pass
    from zeco.kernels.decay.plan import make_plan

    plan = make_plan(q, v, g, **options)
    states, chunks = state_pass(plan, k, v, g)
    o, leaving = output_pass(
        plan, q, k, v, g, scale=scale, states=states, chunks=chunks, entering=entering
    )
    adjoints, _ = adjoint_state_pass(plan, q, d_o, g, scale=scale)
    known = {"scale": scale, "states": states, "chunks": chunks, "entering": entering}
    queries = query_pass(plan, q, k, v, d_o, **known)
    found = gradient_passes(
        plan, q, k, v, g, d_o, adjoints=adjoints, d_leaving=d_leaving, queries=queries, **known
    )
    return {
        "o": o, "final": leaving, "dq": found.q, "dk": found.k, "dv": found.v, "dg": found.g,
        "d_initial": found.entering,
    }  # fmt: skip


def check(B, T, H, K, V, dtype, gates, gate_dtype=torch.float32, **options):
    from zeco.operators.oracle import recurrence

    pytest.importorskip("triton")
    q, k = (torch.randn(B, T, H, K, device="cuda").to(dtype) for _ in range(2))
    v, d_o = (torch.randn(B, T, H, V, device="cuda").to(dtype) for _ in range(2))
    g = make_gates(gates, (B, T, H, K), gate_dtype)
    entering, d_leaving = (torch.randn(B, H, K, V, device="cuda") for _ in range(2))
    scale = K**-0.5
    leaves = [x.double().requires_grad_() for x in (q, k, v, g, entering)]
    o, final = recurrence(*leaves[:4], scale=scale, initial_state=leaves[4])
    grads = torch.autograd.grad((o, final), leaves, (d_o.double(), d_leaving.double()))
    expected = dict(
        zip(
            ("o", "final", "dq", "dk", "dv", "dg", "d_initial"),
            (o.detach(), final.detach(), *grads),
            strict=True,
        )
    )
    found = run_passes(q, k, v, g, d_o, entering, d_leaving, scale, **options)
    errors = {name: relative(found[name], expected[name]) for name in expected}
    assert all(e < BOUNDS[dtype] for e in errors.values()), str(errors)
    return errors


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_right_for_every_decay(dtype, gates):
    print(dtype, gates, check(1, 300, 2, 128, 128, dtype, gates))


@pytest.mark.parametrize("gates", ["weak", "mixed"])
def test_gates_in_bf16(gates):
    print(gates, check(1, 300, 2, 128, 128, torch.bfloat16, gates, torch.bfloat16))


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_that_are_no_finite_numbers(gate_dtype):
    import zeco

    pytest.importorskip("triton")
    q, k, v = (torch.randn(1, 300, 2, 64, device="cuda").bfloat16() for _ in range(3))
    g = make_gates("weak", (1, 300, 2, 64), gate_dtype)
    at = (0, 100, 0, 5)
    outputs = []
    for value in (-torch.inf, -1e4, torch.nan):
        g[at] = value
        outputs.append(zeco.ops.gla(q, k, v, g, backend="triton")[0])
    forgotten, strong, unknown = outputs
    assert torch.equal(forgotten, strong)
    assert forgotten.isfinite().all()
    assert unknown[0, 100:, 0].isnan().all()
    assert torch.equal(unknown[0, :64], strong[0, :64])
    assert torch.equal(unknown[0, :, 1], strong[0, :, 1])


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 128, 128), (2, 100, 3, 64, 64), (2, 130, 2, 96, 40), (1, 200, 1, 256, 256),
        (1, 300, 2, 256, 512), (1, 200, 2, 256, 64), (1, 70, 1, 8, 16), (1, 64, 1, 16, 120),
        (2, 1000, 1, 136, 264),
    ],
    ids=str,
)  # fmt: skip
def test_right_for_every_shape(shape):
    print(shape, check(*shape, torch.bfloat16, "weak"))


@pytest.mark.parametrize(
    "shape",
    [(1, 130, 2, 24, 40), (1, 70, 1, 8, 16), (2, 100, 2, 96, 120), (1, 300, 2, 256, 256)],
    ids=str,
)
def test_strong_decay_at_every_shape(shape):
    print(shape, check(*shape, torch.bfloat16, "mixed"))


@pytest.mark.parametrize("shape", [(2, 100, 2, 64, 40), (1, 100, 1, 24, 128)], ids=str)
def test_other_shapes_in_fp32(shape):
    print(shape, check(*shape, torch.float32, "mixed"))


def call_and_differentiate(operator, tensors, weights, **options):
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    o, final = operator(**leaves, output_final_state=True, **options)
    values = list(leaves.values())
    loss = (o * weights[0]).sum() + (final * weights[1]).sum()
    gradients = torch.autograd.grad(loss, values)
    names = [f"d_{name}" for name in leaves]
    return dict(zip(["o", "final", *names], [o.detach(), final.detach(), *gradients], strict=True))


def make_ssd(T, H, K, V):
    """Return inputs of ssd, of which some steps are zero and the heads share keys and queries."""
    step = torch.rand(1, T, H, device="cuda")
    return {
        "x": torch.randn(1, T, H, V, device="cuda").bfloat16(),
        "dt": step * (torch.rand(1, T, H, device="cuda") > 0.1),
        "A": -0.1 - torch.rand(H, device="cuda"),
        "B": torch.randn(1, T, 1, K, device="cuda").bfloat16(),
        "C": torch.randn(1, T, 1, K, device="cuda").bfloat16(),
        "D": torch.randn(H, device="cuda"),
    }


def make_call(name, T, H, K, V, gates):
    """Return a public operator and its tensors in bf16, gates in fp32."""
    import zeco

    if name == "ssd":
        return zeco.ops.ssd, make_ssd(T, H, K, V)
    shapes = {"q": K, "k": K, "v": V}
    if name == "rwkv6":
        shapes = {"r": K, "k": K, "v": V}
    tensors = {x: torch.randn(1, T, H, d, device="cuda").bfloat16() for x, d in shapes.items()}
    if name == "rwkv6":
        tensors |= {"w": make_gates(gates, (1, T, H, K), torch.float32)}
        tensors |= {"u": torch.randn(H, K, device="cuda")}
    elif name == "gla":
        tensors |= {"g": make_gates(gates, (1, T, H, K), torch.float32)}
    elif name == "simple_gla":
        tensors |= {"g": make_gates(gates, (1, T, H), torch.float32)}
    return getattr(zeco.ops, name), tensors


def compare_with_torch(name, T, H, K, V, gates="weak", cu_seqlens=None):
    operator, tensors = make_call(name, T, H, K, V, gates)
    options = {}
    if cu_seqlens is not None:
        options["cu_seqlens"] = torch.tensor(cu_seqlens, device="cuda")
    documents = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    tensors["initial_state"] = torch.randn(documents, H, K, V, device="cuda")
    # Rounded already: the gradient of ssd's A, a sum that cancels, would show what rounding them does.
    d_o = torch.randn(1, T, H, V, device="cuda").bfloat16().float()
    weights = d_o, torch.randn(documents, H, K, V, device="cuda")
    found = call_and_differentiate(operator, tensors, weights, backend="triton", **options)
    wide = {x: t.double() for x, t in tensors.items()}
    expected = call_and_differentiate(operator, wide, weights, backend="torch", **options)
    errors = {x: relative(found[x], expected[x]) for x in expected}
    assert all(e < BOUNDS[torch.bfloat16] for e in errors.values()), str(errors)
    return errors


@pytest.mark.parametrize("name", ["gla", "simple_gla", "linear_attention", "rwkv6", "ssd"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("sizes", [(64, 128), (192, 264)], ids=["walked", "wide"])
def test_public_operators_agree_with_torch(name, packed, sizes):
    bounds = [0, 3, 131, 131, 320, 640, 700] if packed else None
    print(name, packed, compare_with_torch(name, 700, 2, *sizes, cu_seqlens=bounds))


@pytest.mark.parametrize("gates", GATES)
def test_one_decay_a_head_for_every_decay(gates):
    print(gates, compare_with_torch("simple_gla", 1000, 2, 128, 128, gates))


@pytest.mark.parametrize("name", ["gla", "simple_gla", "ssd"])
@pytest.mark.parametrize("sizes", [(64, 512), (256, 264), (24, 17)], ids=str)
def test_any_number_of_columns(name, sizes):
    print(name, sizes, compare_with_torch(name, 200, 2, *sizes))


@pytest.mark.parametrize("name", ["simple_gla", "linear_attention"])
def test_shared_heads_of_queries_and_keys(name):
    operator, tensors = make_call(name, 300, 6, 64, 136, "weak")
    for shared in ("q", "k"):
        tensors[shared] = tensors[shared][:, :, ::3].contiguous()
    weights = torch.randn(1, 300, 6, 136, device="cuda").bfloat16().float(), 1.0
    found = call_and_differentiate(operator, tensors, weights, backend="triton")
    wide = {x: t.double() for x, t in tensors.items()}
    expected = call_and_differentiate(operator, wide, weights, backend="torch")
    errors = {x: relative(found[x], expected[x]) for x in expected}
    assert all(e < BOUNDS[torch.bfloat16] for e in errors.values()), str(errors)


@pytest.mark.parametrize("name", ["gla", "simple_gla", "ssd"])
def test_both_directions(name):
    operator, tensors = make_call(name, 300, 2, 64, 64, "weak")
    found, _ = operator(**tensors, bidirectional=True, backend="triton")
    expected, _ = operator(
        **{x: t.double() for x, t in tensors.items()}, bidirectional=True, backend="torch"
    )
    assert relative(found, expected) < BOUNDS[torch.bfloat16]
