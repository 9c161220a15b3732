"""Cases of test_layer_kernels.py: run with TRITON_INTERPRET=1 and the name of a part as argument."""

from __future__ import annotations

import sys
from itertools import product

import torch
from decay_cases import let_numpy_index

from zeco.kernels.layers import gated_norm, short_convolution
from zeco.operators import gated_norm as norm_operator
from zeco.operators import log_gate, row_convolution

BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3}


def close(found, expected, dtype):
    for name, (x, y) in {k: (found[k], expected[k]) for k in expected}.items():
        assert x.shape == y.shape, name
        error = float((x.double() - y).norm() / (y.norm() + 1e-30))
        assert error < BOUNDS[dtype], f"{name}: {error:.1e}"


def convolution():
    """Runs and channels that don't fill, fewer rows than a reach, widths from 1, bias, SiLU."""
    torch.manual_seed(0)
    sizes = [(1, 140, 8, 4), (2, 67, 130, 3), (1, 1, 8, 4), (1, 2, 8, 4), (1, 5, 8, 1)]
    for (B, T, D, W), silu, biased in product(sizes, (True, False), (True, False)):
        dtype = torch.float16 if biased else torch.float32
        given = [torch.randn(B, W - 1, D).to(dtype), torch.randn(B, T, D).to(dtype)]
        given += [torch.randn(D, W), *([torch.randn(D)] if biased else [])]
        before, x, w, b = (*given, None)[:4]
        d_y = torch.randn(B, T, D).to(dtype)
        leaves = [t.double().requires_grad_() for t in given]
        bias = leaves[3] if biased else None
        (y,) = row_convolution.convolve_rows(*leaves[:3], bias, silu=silu)
        names = ("d_before", "dx", "dw", "db")
        grads = torch.autograd.grad(y, leaves, d_y.double())
        found = short_convolution.convolution_bwd(before, x, w, b, [d_y], silu=silu)
        close(
            {"y": short_convolution.convolution_fwd(before, x, w, b, silu=silu)}
            | dict(zip(names, found, strict=True)),
            {"y": y.detach()} | dict(zip(names, grads, strict=False)),
            dtype,
        )


def strided():
    """Rows and gradients that are parts of wider tensors, through the autograd function."""
    torch.manual_seed(1)
    wide = torch.randn(2, 80, 24)
    before, x = (wide[:, a:b, 8:16].detach().requires_grad_() for a, b in ((0, 3), (3, 72)))
    w, b = torch.randn(8, 4, requires_grad=True), torch.randn(8, requires_grad=True)
    d_y = torch.randn(2, 69, 16)[..., 4:7], torch.randn(2, 5, 69).mT
    parts = row_convolution._ConvolutionFunction.apply(before, x, w, b, True, (3, 5))
    names = ("d_before", "dx", "dw", "db")
    found = torch.autograd.grad(parts, (before, x, w, b), d_y)
    leaves = [t.detach().double().requires_grad_() for t in (before, x, w, b)]
    expected = row_convolution.convolve_rows(*leaves, silu=True, sizes=(3, 5))
    grads = torch.autograd.grad(expected, leaves, [d.double() for d in d_y])
    close(
        dict(zip(names, found, strict=True)) | {"y": torch.cat(parts, 2)},
        dict(zip(names, grads, strict=True)) | {"y": torch.cat(expected, 2)},
        torch.float32,
    )


def norm():
    """Rows that don't fill a run of blocks, widths that are no power of two, both activations."""
    torch.manual_seed(2)
    for (N, V), silu, dtype in product(
        [(37, 8), (700, 48), (1, 256)], (True, False), (torch.float32, torch.float16)
    ):
        o, r, d_y = (torch.randn(1, N, V).to(dtype) for _ in range(3))
        w = torch.randn(V)
        leaves = [t.clone().requires_grad_() for t in (o, r, w)]
        exact = [t.double().requires_grad_() for t in (o, r, w)]
        y = norm_operator._GatedNormFunction.apply(*leaves, 1e-5, silu)
        expected = norm_operator.gated_rms_norm(*exact, eps=1e-5, silu=silu)
        names = ("do", "dr", "dw")
        found = dict(zip(names, torch.autograd.grad(y, leaves, d_y), strict=True))
        grads = torch.autograd.grad(expected, exact, d_y.double())
        wanted = dict(zip(names, grads, strict=True))
        close(found | {"y": y}, wanted | {"y": expected.detach()}, dtype)
    assert gated_norm._sizes(48) == (64, 64)


def gate():
    """More than a block; logits at which an exponential would overflow."""
    torch.manual_seed(3)
    for dtype in BOUNDS:
        x = (20 * torch.randn(3, 1700)).to(dtype)
        x[0, :2] = torch.tensor([-200.0, 200.0])
        d_g = torch.randn(3, 1700)
        leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        g = log_gate._LogGateFunction.apply(leaf, 16.0)
        expected = log_gate.log_sigmoid_gate(exact, normalizer=16.0)
        assert g.dtype == torch.float32
        assert bool((g <= 0).all())
        (d_x,) = torch.autograd.grad(g, leaf, d_g)
        (wanted,) = torch.autograd.grad(expected, exact, d_g.double())
        close({"g": g, "dx": d_x}, {"g": expected.detach(), "dx": wanted}, dtype)
        # Each decay by itself, also of gates that hardly forget.
        torch.testing.assert_close(g.double(), expected.detach(), rtol=2e-6, atol=1e-12)
        least = 1e-7 if dtype == torch.float16 else 1e-12
        torch.testing.assert_close(d_x.double(), wanted, rtol=2 * BOUNDS[dtype], atol=least)


if __name__ == "__main__":
    let_numpy_index()
    {"convolution": convolution, "strided": strided, "norm": norm, "gate": gate}[sys.argv[1]]()
