"""Every operator of the delta-rule family against its oracle, in outputs and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zeco.core.errors import ArgumentError, UnsupportedError
from zeco.operators import delta_oracle
from zeco.operators.delta_rule import delta_rule
from zeco.operators.gated_delta_rule import gated_delta_rule
from zeco.operators.kda import kda
from zeco.operators.rwkv7 import rwkv7

Arguments = dict[str, Tensor]
double = torch.float64


@dataclass(frozen=True)
class Case:
    """An operator, its oracle, and the dims of its tensors: H value heads, G other heads."""

    name: str
    operator: Callable[..., tuple[Tensor, Tensor | None]]
    oracle: Callable[..., tuple[Tensor, Tensor]]
    layouts: Mapping[str, str]

    def make(
        self,
        *,
        decay: float = 0.5,
        beta: float = 1.0,
        dtype: torch.dtype = double,
        **sizes: int,
    ) -> Arguments:
        """Return random tensors, unit keys, gates distinct for every head, token and channel."""
        torch.manual_seed(0)
        tensors: Arguments = {}
        for name, layout in self.layouts.items():
            x = torch.randn([sizes[letter] for letter in layout.split()], dtype=double)
            if name in ("g", "w"):
                x = -decay * 2 * torch.rand_like(x)
            elif name == "beta":
                x = beta * torch.rand_like(x)
            elif name == "k":
                x = F.normalize(x, dim=-1)
            tensors[name] = x
        if "a" in tensors:
            unit = F.normalize(tensors["a"], dim=-1)
            tensors["a"], tensors["b"] = -unit, unit * beta * torch.rand_like(unit)
        return {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}


QKV = {"q": "B T G K", "k": "B T G K", "v": "B T H V"}
BETA = {"beta": "B T H"}
RWKV7 = {**dict.fromkeys("rwk", "B T G K"), "v": "B T H V", **dict.fromkeys("ab", "B T G K")}
CASES = [
    Case("delta_rule", delta_rule, delta_oracle.delta_rule, {**QKV, **BETA}),
    Case(
        "gated_delta_rule",
        gated_delta_rule,
        delta_oracle.gated_delta_rule,
        {**QKV, "g": "B T H", **BETA},
    ),
    Case("kda", kda, delta_oracle.kda, {**QKV, "g": "B T H K", **BETA}),
    Case("rwkv7", rwkv7, delta_oracle.rwkv7, RWKV7),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
gated = pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)


def compare(
    case: Case,
    tensors: Arguments,
    *,
    states: int | None = None,
    cu_seqlens: Tensor | None = None,
    tolerance: float = 1e-10,
    **options: object,
) -> None:
    """Compare outputs, final states and all gradients with the oracle's, relative to their size."""
    H, V = tensors["v"].shape[2:]
    K = tensors["k"].shape[-1]
    leaves = dict(tensors)
    if states is not None:
        initial = torch.randn(states, H, K, V, dtype=double, requires_grad=True)
        leaves["initial_state"] = initial
    keywords = {**leaves, "cu_seqlens": cu_seqlens, **options}
    o, final = case.operator(**keywords, output_final_state=True)
    assert final is not None
    expected = case.oracle(**keywords)
    cotangents = [torch.randn_like(x) for x in expected]
    wanted = list(leaves.values())
    found = torch.autograd.grad(
        [o, final], wanted, [c.to(x.dtype) for c, x in zip(cotangents, (o, final), strict=True)]
    )
    # Without tokens the oracle's outputs depend on nothing.
    attached = [(x, c) for x, c in zip(expected, cotangents, strict=True) if x.requires_grad]
    right = torch.autograd.grad(
        [x for x, _ in attached],
        wanted,
        [c for _, c in attached],
        allow_unused=True,
        materialize_grads=True,
    )
    names = ["o", "final_state", *leaves]
    for name, x, y in zip(names, (o, final, *found), (*expected, *right), strict=True):
        assert x.isfinite().all(), name
        error = (x.detach().double() - y.detach()).abs().max() if x.numel() else torch.zeros(())
        size = y.detach().abs().max().clamp(min=1.0) if y.numel() else torch.ones(())
        assert error <= tolerance * size, f"{name}: {float(error / size):.2e}"


@every_case
@pytest.mark.parametrize("T", [0, 1, 63, 64, 65, 150])
def test_lengths(case: Case, T: int) -> None:
    compare(case, case.make(B=2, T=T, G=2, H=2, K=8, V=4), states=2)


@every_case
@pytest.mark.parametrize("K, V", [(1, 1), (5, 7), (24, 9), (64, 32)])
def test_widths(case: Case, K: int, V: int) -> None:
    compare(case, case.make(B=1, T=70, G=1, H=1, K=K, V=V))


@every_case
def test_batch_of_three_with_grouped_heads(case: Case) -> None:
    compare(case, case.make(B=3, T=70, G=2, H=6, K=6, V=5), states=3, scale=-0.3)


@every_case
@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("decay", [0.0, 0.5, 20.0, 1e4])
def test_decays(case: Case, decay: float, beta: float) -> None:
    compare(case, case.make(B=1, T=130, G=2, H=2, K=6, V=5, decay=decay, beta=beta), states=1)


@gated
def test_weak_decay_after_strong_in_one_chunk(case: Case) -> None:
    tensors = case.make(B=1, T=128, G=1, H=1, K=6, V=5, decay=0.1)
    name = "w" if "w" in tensors else "g"
    with torch.no_grad():
        tensors[name][:, [3, 20, 21, 100]] = -1e4
    compare(case, tensors, states=1)


@gated
def test_an_infinite_decay_forgets(case: Case) -> None:
    tensors = case.make(B=1, T=66, G=1, H=1, K=6, V=5)
    name = "w" if "w" in tensors else "g"
    with torch.no_grad():
        tensors[name][:, 40] = -torch.inf
    o, _ = case.operator(**tensors)
    gradients = torch.autograd.grad(o.sum(), list(tensors.values()))
    assert all(x.isfinite().all() for x in gradients)
    torch.testing.assert_close(o, case.oracle(**tensors)[0])


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_equal_keys_with_beta_two_stay_bounded(case: Case) -> None:
    """The worst case for a triangular inverse: every key the same, every write a reflection."""
    tensors = case.make(B=1, T=256, G=1, H=1, K=8, V=8, decay=0.0)
    with torch.no_grad():
        tensors["k"].copy_(tensors["k"][:, :1].expand_as(tensors["k"]).clone())
        tensors["beta"].fill_(2.0)
    compare(case, tensors, states=1, tolerance=1e-9)
    narrow = {name: x.detach().float().requires_grad_() for name, x in tensors.items()}
    compare(case, narrow, tolerance=1e-3)


@every_case
@pytest.mark.parametrize("bounds", [[0, 1, 40, 40, 171, 172], [0, 0, 64, 128], [0, 130]], ids=str)
@pytest.mark.parametrize("with_states", [True, False])
def test_packed_documents(case: Case, bounds: list[int], with_states: bool) -> None:
    tensors = case.make(B=1, T=bounds[-1], G=1, H=2, K=6, V=5)
    states = len(bounds) - 1 if with_states else None
    compare(case, tensors, states=states, cu_seqlens=torch.tensor(bounds))


@every_case
@pytest.mark.parametrize("decay", [0.2, 5.0])
def test_single_precision(case: Case, decay: float) -> None:
    tensors = case.make(B=1, T=200, G=2, H=2, K=32, V=32, decay=decay, dtype=torch.float32)
    compare(case, tensors, states=1, tolerance=2e-5)


@every_case
def test_half_precision_keeps_wide_states(case: Case) -> None:
    tensors = case.make(B=1, T=80, G=1, H=1, K=16, V=16, dtype=torch.bfloat16)
    o, final = case.operator(**tensors, output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert final is not None
    assert final.dtype == torch.float32
    torch.testing.assert_close(final.double(), case.oracle(**tensors)[1], atol=1e-5, rtol=1e-5)


@every_case
def test_inputs_need_not_be_contiguous(case: Case) -> None:
    tensors = case.make(B=2, T=70, G=2, H=2, K=6, V=5)
    turned = {
        name: x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for name, x in tensors.items()
    }
    compare(case, turned)


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_normalised_queries_and_keys(case: Case) -> None:
    tensors = case.make(B=1, T=70, G=2, H=2, K=6, V=5)
    with torch.no_grad():
        tensors["k"].mul_(3.0)

    def oracle(**keywords: Tensor) -> tuple[Tensor, Tensor]:
        for name in "qk":
            x = keywords[name]
            keywords[name] = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return case.oracle(**keywords)

    def operator(**keywords: Tensor) -> tuple[Tensor, Tensor | None]:
        return case.operator(**keywords, use_qk_l2norm_in_kernel=True)

    compare(Case(case.name, operator, oracle, case.layouts), tensors)


@every_case
def test_the_final_state_is_returned_on_request_only(case: Case) -> None:
    assert case.operator(**case.make(B=1, T=3, G=1, H=1, K=2, V=2))[1] is None


def test_a_wrong_decay_would_be_noticed() -> None:
    case = CASES[1]
    wrong = Case(
        "wrong", lambda **kw: case.operator(**{**kw, "g": kw["g"] * 1.001}), case.oracle, {}
    )
    with pytest.raises(AssertionError, match="o: "):
        compare(wrong, case.make(B=1, T=70, G=1, H=1, K=4, V=4))


@every_case
@pytest.mark.parametrize(
    "change, message",
    [
        (("k", lambda x: x[:, :-1]), "has T="),
        (("k", lambda x: x[..., :-1]), "has K="),
        (("v", lambda x: x[0]), "v has 3 dims"),
        (("v", lambda x: x[:, :, :1]), "heads"),
        (("k", lambda x: x.long()), "k has dtype torch.int64"),
        (("k", lambda x: x.to("meta")), "different devices"),
    ],
    ids=["length", "width", "dims", "heads", "dtype", "device"],
)
def test_bad_tensors_are_named(
    case: Case, change: tuple[str, Callable[[Tensor], Tensor]], message: str
) -> None:
    tensors = case.make(B=1, T=4, G=2, H=2, K=3, V=3)
    name, function = change
    with pytest.raises(ArgumentError, match=f"{case.name}: .*{message}"):
        case.operator(**{**tensors, name: function(tensors[name])})


@gated
def test_positive_decays_are_refused(case: Case) -> None:
    tensors = case.make(B=1, T=4, G=1, H=1, K=3, V=3)
    name = "w" if "w" in tensors else "g"
    with pytest.raises(ArgumentError, match=f"{case.name}: {name} has values up to"):
        case.operator(**{**tensors, name: -tensors[name]})


@every_case
def test_bad_options_are_named(case: Case) -> None:
    tensors = case.make(B=1, T=4, G=1, H=1, K=3, V=3)
    with pytest.raises(ArgumentError, match="initial_state has shape"):
        case.operator(**tensors, initial_state=torch.zeros(1, 1, 3, 4, dtype=double))
    with pytest.raises(ArgumentError, match="cu_seqlens ends at 3"):
        case.operator(**tensors, cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ArgumentError, match="backend 'tritn' does not exist"):
        case.operator(**tensors, backend="tritn")
    with pytest.raises(UnsupportedError, match="'triton' isn't offered"):
        case.operator(**tensors, backend="triton")


def test_gate_heads_are_checked() -> None:
    tensors = CASES[1].make(B=1, T=4, G=2, H=4, K=3, V=3)
    with pytest.raises(ArgumentError, match="beta has 3 heads, but must have the 4 of v or the 2"):
        gated_delta_rule(**{**tensors, "beta": tensors["beta"][:, :, :3]})


def test_gates_may_have_the_heads_of_the_keys() -> None:
    tensors = CASES[1].make(B=1, T=70, G=2, H=4, K=3, V=3)
    few = {**tensors, "g": tensors["g"][:, :, :2], "beta": tensors["beta"][:, :, :2]}
    many = {name: few[name].repeat_interleave(2, 2) for name in ("g", "beta")}
    assert torch.equal(gated_delta_rule(**few)[0], gated_delta_rule(**{**few, **many})[0])
