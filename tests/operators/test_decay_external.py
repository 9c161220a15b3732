"""The decay family against the reference functions of other libraries, where installed."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zeco.operators.gla import gla
from zeco.operators.hgrn2 import hgrn2
from zeco.operators.lightning_attention import lightning_attention
from zeco.operators.linear_attention import linear_attention
from zeco.operators.retention import retention
from zeco.operators.rwkv6 import rwkv6
from zeco.operators.simple_gla import simple_gla
from zeco.operators.ssd import ssd

# 100 tokens: no multiple of a chunk; V differs from K: a transposed state can't pass.
B, T, H, K, V = 2, 100, 4, 8, 6
FLA = {
    name: (f"fla.ops.{module}", f"naive_{function}")
    for name, module, function in [
        ("linear", "linear_attn.naive", "recurrent_linear_attn"),
        ("linear_chunk", "linear_attn.naive", "chunk_linear_attn"),
        ("retention", "retention.naive", "retention"),
        ("simple_gla_recurrent", "simple_gla.naive", "recurrent_simple_gla"),
        ("simple_gla_chunk", "simple_gla.naive", "chunk_simple_gla"),
        ("simple_gla_parallel", "simple_gla.naive", "parallel_simple_gla"),
        ("gla", "gla.naive", "recurrent_gla"),
        ("hgrn", "hgrn.naive", "recurrent_hgrn"),
        ("rwkv6", "rwkv6.recurrent_naive", "recurrent_rwkv6"),
        ("rwkv6_chunk", "rwkv6.chunk_naive", "chunk_rwkv6"),
    ]
}
MAMBA2 = "transformers.models.mamba2.modeling_mamba2"
MINIMAX = "transformers.models.minimax.modeling_minimax"


def load(module: str, name: str) -> Callable[..., Any]:
    """Import a function; the test is skipped, with the reason, where that is not possible."""
    with warnings.catch_warnings():
        # Other packages warn at import when there is no GPU.
        warnings.simplefilter("ignore")
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            pytest.skip(f"{module} can't be imported: {error}")
        # Transformers makes its modules' names on first use.
        if not hasattr(found, name):
            pytest.skip(f"this version of {module} has no {name}")
    # Unwrapped: with other packages installed, Transformers puts their GPU kernels in front.
    return inspect.unwrap(getattr(found, name))


def inputs(T: int = T) -> dict[str, Tensor]:
    """Return leaves; gates differ by token, head and channel."""
    torch.manual_seed(0)
    tensors = {
        "q": torch.randn(B, T, H, K),
        "k": torch.randn(B, T, H, K),
        "v": torch.randn(B, T, H, V),
        "g": F.logsigmoid(torch.randn(B, T, H) + 2),
        "gk": F.logsigmoid(torch.randn(B, T, H, K) + 2),
        "u": torch.randn(H, K),
        "state": torch.randn(B, H, K, V),
    }
    return {name: x.requires_grad_() for name, x in tensors.items()}


def pick(tensors: dict[str, Tensor], names: str) -> list[Tensor]:
    return [tensors[name] for name in names.split()]


def head_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def assert_same(
    found: Sequence[Tensor | None],
    expected: Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    tolerance: float = 2e-5,
) -> None:
    """Compare outputs, and the gradients that random cotangents give."""
    for x, y in zip(found, expected, strict=True):
        assert x is not None
        torch.testing.assert_close(x, y, atol=tolerance, rtol=tolerance)
    cotangents = [torch.randn_like(y) for y in expected]
    right = torch.autograd.grad(expected, leaves, cotangents)
    for d, e in zip(torch.autograd.grad(found, leaves, cotangents), right, strict=True):
        # Relative to the largest entry: sums over the tokens cancel.
        bound = 2 * tolerance * max(1.0, float(e.abs().max()))
        torch.testing.assert_close(d, e, atol=bound, rtol=0)


def test_linear_attention_of_fla() -> None:
    other = load(*FLA["linear"])
    leaves = q, k, v, state = pick(inputs(), "q k v state")
    options = {"initial_state": state, "output_final_state": True}
    assert_same(linear_attention(q, k, v, **options), other(q, k, v, **options), leaves)


def test_normalized_linear_attention_of_fla() -> None:
    """It carries the sum of keys [B, 1, H, K] apart from the state; ours is the last column."""
    other = load(*FLA["linear"])
    x = inputs()
    q, k = ((x[name].detach().abs() + 0.1).requires_grad_() for name in "qk")
    v, state = pick(x, "v state")
    torch.manual_seed(1)
    keys = torch.rand(B, H, K, requires_grad=True)
    options = {"normalize": True, "output_final_state": True}
    o, (final, final_keys) = other(q, k, v, initial_state=(state, keys.unsqueeze(1)), **options)
    entering = torch.cat([state, keys.unsqueeze(-1)], -1)
    found = linear_attention(q, k, v, initial_state=entering, **options)
    expected = o, torch.cat([final, final_keys.squeeze(1).unsqueeze(-1)], -1)
    assert_same(found, expected, (q, k, v, state, keys))


@pytest.mark.parametrize("normalize", [False, True])
def test_linear_attention_of_fla_in_chunks(normalize: bool) -> None:
    """It takes multiples of 64 tokens and no state."""
    other = load(*FLA["linear_chunk"])
    q, k, v = pick(inputs(T=128), "q k v")
    if normalize:
        q, k = ((x.detach().abs() + 0.1).requires_grad_() for x in (q, k))
    o, _ = linear_attention(q, k, v, normalize=normalize)
    assert_same([o], [other(q, k, v, normalize=normalize)], (q, k, v))


def test_retention_of_fla() -> None:
    """It has no state: ours goes from a first half to a second, which together are its whole."""
    other = load(*FLA["retention"])
    leaves = pick(inputs(), "q k v")
    expected = head_first(other(*(head_first(x) for x in leaves)))
    (q1, q2), (k1, k2), (v1, v2) = (x.split([37, T - 37], 1) for x in leaves)
    first, state = retention(q1, k1, v1, output_final_state=True)
    second, _ = retention(q2, k2, v2, initial_state=state)
    assert_same([torch.cat([first, second], 1)], [expected], leaves)
    assert_same([retention(*leaves)[0]], [head_first(other(*map(head_first, leaves)))], leaves)


@pytest.mark.parametrize("kind", ["recurrent", "chunk"])
def test_simple_gla_of_fla(kind: str) -> None:
    other = load(*FLA[f"simple_gla_{kind}"])
    leaves = q, k, v, g, state = pick(inputs(), "q k v g state")
    options = {"initial_state": state, "output_final_state": True}
    assert_same(simple_gla(q, k, v, g, **options), other(q, k, v, g, **options), leaves)


def test_simple_gla_of_fla_in_parallel() -> None:
    other = load(*FLA["simple_gla_parallel"])
    leaves = pick(inputs(), "q k v g")
    o, _ = other(*leaves, scale=0.3)
    assert_same([simple_gla(*leaves, scale=0.3)[0]], [o], leaves)


def test_lightning_attention_of_fla() -> None:
    """FLA's is a kernel over simple GLA: its naive form with one gate a head for all tokens."""
    other = load(*FLA["simple_gla_recurrent"])
    leaves = q, k, v, state = pick(inputs(), "q k v state")
    log_decay = -torch.arange(H) / H
    options = {"initial_state": state, "output_final_state": True}
    expected = other(q, k, v, log_decay.expand(B, T, H), **options)
    assert_same(lightning_attention(q, k, v, log_decay, **options), expected, leaves)


def test_gla_of_fla() -> None:
    other = load(*FLA["gla"])
    leaves = q, k, v, g, state = pick(inputs(), "q k v gk state")
    options = {"initial_state": state, "output_final_state": True}
    assert_same(gla(q, k, v, g, **options), other(q, k, v, g, **options), leaves)


def test_hgrn2_of_fla() -> None:
    """HGRN2 runs FLA's gated linear attention with keys that its layer makes."""
    other = load(*FLA["gla"])
    leaves = q, v, g, state = pick(inputs(), "q v gk state")
    options = {"initial_state": state, "output_final_state": True}
    expected = other(q, 1 - g.exp(), v, g, **options)
    assert_same(hgrn2(q, None, v, g, **options), expected, leaves)


def test_hgrn2_of_one_key_channel_is_hgrn_of_fla() -> None:
    """With K = 1 and a query of 1, HGRN2 is HGRN's elementwise scan of gated inputs."""
    other = load(*FLA["hgrn"])
    x = inputs()
    v, g = x["v"], x["g"]
    one = torch.ones(B, T, H, 1)
    inner = (1 - g.exp()).unsqueeze(-1) * v
    gates = g.unsqueeze(-1).expand_as(v)
    o, final = other(inner.flatten(2), gates.flatten(2), output_final_state=True)
    found, state = hgrn2(one, None, v, g.unsqueeze(-1), scale=1.0, output_final_state=True)
    assert state is not None
    assert_same((found.flatten(2), state.flatten(1)), (o, final), (v, g))


def test_rwkv6_of_fla() -> None:
    other = load(*FLA["rwkv6"])
    leaves = r, k, v, w, u, state = pick(inputs(), "q k v gk u state")
    options = {"scale": 1.0, "initial_state": state, "output_final_state": True}
    o, final = other(*map(head_first, (r, k, v, w)), u, **options)
    assert_same(rwkv6(r, k, v, w, u, **options), (head_first(o), final), leaves)


def test_rwkv6_of_fla_in_chunks() -> None:
    """It takes multiples of its chunk, has neither scale nor state, and no gradients."""
    other = load(*FLA["rwkv6_chunk"])
    r, k, v, w, u = (x.detach() for x in pick(inputs(T=96), "q k v gk u"))
    expected = head_first(other(*map(head_first, (r, k, v, w)), u))
    o, _ = rwkv6(r, k, v, w, u, scale=1.0)
    torch.testing.assert_close(o, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("groups", [1, 2, H])
def test_ssd_of_transformers(groups: int) -> None:
    """Its states are [B, H, V, K]."""
    other = load(MAMBA2, "mamba2_chunk_scan")
    torch.manual_seed(0)
    leaves = [
        torch.randn(B, T, H, V),
        torch.rand(B, T, H) + 0.01,
        -torch.rand(H) - 0.1,
        torch.randn(B, T, groups, K),
        torch.randn(B, T, groups, K),
        torch.randn(H),
        torch.randn(B, H, K, V),
    ]
    x, dt, A, keys, queries, D, state = (leaf.requires_grad_() for leaf in leaves)
    o, final = other(
        x, dt, A, keys, queries, 32, D=D, initial_states=state.mT, return_final_states=True
    )
    found = ssd(x, dt, A, keys, queries, D, initial_state=state, output_final_state=True)
    assert_same(found, (o, final.mT), leaves)


def test_ssd_inside_the_mixer_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mamba-2 mixer gives the same, to its weights' gradients, when its scan is ours."""
    scan = load(MAMBA2, "mamba2_chunk_scan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: Any = importlib.import_module(MAMBA2)
        configuration: Any = importlib.import_module(
            "transformers.models.mamba2.configuration_mamba2"
        )
    if not hasattr(module, "Mamba2Mixer"):
        pytest.skip(f"this version of {MAMBA2} has no Mamba2Mixer")
    config = configuration.Mamba2Config(
        hidden_size=16, num_heads=4, head_dim=8, state_size=6, n_groups=2, chunk_size=32,
        expand=2, num_hidden_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    mixer = module.Mamba2Mixer(config, layer_idx=0)
    hidden = torch.randn(B, T, 16, requires_grad=True)
    calls: list[str] = []

    def ours(x, dt, A, B, C, chunk_size, D=None, dt_bias=None, dt_softplus=False, **options):
        calls.append("ours")
        step = dt if dt_bias is None else dt + dt_bias
        step = F.softplus(step) if dt_softplus else step
        step = step.clamp(*options.get("dt_limit", (0.0, float("inf"))))
        o, final = ssd(x, step, A, B, C, D, output_final_state=True)
        return (o, final.mT) if options.get("return_final_states") else o

    def theirs(*args, **kwargs):
        calls.append("theirs")
        return scan(*args, **kwargs)

    results = []
    for function in (theirs, ours):
        for owner in (module, mixer):
            if hasattr(owner, "mamba2_chunk_scan"):
                monkeypatch.setattr(owner, "mamba2_chunk_scan", function)
        results.append(mixer(hidden))
    assert calls == ["theirs", "ours"]
    leaves = [hidden, *(p for p in mixer.parameters() if p.requires_grad)]
    assert_same(results[1:], results[:1], leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lightning_attention_of_transformers(dtype: torch.dtype) -> None:
    """MiniMax's layer up to its norm, first and last layer, which decay the most and the least."""
    layer = load(MINIMAX, "MiniMaxLightningAttention")
    make = load("transformers.models.minimax.configuration_minimax", "MiniMaxConfig")
    config = make(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8, block_size=32,
        num_hidden_layers=3, layer_types=["linear_attention"] * 3,
    )  # fmt: skip
    tolerance = 2e-5 if dtype == torch.float32 else 1e-10
    torch.manual_seed(0)
    for index in (0, 2):
        # Its decays must be built in dtype, not converted to it.
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            module = layer(config, index)
        finally:
            torch.set_default_dtype(default)
        seen: list[Tensor] = []
        module.norm.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))
        hidden = 3 * torch.randn(B, T, 32, dtype=dtype)
        projected = module.qkv_proj(hidden).detach().requires_grad_()
        module.qkv_proj.register_forward_hook(lambda *_, projected=projected: projected)
        _, final = module(hidden, (hidden, hidden), None)
        q, k, v = module.act_fn(projected).unflatten(-1, (4, 24)).split(8, -1)
        log_decay = -module.slope_rate.flatten()
        o, state = lightning_attention(q, k, v, log_decay, scale=1.0, output_final_state=True)
        assert_same((o.flatten(2), state), (seen[0], final), [projected], tolerance=tolerance)
