"""The layers' kernels on a GPU, against the same functions in fp64."""

from __future__ import annotations

import pytest
import torch

from zeco.operators.gated_norm import gated_rms_norm
from zeco.operators.log_gate import log_sigmoid_gate
from zeco.operators.row_convolution import convolve_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOUNDS = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}


def check(function, inputs, bound, kernel):
    """Compare outputs and gradients with those in fp64, which has no kernels."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    exact = [x.double().detach().requires_grad_() for x in inputs]
    y, expected = function(*leaves), function(*exact)
    assert type(y.grad_fn).__name__ == kernel
    d_y = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, d_y)
    wanted = torch.autograd.grad(expected, exact, d_y.double())
    for x, w in zip((y, *found), (expected, *wanted), strict=True):
        assert float((x.double() - w).norm() / (w.norm() + 1e-30)) < bound  # none before W = 1


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("size", [(1, 1000, 512, 4), (2, 67, 130, 3), (1, 1, 24, 4), (1, 9, 24, 1)])
def test_convolution(size, silu, dtype):
    B, T, D, W = size
    before, x = (torch.randn(B, rows, D, device="cuda").to(dtype) for rows in (W - 1, T))
    weight, bias = torch.randn(D, W, device="cuda"), torch.randn(D, device="cuda")
    check(
        lambda *given: convolve_rows(*given, silu=silu)[0],
        (before, x, weight.to(dtype), bias.to(dtype)),
        BOUNDS[dtype],
        "_ConvolutionFunctionBackward",
    )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("size", [(1, 1000, 4, 128), (2, 67, 3, 48), (1, 5, 1, 2048)])
def test_gated_norm(size, silu, dtype):
    o, gate = (torch.randn(size, device="cuda").to(dtype) for _ in range(2))
    weight = torch.randn(size[-1], device="cuda").to(dtype)
    check(
        lambda o, r, w: gated_rms_norm(o, r, w, eps=1e-5, silu=silu),
        (o, gate, weight),
        BOUNDS[dtype],
        "_GatedNormFunctionBackward",
    )


@pytest.mark.parametrize("dtype", BOUNDS)
def test_log_gate(dtype):
    logits = (10 * torch.randn(2, 1000, 3, device="cuda")).to(dtype)
    check(
        lambda x: log_sigmoid_gate(x, normalizer=16.0),
        (logits,),
        BOUNDS[dtype],
        "_LogGateFunctionBackward",
    )
