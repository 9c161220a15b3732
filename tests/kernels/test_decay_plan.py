"""How many segments a call is cut into, by what a GPU holds at once; no kernel is needed for that."""

from __future__ import annotations

import pytest
import torch

from zeco.kernels.decay import plan

MULTIPROCESSORS = 132


@pytest.mark.parametrize(
    "heads,K,V,segments",
    [
        pytest.param(16, 128, 128, 8, id="one program a head and segment"),
        pytest.param(32, 64, 64, 8, id="two programs of 4 warps a multiprocessor"),
        # Outputs take half a program of 8 warps each, gradients of keys a whole one.
        pytest.param(64, 128, 64, 4, id="64 heads of 64 values"),
        pytest.param(80, 128, 64, 3, id="80 heads of 64 values"),
        pytest.param(112, 128, 64, 2, id="112 heads of 64 values"),
        pytest.param(4, 256, 512, 4, id="wide keys"),
        pytest.param(500, 128, 128, 1, id="more heads than multiprocessors"),
    ],
)
def test_segments_fill_the_device(heads, K, V, segments, monkeypatch):
    monkeypatch.setattr(plan, "_multiprocessors", lambda device: MULTIPROCESSORS)
    plan._plan.cache_clear()
    like = {"dtype": torch.bfloat16, "device": "meta"}
    q, v = torch.empty(1, 16384, heads, K, **like), torch.empty(1, 16384, heads, V, **like)
    g = torch.empty(1, 16384, heads, device="meta")
    found = plan.make_plan(q, v, g)
    plan._plan.cache_clear()
    assert found.num_segments == segments
    assert found.num_segments * found.chunks_per_segment >= found.num_chunks


def test_few_chunks_take_few_segments():
    q = torch.empty(1, 100, 1, 64, dtype=torch.bfloat16)
    assert plan.make_plan(q, q, None).num_segments <= 2
