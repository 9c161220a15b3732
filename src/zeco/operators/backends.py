"""Which implementation of an operator runs: chosen by name, or for the device, never in silence.

What is chosen, and why not a faster one, goes to the log ``zeco.backends``, once each::

    logging.basicConfig(); logging.getLogger("zeco.backends").setLevel("INFO")
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import lru_cache

import torch

from zeco.core.errors import ArgumentError, UnsupportedError, unknown_name
from zeco.operators.fla.check import is_installed, why_not_installed

BACKENDS = ("auto", "torch", "triton", "fla")

_SHARED_BYTES = 227 << 10


def choose_backend(
    name: str,
    backend: str,
    device: torch.device,
    offered: Collection[str],
    refused: Mapping[str, str | None] | None = None,
) -> str:
    """Return the backend that an operator call uses.

    Args:
        name: the operator, for messages.
        backend: what the caller asked for.
        device: where the inputs are.
        offered: the backends that this operator has.
        refused: why a backend doesn't take this call, by its name; None where it does.

    Raises:
        ArgumentError: the name is no backend.
        UnsupportedError: the backend exists but not for this operator, device or installation.

    >>> choose_backend("gla", "auto", torch.device("cpu"), ("torch", "triton"))
    'torch'
    """
    if backend not in BACKENDS:
        raise ArgumentError(f"{name}: " + unknown_name("backend", backend, BACKENDS))
    refused = {} if refused is None else refused
    usable = {
        b: why_not(b, device) or refused.get(b) for b in ("triton", "fla", "torch") if b in offered
    }
    if backend == "auto":
        chosen = next(b for b, reason in usable.items() if reason is None)
        without = "".join(f"; not {b!r}: {reason}" for b, reason in usable.items() if reason)
        _tell(f"{name}: backend {chosen!r}{without}")
        return chosen
    if backend not in usable:
        raise UnsupportedError(
            f"{name}: backend {backend!r} isn't offered for this operator; use one of "
            f"{', '.join(sorted(usable))}, or 'auto'"
        )
    if reason := usable[backend]:
        raise UnsupportedError(f"{name}: backend {backend!r} can't run here: {reason}")
    return backend


@lru_cache(maxsize=256)
def _tell(message: str) -> None:
    """Write a choice to the log, once."""
    logging.getLogger("zeco.backends").info(message)


def why_not(backend: str, device: torch.device) -> str | None:
    """Return why a backend can't run on a device, with the remedy; None if it can."""
    if backend == "torch":
        return None
    if device.type != "cuda":
        return f"the inputs are on {device}; move them to a CUDA device or use backend='torch'"
    if backend == "fla":
        return why_not_installed(device)
    if not is_installed("triton"):
        return "the package triton is missing; install zeco-sp[gpu]"
    return _why_too_small(device)


@lru_cache(maxsize=16)
def _why_too_small(device: torch.device) -> str | None:
    """Return why the kernels, cut for Hopper's shared memory, don't fit a GPU; None if they do."""
    found = torch.cuda.get_device_properties(device)
    shared = found.shared_memory_per_block_optin
    if (found.major, found.minor) >= (9, 0) and shared >= _SHARED_BYTES:
        return None
    return (
        f"{found.name} has compute capability {found.major}.{found.minor} and {shared >> 10} KiB of "
        f"shared memory a block, the kernels need 9.0 and {_SHARED_BYTES >> 10} KiB, as an H100 has; "
        f"use backend='torch'"
    )
