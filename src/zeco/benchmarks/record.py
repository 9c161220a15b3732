"""Figures kept as JSON, with all that is needed to judge and repeat them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("zeco-sp", "torch", "numpy", "triton", "fla-core", "mamba-ssm", "transformers")


def write_record(path: Path, *, command: str, figures: dict[str, Any]) -> None:
    """Write figures to a JSON file.

    Args:
        path: the file; its folder is made.
        command: what measured them, to be run from the repository's root.
        figures: names, units included, to values.
    """
    record = {
        "command": command,
        "commit": describe_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "figures": figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def describe_machine() -> dict[str, Any]:
    """Return the processor, its cores that this process may use, and CUDA devices."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "cuda_devices": devices,
    }


def usable_cores() -> int:
    """Return how many of the processor's cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that figures depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe_commit() -> str | None:
    """Return the commit that runs, with "+changes" when the sources differ; None if unknown."""
    root = Path(__file__).resolve().parents[3]
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return None
    changed = _git(root, "status", "--porcelain", "--", "src", "examples")
    return head + ("+changes" if changed else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
