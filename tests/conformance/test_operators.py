"""Every operator under every method, on any number of ranks, equals its oracle."""

from __future__ import annotations

import random

import pytest
import torch

from zeco.testing.cases import CASES, SETTINGS
from zeco.testing.conformance import Problem, relative_errors

METHODS = ("zeco", "lasp1", "lasp2", "ulysses")
RANKS = (1, 2, 3, 4, 8)
BOUND = 1e-10

MATRIX = [
    (case, setting, method, ranks)
    for case in CASES
    for setting in SETTINGS
    for method in METHODS
    for ranks in RANKS
    if method != "ulysses" or SETTINGS[setting].heads % ranks == 0
]
SAMPLE = random.Random(2).sample(MATRIX, 150)


def check(case: str, setting: str, method: str, ranks: int) -> None:
    problem = Problem(CASES[case], SETTINGS[setting])
    found = problem.sharded(ranks, method=method)
    for name, error in relative_errors(found, problem.oracle()).items():
        assert error <= BOUND, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("case,setting,method,ranks", SAMPLE)
def test_sample(case, setting, method, ranks):
    check(case, setting, method, ranks)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", CASES)
def test_one_rank(case, setting):
    problem = Problem(CASES[case], SETTINGS[setting])
    for name, error in relative_errors(problem.one_rank(), problem.oracle()).items():
        assert error <= BOUND, f"{name}: relative error {error:.1e}"


@pytest.mark.long
@pytest.mark.parametrize("case,setting,method,ranks", MATRIX)
def test_matrix(case, setting, method, ranks):
    check(case, setting, method, ranks)


@pytest.mark.parametrize("case", CASES)
def test_fp32_equals_one_rank(case):
    problem = Problem(CASES[case], SETTINGS["plain"], torch.float32)
    errors = relative_errors(problem.sharded(4, method="zeco"), problem.one_rank())
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("method,options", [("zeco", {"num_blocks": 3}), ("lasp2", {})])
def test_overlap_changes_nothing(method, options, overlap):
    problem = Problem(CASES["gla"], SETTINGS["plain"])
    found = problem.sharded(3, method=method, overlap=overlap, **options)
    assert max(relative_errors(found, problem.oracle()).values()) <= BOUND


@pytest.mark.parametrize("case", ["gla", "kda", "linear_attention"])
@pytest.mark.parametrize("setting", ["plain", "packed", "zigzag"])
@pytest.mark.parametrize(
    "algorithm", ["chain", "gather", "doubling", "two_level", "two_level_doubling"]
)
def test_every_scan(case, setting, algorithm):
    problem = Problem(CASES[case], SETTINGS[setting])
    found = problem.sharded(5, algorithm=algorithm, nodes=(2, 3))
    assert max(relative_errors(found, problem.oracle()).values()) <= BOUND
