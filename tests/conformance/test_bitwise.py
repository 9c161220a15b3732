"""LASP-1 with shards on chunk boundaries repeats the arithmetic of one device, bit by bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from zeco.testing.cases import CASES, SETTINGS
from zeco.testing.conformance import Problem, on_chunk_boundaries

CHUNK = 64
LENGTH = 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", ["mild", "strong"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_lasp1_is_bitwise_equal_to_one_rank(case, ranks, decay, dtype):
    sizes = on_chunk_boundaries(LENGTH, ranks, CHUNK)
    setting = dataclasses.replace(
        SETTINGS["plain"], length=LENGTH, decay=decay, weights=sizes, batch=2
    )
    problem = Problem(CASES[case], setting, dtype)
    found, expected = problem.sharded(ranks, method="lasp1"), problem.one_rank()
    whole = {f"d_{name}" for name in CASES[case].whole}  # summed over tokens: another order
    for name in expected.keys() - whole:
        assert torch.equal(found[name], expected[name]), name
