"""The reduced suite over real processes and gloo, all of it in two starts."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from zeco.testing import run_processes
from zeco.testing.cases import CASES, SETTINGS
from zeco.testing.conformance import Problem, relative_errors

SAMPLE = [
    ("gla", "plain", {"method": "zeco", "num_blocks": 4}),
    ("gla", "uneven, an empty rank", {"method": "zeco", "algorithm": "gather"}),
    ("simple_gla", "packed", {"method": "zeco"}),
    ("simple_gla", "batch of 3", {"method": "lasp2"}),
    ("linear_attention", "grouped heads", {"method": "lasp1"}),
    ("hgrn2", "short", {"method": "zeco"}),
    ("lightning_attention", "packed, uneven", {"method": "lasp1"}),
    ("retention", "no states", {"method": "lasp2", "overlap": False}),
    ("gla", "plain", {"method": "zeco", "check": True}),
]


def solve_all() -> list:
    group = dist.group.WORLD
    return [
        Problem(CASES[case], SETTINGS[setting]).on_rank(group, **options)
        for case, setting, options in SAMPLE
    ]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [2, 3])
def test_processes(ranks):
    parts = run_processes(ranks, solve_all, timeout_s=100)
    for index, (case, setting, _) in enumerate(SAMPLE):
        problem = Problem(CASES[case], SETTINGS[setting])
        found = problem.join([part[index] for part in parts])
        errors = relative_errors(found, problem.oracle())
        assert max(errors.values()) <= 1e-10, (case, setting, errors)
