"""The decay family's Triton kernels, interpreted on the CPU, against the recurrence in fp64.

The interpreter is switched on by an environment variable that Triton reads once, when it is first
imported, so the cases run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("decay_cases.py")


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the package triton is missing; install zeco-sp[gpu]",
)
@pytest.mark.parametrize("part", ["passes", "one_decay_a_head", "segment", "arranged"])
def test_interpreted_kernels(part):
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, str(CASES), part],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
