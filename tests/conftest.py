"""What all tests share: one thread a rank, since ranks are what runs in parallel here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_and_a_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run_interpreted() -> Callable[[Path, str], None]:
    """Return what runs a part of a script with Triton's interpreter on, in a process of its own.

    Triton reads once, when it is first imported, whether it interprets.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the package triton is missing; install zeco-sp[gpu]")

    def run(cases: Path, part: str) -> None:
        done = subprocess.run(
            [sys.executable, str(cases), part],
            env=dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


collect_ignore_glob = ["*/*_cases.py"]
"""Scripts that tests run in processes of their own, with Triton's interpreter on."""
