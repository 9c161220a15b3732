"""A layer's forward and backward pass in a CUDA graph."""

from __future__ import annotations

import gc

import pytest
import torch

from zeco import SequenceParallel
from zeco.benchmarks.device import capture
from zeco.layers import GatedLinearAttention
from zeco.testing import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def compare_replay_with_call(conv_width, sp=None):
    """Return whether a replay's results are a call's, on inputs that changed after the capture."""
    torch.manual_seed(0)
    layer = GatedLinearAttention(128, 2, conv_width=conv_width).to("cuda", torch.bfloat16)
    x = torch.randn(1, 500, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    d_y = torch.randn_like(x)
    found = []

    def both():
        y, _ = layer(x, sp=sp)
        found[:] = [y, *torch.autograd.grad(y, [x, *layer.parameters()], d_y)]

    replay = capture(both)
    captured = list(found)
    with torch.no_grad():
        x.normal_()  # a graph reads its inputs where they lie
    both()
    replay()
    torch.cuda.synchronize()
    same = all(torch.equal(a, b) for a, b in zip(captured, found, strict=True))
    return same and all(bool(x.isfinite().all()) for x in found)


@pytest.mark.parametrize("conv_width", [0, 4])
def test_a_replay_computes_what_a_call_does(conv_width):
    assert compare_replay_with_call(conv_width)


def on_rank(options):
    rank = torch.distributed.get_rank()
    torch.cuda.set_device(rank)
    group = torch.distributed.new_group(backend="nccl")
    same = compare_replay_with_call(4, SequenceParallel(group, **options))
    gc.collect()  # a graph holds what a communicator can't end without
    return same


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "options",
    [
        *({"algorithm": name} for name in ("chain", "gather", "doubling", "device_chain")),
        {"method": "lasp1"},
        {"method": "ulysses", "shard_sizes": [500, 500]},
    ],
    ids=str,
)
def test_a_replay_exchanges_what_a_call_does(options):
    assert run_processes(2, on_rank, options, timeout_s=60.0) == [True, True]
