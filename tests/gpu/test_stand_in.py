"""A middle rank without neighbours, from whom zeros come, computes what a lone rank does."""

from __future__ import annotations

import pytest
import torch

from zeco import SequenceParallel
from zeco.layers import GatedLinearAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("algorithm", ["chain", "device_chain"])
def test_zeros_change_nothing(algorithm):
    from zeco.benchmarks.stand_in import StandInTransport

    torch.manual_seed(0)
    layer = GatedLinearAttention(128, 2, conv_width=4).to("cuda", torch.bfloat16)
    x = torch.randn(1, 500, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    d_y = torch.randn_like(x)
    transport = StandInTransport(4, 8, hop_us=5.0, cycles_per_us=1700.0)
    results = []
    for sp in (None, *(2 * [SequenceParallel(transport, algorithm=algorithm)])):
        y, _ = layer(x, sp=sp)
        results.append([y, *torch.autograd.grad(y, [x, *layer.parameters()], d_y)])
        transport.join()
    expected, *others = results
    for found in others:
        for a, b in zip(found, expected, strict=True):
            assert float((a - b).float().norm() / b.float().norm()) < 1e-2


def test_a_graph_holds_the_scans():
    """A replay's kernels are told apart as those of the run that it was captured from."""
    from zeco.benchmarks.stand_in import StandInTransport
    from zeco.benchmarks.timeline import trace_timelines

    torch.manual_seed(0)
    layer = GatedLinearAttention(128, 2, conv_width=4).to("cuda", torch.bfloat16)
    x = torch.randn(1, 500, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    transport = StandInTransport(4, 8, hop_us=5.0, cycles_per_us=1700.0)
    sp = SequenceParallel(transport, algorithm="device_chain")

    def both():
        y, _ = layer(x, sp=sp)
        return torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))

    run = transport.joined(both)
    run()
    for captured in (False, True):
        (found,) = trace_timelines(run, 1, inside_kernels=True, captured=captured)
        scans = [k for k in found.kernels if k.stream in found.rows.scans]
        assert len(scans) == 2
        assert sum("scan_kernel" in k.name for k in found.kernels) > len(scans)
