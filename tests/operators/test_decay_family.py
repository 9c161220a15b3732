"""Every operator of the decay family against its token-by-token oracle, in outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zeco.core.errors import ArgumentError, UnsupportedError
from zeco.operators import oracle
from zeco.operators.gla import gla
from zeco.operators.hgrn2 import hgrn2
from zeco.operators.lightning_attention import lightning_attention
from zeco.operators.linear_attention import linear_attention
from zeco.operators.retention import retention
from zeco.operators.rwkv6 import rwkv6
from zeco.operators.simple_gla import simple_gla
from zeco.operators.ssd import ssd

Arguments = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """An operator, its oracle, and what it takes.

    ``layouts`` gives each tensor's dims; H is the number of value heads, G that of the others.
    """

    name: str
    operator: Callable[..., tuple[Tensor, Tensor | None]]
    oracle: Callable[..., tuple[Tensor, Tensor]]
    layouts: Mapping[str, str]
    options: Mapping[str, object]

    def make(self, *, decay: float = 1.0, dtype: torch.dtype = torch.float64, **sizes: int):
        """Return random tensors, log decays of mean ``-decay`` and distinct for every head."""
        tensors: Arguments = {}
        for name, layout in self.layouts.items():
            x = torch.randn([sizes[letter] for letter in layout.split()], dtype=torch.float64)
            if name in ("g", "w", "log_decay", "A"):
                x = -decay * 2 * torch.rand_like(x)
            elif name == "dt":
                x = F.softplus(x)
            elif self.options.get("normalize") and name in ("q", "k"):
                x = x.abs() + 0.1
            tensors[name] = x.to(dtype).requires_grad_()
        return tensors

    def state_width(self, V: int) -> int:
        """Return the number of value channels of a state."""
        return V + 1 if self.options.get("normalize") else V


QKV = {"q": "B T G K", "k": "B T G K", "v": "B T H V"}
SSD = {"x": "B T H V", "dt": "B T H", "A": "H", "B": "B T G K", "C": "B T G K", "D": "H"}
RWKV6 = {"r": "B T G K", "k": "B T G K", "v": "B T H V", "w": "B T G K", "u": "G K"}
DECAY = {"log_decay": "G"}
CASES = [
    Case("linear_attention", linear_attention, oracle.linear_attention, QKV, {}),
    Case("normalized", linear_attention, oracle.linear_attention, QKV, {"normalize": True}),
    Case("retention", retention, oracle.retention, QKV, {}),
    Case("retention_decay", retention, oracle.retention, {**QKV, **DECAY}, {}),
    Case("lightning", lightning_attention, oracle.lightning_attention, {**QKV, **DECAY}, {}),
    Case("simple_gla", simple_gla, oracle.simple_gla, {**QKV, "g": "B T H"}, {}),
    Case("gla", gla, oracle.gla, {**QKV, "g": "B T H K"}, {}),
    Case("gla_scale", gla, oracle.gla, {**QKV, "g": "B T G K"}, {"scale": -0.7}),
    Case("hgrn2", hgrn2, oracle.hgrn2, {**QKV, "g": "B T G K"}, {}),
    Case(
        "hgrn2_keys", hgrn2, oracle.hgrn2, {k: QKV[k] for k in "qv"} | {"g": "B T G K"}, {"k": None}
    ),
    Case("ssd", ssd, oracle.ssd, SSD, {}),
    Case("ssd_no_skip", ssd, oracle.ssd, {k: SSD[k] for k in SSD if k != "D"}, {}),
    Case("rwkv6", rwkv6, oracle.rwkv6, RWKV6, {}),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


CANCELLING = 10
"""For gradients of one number a head, sums over all tokens whose terms cancel: how much of them is
left to measure errors against depends on the draw, and the errors on the machine's products."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the error in norm; gradients that vanish (below 1e-12) are measured absolutely."""
    scale = expected.norm().item()
    return (found.double() - expected).norm().item() / (scale if scale > 1e-12 else 1.0)


def check_against_oracle(
    case: Case,
    tensors: Arguments,
    bound: float = 1e-10,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Compare outputs, final states and the gradients of every tensor."""
    options = {**case.options, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    o, final = case.operator(**tensors, **options, output_final_state=True)
    o_expected, final_expected = case.oracle(**tensors, **options)
    assert final is not None
    assert o.shape == o_expected.shape
    assert final.shape == final_expected.shape
    errors = {"o": relative_error(o, o_expected), "final": relative_error(final, final_expected)}
    leaves = dict(tensors)
    if initial_state is not None:
        leaves["initial_state"] = initial_state
    weights = [torch.randn_like(o_expected), torch.randn_like(final_expected)]
    values = list(leaves.values())
    loss = (o * weights[0]).sum() + (final * weights[1]).sum()
    expected = (o_expected * weights[0]).sum() + (final_expected * weights[1]).sum()
    pairs = zip(
        leaves,
        torch.autograd.grad(loss, values, materialize_grads=True),
        torch.autograd.grad(expected, values, materialize_grads=True),
        strict=True,
    )
    errors |= {f"d_{name}": relative_error(a, b.double()) for name, a, b in pairs}
    bounds = {f"d_{n}": bound * CANCELLING for n, leaf in leaves.items() if leaf.ndim == 1}
    assert all(error <= bounds.get(n, bound) for n, error in errors.items()), str(errors)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@every_case
@pytest.mark.parametrize("decay", [0.0, 0.02, 0.7, 20.0, 1e4])
def test_equals_the_oracle_for_any_strength_of_decay(case: Case, decay: float) -> None:
    tensors = case.make(decay=decay, B=2, T=70, H=2, G=2, K=5, V=3)
    state = torch.randn(2, 2, 5, case.state_width(3), dtype=torch.float64)
    state = state.abs() if case.options.get("normalize") else state
    check_against_oracle(case, tensors, initial_state=state.requires_grad_())


@every_case
@pytest.mark.parametrize("length", [1, 3, 64, 129])
def test_any_length_with_grouped_heads_and_no_initial_state(case: Case, length: int) -> None:
    check_against_oracle(case, case.make(decay=0.3, B=1, T=length, H=6, G=2, K=4, V=7))


@every_case
def test_packed_documents_with_states_of_their_own(case: Case) -> None:
    cu_seqlens = torch.tensor([0, 1, 1, 70, 72, 100, 100])
    tensors = case.make(decay=0.1, B=1, T=100, H=2, G=1, K=3, V=4)
    state = torch.randn(6, 2, 3, case.state_width(4), dtype=torch.float64)
    state = state.abs() if case.options.get("normalize") else state
    check_against_oracle(case, tensors, initial_state=state.requires_grad_(), cu_seqlens=cu_seqlens)
    check_against_oracle(case, tensors, cu_seqlens=cu_seqlens.int())


@every_case
def test_no_tokens_pass_the_state_on(case: Case) -> None:
    tensors = case.make(B=2, T=0, H=2, G=2, K=3, V=4)
    state = torch.randn(2, 2, 3, case.state_width(4), dtype=torch.float64, requires_grad=True)
    o, final = case.operator(
        **tensors, **case.options, initial_state=state, output_final_state=True
    )
    assert o.shape == (2, 0, 2, 4)
    assert final is not None
    assert torch.equal(final, state)
    (gradient,) = torch.autograd.grad(final.sum() + o.sum(), state)
    assert torch.equal(gradient, torch.ones_like(state))


@every_case
def test_batch_of_no_sequences(case: Case) -> None:
    tensors = case.make(B=0, T=5, H=2, G=2, K=3, V=4)
    o, final = case.operator(**tensors, **case.options, output_final_state=True)
    assert o.shape == (0, 5, 2, 4)
    assert final is not None
    assert final.shape[0] == 0


@every_case
@pytest.mark.parametrize("decay", [0.05, 1.0, 10.0])
def test_single_precision_is_near_exact(case: Case, decay: float) -> None:
    tensors = case.make(decay=decay, dtype=torch.float32, B=1, T=150, H=2, G=2, K=16, V=16)
    check_against_oracle(case, tensors, bound=5e-6)


@every_case
def test_half_precision_is_as_good_as_the_recurrence_in_that_precision(case: Case) -> None:
    """As good as the same inputs in fp32 with outputs rounded once, whatever is added to them."""
    tensors = case.make(decay=0.05, dtype=torch.bfloat16, B=1, T=130, H=2, G=2, K=16, V=16)
    for name in ("g", "w", "log_decay", "A", "dt", "D", "u"):
        if name in tensors:
            tensors[name] = tensors[name].detach().float().requires_grad_()
    o, final = case.operator(**tensors, **case.options, output_final_state=True)
    expected, _ = case.oracle(**tensors, **case.options)
    first = next(iter(tensors.values()))
    assert o.dtype == first.dtype
    assert final is not None
    assert final.dtype == torch.float32
    rounded = relative_error(expected.bfloat16(), expected)
    assert relative_error(o, expected) <= 1.05 * rounded
    weight = torch.randn_like(expected)
    values = list(tensors.values())
    found = torch.autograd.grad((o.double() * weight).sum(), values)
    for name, a, b in zip(
        tensors, found, torch.autograd.grad((expected * weight).sum(), values), strict=True
    ):
        # The gradient of o arrives rounded, which a gate's small sums feel more than a bf16 ulp.
        assert relative_error(a, b.double()) < 2 * 2**-8, name


@every_case
def test_inputs_need_not_be_contiguous(case: Case) -> None:
    tensors = case.make(decay=0.1, B=2, T=9, H=2, G=2, K=3, V=4)
    strided = {
        name: x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        for name, x in tensors.items()
    }
    o, _ = case.operator(**tensors, **case.options)
    o_strided, _ = case.operator(**strided, **case.options)
    assert torch.equal(o, o_strided)


@every_case
def test_autocast_changes_nothing(case: Case) -> None:
    tensors = case.make(decay=0.1, dtype=torch.float32, B=1, T=70, H=2, G=2, K=8, V=8)
    o, _ = case.operator(**tensors, **case.options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, _ = case.operator(**tensors, **case.options)
    assert torch.equal(o, under)


def test_gates_of_minus_infinity_clear_the_state() -> None:
    q, k, v = (torch.randn(1, 9, 1, 4, dtype=torch.float64) for _ in range(3))
    for operator, g in ((simple_gla, torch.zeros(1, 9, 1)), (gla, torch.zeros(1, 9, 1, 4))):
        g = g.double()
        g[:, 5] = -torch.inf
        whole, _ = operator(q, k, v, g)
        after, _ = operator(q[:, 5:], k[:, 5:], v[:, 5:], g[:, 5:])
        torch.testing.assert_close(whole[:, 5:], after, rtol=1e-12, atol=1e-12)


def test_weak_decay_after_strong_keeps_its_digits() -> None:
    """Cumulative sums of -1e4 would swallow the -1e-3 that follow in fp32."""
    q, k, v = (torch.randn(1, 64, 1, 8) for _ in range(3))
    g = torch.full((1, 64, 1, 8), -1e-3)
    g[:, ::16] = -1e4
    for operator, gates in ((gla, g), (simple_gla, g[..., 0])):
        o, final = operator(q, k, v, gates, output_final_state=True)
        expected, final_expected = oracle.gla(q, k, v, gates)
        assert final is not None
        assert relative_error(o, expected) < 1e-6
        assert relative_error(final, final_expected) < 1e-6


@every_case
def test_mismatched_sizes_name_the_argument(case: Case) -> None:
    for name, layout in case.layouts.items():
        tensors = case.make(B=1, T=6, H=4, G=2, K=3, V=5)
        shape = [size + 1 for size in tensors[name].shape]
        tensors[name] = torch.zeros(shape, dtype=torch.float64)
        others = [n for n in case.layouts if n != name]
        with pytest.raises(ArgumentError, match=rf"\b({name}|{'|'.join(others)})\b has"):
            case.operator(**tensors, **case.options)
        assert layout


@every_case
def test_gates_of_the_wrong_sign_are_refused(case: Case) -> None:
    for name in {"g", "w", "log_decay", "A", "dt"} & set(case.layouts):
        tensors = case.make(B=1, T=6, H=2, G=2, K=3, V=5)
        tensors[name] = -tensors[name].detach()
        with pytest.raises(ArgumentError, match=rf"{name} has values up to .*; (pass|apply)"):
            case.operator(**tensors, **case.options)


@every_case
def test_bad_arguments_are_refused_by_name(case: Case) -> None:
    tensors = case.make(B=2, T=6, H=4, G=2, K=3, V=5)
    first = next(iter(tensors))

    def refused(match: str, changed: Arguments | None = None, **options: object) -> None:
        with pytest.raises(ArgumentError, match=match):
            case.operator(**{**tensors, **(changed or {})}, **{**case.options, **options})

    refused(f"{first} has dtype torch.int64", {first: tensors[first].long()})
    refused("initial_state has shape", initial_state=torch.zeros(1, 4, 3, 5))
    refused("initial_state has dtype", initial_state=torch.zeros(2, 4, 3, 5).int())
    refused("cu_seqlens needs a batch of 1", cu_seqlens=torch.tensor([0, 6]))
    refused("backend 'tritn' does not exist.*triton", backend="tritn")
    with pytest.raises(UnsupportedError, match="'fla' isn't offered"):
        case.operator(**tensors, **case.options, backend="fla")
    with pytest.raises(TypeError, match="unexpected keyword"):
        case.operator(**tensors, **case.options, inital_state=None)
    heads = case.make(B=2, T=6, H=4, G=3, K=3, V=5)
    with pytest.raises(ArgumentError, match=r"3 heads|has H=4"):
        case.operator(**heads, **case.options)


def test_a_call_like_an_earlier_one_is_checked_too() -> None:
    """Checks of shapes, dtypes and options are kept by what they look at; values are looked at anew."""
    q, g = torch.ones(1, 4, 2, 8), -torch.ones(1, 4, 2, 8)
    for _ in range(2):
        assert gla(q, q, q, g)[0].shape == q.shape
        with pytest.raises(ArgumentError, match="g has values up to"):
            gla(q, q, q, -g)
        with pytest.raises(ArgumentError, match="v has dtype"):
            gla(q, q, q.long(), g)
        with pytest.raises(ArgumentError, match="initial_state has dtype"):
            gla(q, q, q, g, initial_state=torch.zeros(1, 2, 8, 8).long())
        with pytest.raises(UnsupportedError, match="'fla' isn't offered"):
            gla(q, q, q, g, backend="fla")
    twice = gla(q, q, q, g, scale=2)[0]
    torch.testing.assert_close(twice, 2 * gla(q, q, q, g, scale=1)[0])


def test_heads_of_gates_and_bonus() -> None:
    q = torch.zeros(1, 2, 2, 3)
    v = torch.zeros(1, 2, 4, 3)
    with pytest.raises(
        ArgumentError, match="g has 1 heads, but must have the 4 of v or the 2 of q"
    ):
        gla(q, q, v, q[:, :, :1])
    with pytest.raises(ArgumentError, match="u has 1 heads"):
        rwkv6(q, q, v, q, torch.zeros(1, 3))
    with pytest.raises(ArgumentError, match=r"log_decay has shape \[3\], but must be \[2 or 4\]"):
        retention(q, q, v, log_decay=torch.zeros(3))
    with pytest.raises(ArgumentError, match="key dim K is 0"):
        gla(q[..., :0], q[..., :0], v, q[..., :0])


@every_case
def test_documentation_has_the_common_keywords(case: Case) -> None:
    text = case.operator.__doc__ or ""
    assert "<common" not in text
    assert "output_final_state" in text
