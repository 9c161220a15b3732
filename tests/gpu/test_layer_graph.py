"""A layer's forward and backward pass in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from zeco.benchmarks.device import capture
from zeco.layers import GatedLinearAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("conv_width", [0, 4])
def test_a_replay_computes_what_a_call_does(conv_width):
    torch.manual_seed(0)
    layer = GatedLinearAttention(128, 2, conv_width=conv_width).to("cuda", torch.bfloat16)
    x = torch.randn(1, 500, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    d_y = torch.randn_like(x)
    found = []

    def both():
        y, _ = layer(x)
        found[:] = [y, *torch.autograd.grad(y, [x, *layer.parameters()], d_y)]

    replay = capture(both)
    captured = list(found)
    with torch.no_grad():
        x.normal_()  # a graph reads its inputs where they lie
    both()
    replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, found, strict=True))
    assert all(x.isfinite().all() for x in found)
