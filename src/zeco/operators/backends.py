"""Which implementation of an operator runs: chosen by name, or for the device, never in silence."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection

import torch

from zeco.core.errors import ArgumentError, UnsupportedError, unknown_name

BACKENDS = ("auto", "torch", "triton", "fla")


def choose_backend(name: str, backend: str, device: torch.device, offered: Collection[str]) -> str:
    """Return the backend that an operator call uses.

    Args:
        name: the operator, for messages.
        backend: what the caller asked for.
        device: where the inputs are.
        offered: the backends that this operator has.

    Raises:
        ArgumentError: the name is no backend.
        UnsupportedError: the backend exists but not for this operator, device or installation.

    >>> choose_backend("gla", "auto", torch.device("cpu"), ("torch", "triton"))
    'torch'
    """
    if backend not in BACKENDS:
        raise ArgumentError(f"{name}: " + unknown_name("backend", backend, BACKENDS))
    usable = {b: why_not(b, device) for b in ("triton", "fla", "torch") if b in offered}
    if backend == "auto":
        return next(b for b, reason in usable.items() if reason is None)
    if backend not in usable:
        raise UnsupportedError(
            f"{name}: backend {backend!r} isn't offered for this operator; use one of "
            f"{', '.join(sorted(usable))}, or 'auto'"
        )
    if reason := usable[backend]:
        raise UnsupportedError(f"{name}: backend {backend!r} can't run here: {reason}")
    return backend


def why_not(backend: str, device: torch.device) -> str | None:
    """Return why a backend can't run on a device, with the remedy; None if it can."""
    if backend == "torch":
        return None
    if device.type != "cuda":
        return f"the inputs are on {device}; move them to a CUDA device or use backend='torch'"
    package = {"triton": "triton", "fla": "fla"}[backend]
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is missing; install zeco-sp[gpu]"
    return None
