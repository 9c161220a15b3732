"""What CUDA graphs read, kept for as long as they may.

A tensor made outside a graph and read inside it must outlive it, and nobody tells when a graph is gone.
So what comes out of a bounded cache, index tensors of a batch's documents, say, is held for good once a
capture has seen it.
"""

from __future__ import annotations

from typing import TypeVar

import torch

T = TypeVar("T")

_held: dict[int, object] = {}


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device records a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def hold(x: T, device: torch.device) -> T:
    """Return x, and keep it for good if a CUDA graph is being captured.

    >>> hold("x", torch.device("cpu")), len(_held)
    ('x', 0)
    """
    if is_capturing(device):
        _held[id(x)] = x
    return x
