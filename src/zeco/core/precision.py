"""True fp32: states of many ranks must not be rounded to TF32 on their way."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def true_fp32(device: torch.device) -> Generator[None]:
    """Compute fp32 products in fp32 on a CUDA device, whatever the process has chosen."""
    chosen = torch.get_float32_matmul_precision()
    if device.type != "cuda" or chosen == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)
