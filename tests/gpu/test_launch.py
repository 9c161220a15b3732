"""Kernels that are started directly get what Triton itself would give them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
launching = pytest.importorskip("zeco.kernels.launch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@triton.jit
def scaled_kernel(x_ptr, more_ptr, y_ptr, n, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    if more_ptr is not None:
        x += tl.load(more_ptr + at, mask=at < n)
    tl.store(y_ptr + at, x * scale, mask=at < n)


@triton.jit
def copied_kernel(x, y, heads, C: tl.constexpr, D: tl.constexpr):
    head, row = tl.program_id(0) % heads, tl.program_id(0) // heads * C
    y.store([0, head, row, 0], x.load([0, head, row, 0]))


def scale(x, more, factor, known=None):
    y = torch.full_like(x, torch.nan)
    n = x.numel()
    launching.launch(
        scaled_kernel,
        triton.cdiv(n, 64),
        x,
        more,
        y,
        n,
        factor,
        num_warps=1,
        known=known,
        BLOCK=64,
    )
    return y


def copy_blocks(x, y, known=None):
    ends = [launching.describe(z, 16, 32) for z in (x, y)]
    programs = x.shape[2] * triton.cdiv(x.shape[1], 16)
    launching.launch(
        copied_kernel, programs, *ends, x.shape[2], num_warps=1, known=known, C=16, D=32
    )
    return y


# Triton compiles anew for numbers that are 1 or multiples of 16, and for addresses off 16 bytes.
@pytest.mark.parametrize("n", [1, 17, 100, 160, 320])
@pytest.mark.parametrize("offset", [0, 1])
def test_every_class_of_arguments(n, offset):
    for turn in range(3):
        factor = 0.5 + turn
        x = torch.randn(n + offset, device="cuda")[offset:]
        more = torch.randn(n, device="cuda")
        torch.testing.assert_close(scale(x, None, factor), x * factor)
        torch.testing.assert_close(scale(x, more, factor), (x + more) * factor)
        half = x.half()
        torch.testing.assert_close(scale(half, None, factor), half * factor)


def test_blocks_of_tokens():
    for dtype in (torch.float16, torch.bfloat16):
        for T in (64, 100):
            x = torch.randn(1, T, 3, 48, device="cuda").to(dtype)[:, :, :, :32]
            for _ in range(2):
                y = torch.full((1, T, 3, 32), torch.nan, device="cuda", dtype=dtype)
                assert torch.equal(copy_blocks(x, y), x)


def test_kept_launches_differ_in_what_their_arguments_do():
    """Addresses, fractions, strides, dtypes, alignment and what is None; shapes stay."""
    known = {}
    for turn in range(3):
        factor = 0.5 + turn
        for offset in (0, 1):
            for dtype in (torch.float32, torch.float16):
                x = torch.randn(100 + offset, device="cuda").to(dtype)[offset:]
                more = torch.randn(100, device="cuda")
                torch.testing.assert_close(scale(x, None, factor, known), x * factor)
                torch.testing.assert_close(
                    scale(x, more, factor, known), ((x + more) * factor).to(dtype)
                )
        for width in (32, 48):
            x = torch.randn(1, 64, 3, width, device="cuda")[:, :, :, :32]
            y = torch.full((1, 64, 3, 32), torch.nan, device="cuda")
            assert torch.equal(copy_blocks(x, y, known), x)
    assert len(known) == 10


def test_a_new_thread_has_a_context():
    """Where torch serves memory from its cache, nothing before a launch makes a context current."""
    x = torch.randn(1, 64, 3, 32, device="cuda")
    copy_blocks(x, torch.empty_like(x))
    y = torch.full_like(x, torch.nan)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(copy_blocks, x, y).result()
    assert torch.equal(y, x)


def test_the_second_launch_is_direct_unless_hooks_watch(monkeypatch):
    if not launching._IS_KNOWN:
        pytest.skip("with this version of Triton every launch goes through it")
    x = torch.randn(64, device="cuda")
    scale(x, None, 2.0)
    through = []
    real = launching._launch_through_triton

    def watched(kernel, *rest):
        through.append(kernel)
        return real(kernel, *rest)

    monkeypatch.setattr(launching, "_launch_through_triton", watched)
    torch.testing.assert_close(scale(x, None, 3.0), x * 3.0)
    assert not through
    seen = []
    hook = triton.knobs.runtime.launch_enter_hook
    note = lambda data: seen.append(data.get()["name"])  # noqa: E731
    hook.add(note)
    try:
        torch.testing.assert_close(scale(x, None, 4.0), x * 4.0)
    finally:
        hook.remove(note)
    assert through == [scaled_kernel]
    assert seen == ["scaled_kernel"]
