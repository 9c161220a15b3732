"""The delta-rule family against the reference functions of other libraries, where installed."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zeco.operators.delta_rule import delta_rule
from zeco.operators.gated_delta_rule import gated_delta_rule
from zeco.operators.kda import kda
from zeco.operators.rwkv7 import rwkv7

B, T, H, K, V = 2, 100, 3, 8, 6


def load(module: str, function: str) -> Callable[..., Any]:
    """Import a function; the test is skipped, with the reason, where that is not possible."""
    with warnings.catch_warnings():
        # Other packages warn at import when there is no GPU.
        warnings.simplefilter("ignore")
        try:
            # Unwrapped: with FLA installed, Transformers puts its GPU kernels in front.
            return inspect.unwrap(getattr(importlib.import_module(module), function))
        except ImportError as error:
            pytest.skip(f"{module} can't be imported: {error}")


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    k = F.normalize(torch.randn(B, T, H, K), dim=-1)
    return {
        "q": torch.randn(B, T, H, K),
        "k": k,
        "v": torch.randn(B, T, H, V),
        "g": F.logsigmoid(torch.randn(B, T, H) + 2),
        "gk": F.logsigmoid(torch.randn(B, T, H, K) + 2),
        "beta": 2 * torch.rand(B, T, H),
        "a": -k.roll(1, 1),
        "b": k.roll(1, 1) * torch.rand(B, T, H, K),
        "state": torch.randn(B, H, K, V),
    }


def assert_same(found: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)


def head_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def test_delta_rule_of_fla() -> None:
    other = load("fla.ops.delta_rule.naive", "delta_rule_recurrence")
    x = inputs()
    q, k, v, beta = x["q"], x["k"], x["v"], x["beta"]
    o, final = other(*(head_first(t) for t in (q, k, v, beta)), initial_state=x["state"])
    found = delta_rule(q, k, v, beta, initial_state=x["state"], output_final_state=True)
    assert_same(found, (head_first(o), final))


@pytest.mark.parametrize("kind", ["recurrent", "chunk"])
def test_gated_delta_rule_of_fla(kind: str) -> None:
    other = load("fla.ops.gated_delta_rule.naive", f"naive_{kind}_gated_delta_rule")
    x = inputs()
    tensors = {name: x[name] for name in ("q", "k", "v", "g", "beta")}
    options = {"initial_state": x["state"], "output_final_state": True}
    assert_same(gated_delta_rule(**tensors, **options), other(**tensors, **options))


def test_kda_of_fla() -> None:
    other = load("fla.ops.kda.naive", "naive_recurrent_kda")
    x = inputs()
    tensors = {"q": x["q"], "k": x["k"], "v": x["v"], "g": x["gk"], "beta": x["beta"]}
    options = {"initial_state": x["state"], "output_final_state": True}
    assert_same(kda(**tensors, **options), other(**tensors, **options))


def test_rwkv7_of_fla() -> None:
    """Its reference scales receptances by K**-0.5; the operator itself passes scale=1."""
    other = load("fla.ops.generalized_delta_rule.dplr.naive", "dplr_recurrence")
    x = inputs()
    r, w, k, v, a, b = (x[name] for name in ("q", "gk", "k", "v", "a", "b"))
    o, final = other(*(head_first(t) for t in (r, k, v, a, b, w)), initial_state=x["state"])
    found = rwkv7(
        r, w, k, v, a, b, scale=K**-0.5, initial_state=x["state"], output_final_state=True
    )
    assert_same(found, (head_first(o), final))


def test_gated_delta_rule_of_transformers() -> None:
    other = load(
        "transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"
    )
    x = inputs()
    tensors = {name: x[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")}
    leaves = [*tensors.values(), x["state"].requires_grad_()]
    q, k, v, g, beta = tensors.values()
    options = {
        "initial_state": x["state"],
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    found = gated_delta_rule(q, k, v, g, beta, **options)
    expected = other(q, k, v, g=g, beta=beta, chunk_size=64, **options)
    assert_same(found, expected)
    cotangents = [torch.randn_like(y) for y in expected]
    gradients = torch.autograd.grad(found, leaves, cotangents)
    for d, right in zip(gradients, torch.autograd.grad(expected, leaves, cotangents), strict=True):
        torch.testing.assert_close(d, right, atol=1e-4, rtol=1e-4)
