"""The script of benchmarks/ for one GPU, as far as it goes without one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_layer.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_layer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_parts_of_a_layer_are_its_own(script: ModuleType) -> None:
    assert script.MEASURES.keys() == set(script.PARTS)
    sizes = ["--width", "32", "--heads", "2", "--tokens", "70"]
    given = script.parse(["--out", "unused.json", *sizes])
    given.device, given.dtype = torch.device("cpu"), torch.float32
    parts = script.part_passes(given)
    assert len(parts) == 5
    for runs in (script.layer_passes(given), *parts.values()):
        assert runs["forward"]().shape[:2] == (1, 70)
        assert all(g.isfinite().all() for g in runs["forward_backward"]())
