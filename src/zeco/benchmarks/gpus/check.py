"""Every operator and method on several ranks against one: outputs, states and all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from zeco.benchmarks.gpus.team import METHODS, Team, Told
from zeco.benchmarks.virtual_ranks import solve_on_ranks
from zeco.core.errors import UnsupportedError
from zeco.testing.cases import CASES, SETTINGS, Setting
from zeco.testing.conformance import Problem, Results, relative_errors

BOUND = 2e-5
"""Largest error in fp32 against one rank, over the largest value of each result."""

# Heads that divide by 8 ranks, and sizes that the Triton kernels take.
WIDE = replace(
    SETTINGS["plain"], name="wide", heads=8, key_heads=8, key_dim=64, value_dim=64, length=1000
)
CHECKED = (
    SETTINGS["plain"],
    SETTINGS["packed"],
    SETTINGS["zigzag"],
    WIDE,
)
COMPILED = ("gla", "linear_attention, normalized", "retention")
"""Operators that between them have all kernels of `WIDE`; to compile these takes longest."""


def prepare_check(team: Team, name: str, num_ranks: int) -> None:
    """Compile the kernels that an operator of `COMPILED` takes, on one rank.

    Args:
        team: of one rank.
        name: of the operator.
        num_ranks: that will be checked.
    """
    problem = Problem(CASES[name], WIDE, torch.float32, device=team.device)
    problem.one_rank()
    if num_ranks > 1:
        solve_on_ranks(problem, num_ranks)
    if num_ranks > 1 and WIDE.heads % num_ranks == 0:  # Ulysses
        heads = WIDE.heads // num_ranks
        fewer = replace(WIDE, heads=heads, key_heads=heads)
        Problem(CASES[name], fewer, torch.float32, device=team.device).one_rank()


def check(
    team: Team, told: Told, *, settings: Sequence[Setting] = CHECKED, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Run every operator and method in fp32 and compare.

    Args:
        team: the ranks.
        told: called with the figures as they come.
        settings: what operators run on, the most important first.
        names: of the operators; none given are all.

    Returns:
        ``errors``: the largest of each combination, ``refused``: why one isn't offered, ``wrong``:
        the errors over `BOUND`, and ``complete``: whether the time was enough for all.
    """
    figures: dict[str, Any] = {"bound": BOUND, "dtype": "float32", "complete": False}
    figures |= {"errors": {}, "refused": {}, "wrong": {}}
    cases = [CASES[name] for name in names or CASES]
    for setting in settings:
        for case in cases:
            if not team.has_time():
                return figures
            problem = Problem(case, setting, torch.float32, device=team.device)
            expected = _on_cpu(problem.one_rank())
            for method, options in METHODS.items():
                name = f"{case.name}, {setting.name}, {method}"
                if method == "ulysses" and setting.heads % team.size:
                    figures["refused"][name] = f"{setting.heads} heads, {team.size} ranks"
                    continue
                try:
                    found = _join(team, problem, options)
                except UnsupportedError as error:
                    figures["refused"][name] = str(error)
                    continue
                except Exception as error:  # wrong, but the others are still worth a look
                    figures["wrong"][name] = f"{type(error).__name__}: {error}"
                    continue
                _judge(figures, name, relative_errors(found, expected))
            told(figures)
    figures["complete"] = True
    return figures


def check_virtual(
    team: Team, told: Told, *, num_ranks: int, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Do what a single GPU allows: every operator on virtual ranks, one after the other.

    Args:
        team: of one rank.
        told: called with the figures as they come.
        num_ranks: virtual ranks.
        names: of the operators; none given are all.
    """
    figures: dict[str, Any] = {"bound": BOUND, "dtype": "float32", "complete": False}
    figures |= {"virtual_ranks": num_ranks, "errors": {}, "wrong": {}}
    figures["skipped"] = "one rank: no process group, so methods and transports aren't compared"
    for case in [CASES[name] for name in names or CASES]:
        if not team.has_time():
            return figures
        problem = Problem(case, WIDE, torch.float32, device=team.device)
        found, _ = solve_on_ranks(problem, num_ranks)
        name = f"{case.name}, {WIDE.name}, virtual ranks"
        _judge(figures, name, relative_errors(_on_cpu(found), _on_cpu(problem.one_rank())))
        told(figures)
    figures["complete"] = True
    return figures


def _judge(figures: dict[str, Any], name: str, errors: dict[str, float]) -> None:
    """Keep a combination's largest error, and all of them where one is too large."""
    figures["errors"][name] = max(errors.values())
    wrong = {result: error for result, error in errors.items() if not error <= BOUND}
    if wrong:
        figures["wrong"][name] = wrong
    worst = max(figures["errors"], key=figures["errors"].__getitem__)
    figures |= {"checks": len(figures["errors"]), "largest_error": figures["errors"][worst]}
    figures["worst"] = worst


def _join(team: Team, problem: Problem, options: dict[str, Any]) -> Results:
    """Run a problem on the ranks; return all results on every rank."""
    tokens, results = problem.on_rank(team.group, **options)
    parts: list[Any] = [None] * team.size
    dist.all_gather_object(parts, (tokens, _on_cpu(results)), group=team.group)
    return problem.join(parts)


def _on_cpu(results: Results) -> Results:
    return {name: x.cpu() for name, x in results.items()}
