from __future__ import annotations

import pytest
import torch
from torch import nn

from zeco.training.config import OptimizerConfig, ScheduleConfig
from zeco.training.optimizer import FlatGradients, learning_rate, make_optimizer


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).double()


def test_decay_acts_on_matrices_only() -> None:
    model = small_model()
    groups = make_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert all(p.ndim == 2 for p in groups[0]["params"])
    assert all(p.ndim == 1 for p in groups[1]["params"])
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@pytest.mark.parametrize("largest", [0.01, 1e6, None])
def test_clipping_equals_the_reference(largest: float | None) -> None:
    ours, theirs = small_model(), small_model()
    x = torch.randn(16, 4, dtype=torch.float64)
    gradients = FlatGradients(ours.parameters(), num_extra=2)
    ours(x).square().sum().backward()
    theirs(x).square().sum().backward()
    gradients.extra.fill_(1e9)  # what travels along isn't part of the norm
    norm = gradients.clip(largest)
    reference = torch.nn.utils.clip_grad_norm_(theirs.parameters(), largest or float("inf"))
    torch.testing.assert_close(norm, reference, rtol=1e-12, atol=0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=0)


def test_flat_gradients_accumulate_in_place() -> None:
    model = small_model()
    gradients = FlatGradients(model.parameters(), num_extra=1)
    x = torch.randn(3, 4, dtype=torch.float64)
    model(x).sum().backward()
    once = gradients.all.clone()
    model(x).sum().backward()
    torch.testing.assert_close(gradients.all, 2 * once)
    gradients.zero()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_schedule() -> None:
    def at(step: int, warmup: int = 10) -> float:
        schedule = ScheduleConfig(warmup_steps=warmup, final_share=0.2)
        return learning_rate(step, peak=2.0, num_steps=50, schedule=schedule)

    rates = [at(step) for step in range(50)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[9] == 2.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.4)
    assert at(0, warmup=0) == 2.0
    assert learning_rate(0, peak=2.0, num_steps=1, schedule=ScheduleConfig(0)) == 2.0
