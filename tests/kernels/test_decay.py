"""The decay family's Triton kernels, interpreted on the CPU, against the recurrence in fp64.

The cases run in a process of their own: see the fixture.
"""

from __future__ import annotations

from pathlib import Path

import pytest

CASES = Path(__file__).with_name("decay_cases.py")


@pytest.mark.parametrize("part", ["passes", "one_decay_a_head", "wide", "segment", "arranged"])
def test_interpreted_kernels(part, run_interpreted):
    run_interpreted(CASES, part)
