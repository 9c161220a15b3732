"""Ranks in threads, ranks in processes, assertions and seeded faults, for users' tests and ours."""

from __future__ import annotations

from zeco.testing.processes import run_processes
from zeco.testing.ranks import run_ranks

__all__ = ["run_processes", "run_ranks"]
