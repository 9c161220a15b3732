"""What all tests share: one thread a rank, since ranks are what runs in parallel here."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_and_a_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


collect_ignore_glob = ["*/*_cases.py"]
"""Scripts that tests run in processes of their own, with Triton's interpreter on."""
