"""Every operator on the running group against one rank, as ``zeco doctor`` shows it."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeco.sequence_parallel import SequenceParallel
from zeco.testing.cases import CASES, SETTINGS
from zeco.testing.conformance import Part, Problem, relative_errors

SCANNED = (1, 4, 32, 32)
"""[B, H, K, V] of the states for which the choice of scan is told."""


@dataclass(frozen=True)
class Finding:
    """What an operator did on the group.

    Attributes:
        operator: its name.
        backend: which one ran, and why not a faster one.
        error: the largest relative error, of all results and gradients, against one rank.
    """

    operator: str
    backend: str
    error: float


@dataclass(frozen=True)
class Examination:
    """What the ranks found; the same on all.

    Attributes:
        num_ranks: of the group.
        device: kind of device that they compute on.
        findings: of every operator.
        scan: what ``algorithm="auto"`` takes for states of `SCANNED`.
    """

    num_ranks: int
    device: str
    findings: list[Finding]
    scan: str


def examine(device: torch.device) -> Examination:
    """Run every operator in fp32 on torch.distributed's default group, or on one rank without it.

    Before every call the ranks compare what they are about to do. All ranks call this.

    Args:
        device: where this rank computes.
    """
    sp = SequenceParallel(None)
    findings: list[Finding] = []
    for name, case in CASES.items():
        problem = Problem(case, SETTINGS["plain"], torch.float32, device=device)
        with _heard() as said:
            tokens, results = problem.on_rank(None, check=True)
        mine: Part = tokens, {n: x.cpu() for n, x in results.items()}
        parts = [mine] * sp.size
        if sp.size > 1:
            dist.all_gather_object(parts, mine)
        expected = {n: x.cpu() for n, x in problem.one_rank().items()}
        error = max(relative_errors(problem.join(parts), expected).values())
        operator, _, _ = name.partition(",")
        told = next((s for s in said if s.startswith(f"{operator}:")), "")
        findings.append(Finding(name, told.partition("backend ")[2], error))
    chosen = sp.explain(SCANNED).splitlines()[0].removeprefix("chosen: ")
    return Examination(sp.size, device.type, findings, " ".join(chosen.split()))


@contextmanager
def _heard() -> Generator[list[str]]:
    """Collect what is logged about the choice of backends."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, ear = logging.getLogger("zeco.backends"), Ear()
    before = logger.level
    logger.addHandler(ear)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.setLevel(before)
        logger.removeHandler(ear)
