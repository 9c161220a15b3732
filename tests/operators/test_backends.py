"""Which GPUs the Triton kernels are offered on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zeco.core.errors import UnsupportedError
from zeco.operators import backends

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Let the device be a GPU of some capability and shared memory."""
    backends._why_too_small.cache_clear()
    monkeypatch.setattr(backends, "is_installed", lambda name: True)

    def pretend(major, minor, kib):
        found = SimpleNamespace(
            name="a GPU", major=major, minor=minor, shared_memory_per_block_optin=kib << 10
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    yield pretend
    backends._why_too_small.cache_clear()


def choose(backend):
    return backends.choose_backend("gla", backend, CUDA, ("torch", "triton"))


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_large_enough(gpu, capability):
    gpu(*capability, 227)
    assert choose("auto") == "triton"


@pytest.mark.parametrize("capability", [(8, 0, 163), (8, 9, 99), (12, 0, 99)])
def test_too_small(gpu, capability):
    gpu(*capability)
    assert choose("auto") == "torch"
    with pytest.raises(UnsupportedError, match=r"227 KiB.*use backend='torch'"):
        choose("triton")
