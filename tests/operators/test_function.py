"""The one autograd function: what it does without gradients, and with some of them missing."""

from __future__ import annotations

import pytest
import torch

from zeco.ops import gated_delta_rule, gla


def make_inputs(*, requires_grad: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(1, 20, 2, 8) for _ in range(3)]
    tensors.append(-torch.rand(1, 20, 2, 8))
    return [x.requires_grad_(requires_grad) for x in tensors]


def test_without_gradients_no_graph_is_made_and_results_are_the_same():
    plain, state = gla(*make_inputs(requires_grad=False), output_final_state=True)
    assert plain.grad_fn is None
    o, final = gla(*make_inputs(requires_grad=True), output_final_state=True)
    assert o.grad_fn is not None
    assert state is not None
    assert final is not None
    assert torch.equal(plain, o)
    assert torch.equal(state, final)
    with torch.no_grad():
        assert gla(*make_inputs(requires_grad=True))[0].grad_fn is None


@pytest.mark.parametrize("used", [(True, False), (False, True)])
def test_an_unused_result_counts_as_one_whose_gradient_is_zero(used: tuple[bool, bool]):
    gradients = []
    for weights in (used, (True, True)):
        inputs = make_inputs(requires_grad=True)
        o, final = gla(*inputs, output_final_state=True)
        assert final is not None
        weighed = [
            float(wanted) * result.sum()
            for result, wanted, there in zip((o, final), used, weights, strict=True)
            if there
        ]
        gradients.append(torch.autograd.grad(sum(weighed), inputs))  # type: ignore[arg-type]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y)


def test_the_same_for_delta_rules():
    q, k, v, _ = make_inputs(requires_grad=True)
    beta, g = torch.rand(1, 20, 2), -torch.rand(1, 20, 2)
    gradients = []
    for factor in (None, 0.0):
        o, final = gated_delta_rule(
            q, torch.nn.functional.normalize(k, dim=-1), v, g, beta, output_final_state=True
        )
        assert final is not None
        total = o.sum() if factor is None else o.sum() + factor * final.sum()
        gradients.append(torch.autograd.grad(total, (q, k, v)))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y)


def test_autocast_stays_outside():
    q, k, v, g = make_inputs(requires_grad=True)
    plain, _ = gla(q, k, v, g)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = gla(q, k, v, g)
        gradients = torch.autograd.grad(o.sum(), (q, k, v, g))
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(o, plain)
    for x, y in zip(gradients, torch.autograd.grad(plain.sum(), (q, k, v, g)), strict=True):
        assert torch.equal(x, y)
