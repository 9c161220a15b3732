"""True fp32: states of many ranks must not be rounded to TF32 on their way."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


def uses_tf32(device: torch.device) -> bool:
    """Return whether fp32 products on a device may be made in less than fp32."""
    return device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"


@contextmanager
def true_fp32(device: torch.device) -> Generator[None]:
    """Compute fp32 products in fp32 on a CUDA device, whatever the process has chosen."""
    if not uses_tf32(device):
        yield
        return
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)
