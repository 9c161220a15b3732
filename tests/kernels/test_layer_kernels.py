"""The layers' Triton kernels, interpreted on the CPU in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

CASES = Path(__file__).with_name("layer_cases.py")


@pytest.mark.parametrize("part", ["convolution", "strided", "norm", "gate"])
def test_interpreted_kernels(part, run_interpreted):
    run_interpreted(CASES, part)
