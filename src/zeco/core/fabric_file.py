"""Measured costs of messages in a file: written by ``zeco calibrate``, read where a scan is chosen."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from zeco.core.errors import ArgumentError, unknown_name
from zeco.core.fabric import DeviceChain, Fabric, Link


def fabric_to_dict(fabric: Fabric) -> dict[str, Any]:
    """Return a fabric's fields, ready for JSON."""
    return asdict(fabric)


def fabric_from_dict(found: dict[str, Any]) -> Fabric:
    """Return the fabric with these fields.

    Raises:
        ArgumentError: a field that doesn't exist, or one without which there is no fabric.

    >>> from zeco.core.fabric import LOOPBACK
    >>> fabric_from_dict(fabric_to_dict(LOOPBACK)) == LOOPBACK
    True
    """
    known = [field.name for field in fields(Fabric)]
    for name in found:
        if name not in known:
            raise ArgumentError(unknown_name("field of a fabric", name, known))
    parts = {"between": Link, "device_chain": DeviceChain}
    try:
        whole: dict[str, Any] = {
            name: parts[name](**value) if name in parts and value is not None else value
            for name, value in found.items()
        }
        return Fabric(**whole)
    except TypeError as error:
        raise ArgumentError(f"not a fabric: {error}; write it with zeco calibrate") from error


def read_fabric(path: Path) -> Fabric:
    """Read the fabric that ``zeco calibrate --out FILE`` wrote.

    Raises:
        ArgumentError: there is no such file, or it holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["figures"]["fabric"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"{path} holds no fabric ({type(error).__name__}: {error}); write one with "
            "zeco calibrate --out FILE"
        ) from error
    return fabric_from_dict(found)
