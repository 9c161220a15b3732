"""The gate before `zeco bench op` times anything: outputs and gradients against fp64.

A ladder of two steps. The chunkwise torch form in fp64 is held to the token-by-token oracle on a few
tokens; then everything that is to be timed is held to the torch form in fp64 on more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zeco.testing.cases import Case, Setting
from zeco.testing.conformance import Problem, Results

GATES = frozenset({"g", "w", "log_decay", "dt", "A"})
"""The inputs that decays are made of."""

BOUNDS = {
    torch.bfloat16: 2e-2,
    torch.float16: 5e-3,
    torch.float32: 2e-4,
    torch.float64: 1e-9,
}
"""Largest relative error that is let through, by dtype of the inputs."""

FORWARD_RESULTS = ("o", "final_state")

ORACLE_TOKENS = 96
"""A chunk and a half: the oracle takes token by token."""


def cast(problem: Problem, dtype: torch.dtype, gates_dtype: torch.dtype) -> Problem:
    """Return a problem of the same numbers, rounded to dtypes.

    Args:
        problem: the one to be rounded.
        dtype: of inputs and of the outputs' gradient.
        gates_dtype: of the inputs that decays are made of.
    """
    states = torch.float64 if torch.float64 in (dtype, gates_dtype) else torch.float32
    rounded = copy.copy(problem)
    rounded.inputs = cast_inputs(problem.inputs, dtype, gates_dtype)
    rounded.d_o = problem.d_o.to(dtype)
    rounded.d_final = problem.d_final.to(states)
    rounded.initial = None if problem.initial is None else problem.initial.to(states)
    return rounded


def cast_inputs(
    inputs: dict[str, Tensor], dtype: torch.dtype, gates_dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return inputs in their dtypes."""
    return {n: x.to(gates_dtype if n in GATES else dtype) for n, x in inputs.items()}


def make_problem(
    case: Case, setting: Setting, device: torch.device, dtype: torch.dtype, gates_dtype: torch.dtype
) -> Problem:
    """Return a problem with initial and final states, in its dtypes."""
    problem = Problem(case, replace(setting, states=True), torch.float64, device=device)
    return cast(problem, dtype, gates_dtype)


def exact_results(problem: Problem) -> Results:
    """Return what the torch form gives in fp64 for a problem's (rounded) numbers."""
    wide = cast(problem, torch.float64, torch.float64)
    return wide.solve(problem.case.operator, output_final_state=True, backend="torch")


def oracle_errors(case: Case, setting: Setting, device: torch.device) -> dict[str, float]:
    """Return the torch form's errors in fp64 against the oracle, on few tokens."""
    few = replace(setting, length=min(setting.length, ORACLE_TOKENS))
    problem = make_problem(case, few, device, torch.float64, torch.float64)
    return norm_errors(exact_results(problem), problem.oracle())


def call_errors(
    problem: Problem, expected: Results, operator: Callable[..., Any], **options: Any
) -> dict[str, float]:
    """Return the errors of one operator on a problem."""
    return norm_errors(problem.solve(operator, output_final_state=True, **options), expected)


def forward_errors(
    problem: Problem, expected: Results, operator: Callable[..., Any], **options: Any
) -> dict[str, float]:
    """Return the errors of one operator's outputs and final state; its backward pass isn't run."""
    with torch.no_grad():
        o, final = operator(
            **problem.inputs,
            **dict(problem.case.options),
            initial_state=problem.initial,
            output_final_state=True,
            **options,
        )
    if final is None:
        raise RuntimeError("it gave no final state")
    return norm_errors({"o": o, "final_state": final}, {n: expected[n] for n in FORWARD_RESULTS})


def norm_errors(found: Results, expected: Results) -> dict[str, float]:
    """Return ‖x - ref‖ / ‖ref‖ of every result; not a number where x isn't."""
    errors: dict[str, float] = {}
    for name, wanted in expected.items():
        difference = (found[name].double() - wanted.double()).norm()
        scale = float(wanted.double().norm())
        errors[name] = float(difference) / scale if scale > 0 else float(difference)
    return errors


def too_large(errors: dict[str, float], dtype: torch.dtype) -> list[str]:
    """Return the results whose error is above the dtype's bound, or not a number."""
    return [name for name, error in errors.items() if not error <= BOUNDS[dtype]]
