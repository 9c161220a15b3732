"""Seeded faults: the suite must see each kind of mistake that sequence parallelism invites."""

from __future__ import annotations

import pytest
import torch

import zeco
import zeco.sequence_parallel.methods.scanned as scanned
from zeco.core.maps import AffineMap
from zeco.core.transitions import Diagonal
from zeco.testing.cases import CASES, SETTINGS
from zeco.testing.conformance import Problem, relative_errors


def worst_errors(ranks: int = 4, **options) -> dict[str, float]:
    problem = Problem(CASES["gla"], SETTINGS["plain"])
    return relative_errors(problem.sharded(ranks, **options), problem.oracle())


def test_without_a_fault_the_suite_is_satisfied():
    assert max(worst_errors(method="zeco").values()) < 1e-10


def test_no_exchange_at_all():
    errors = worst_errors(method="local")
    assert errors["o"] > 1e-3
    assert errors["d_k"] > 1e-3


@pytest.fixture
def start_scan(monkeypatch):
    """Replace the scan of a method by a faulty one."""

    def install(spoil):
        real = scanned.start_scan

        def faulty(transport, own, initial=None, **options):
            own, initial = spoil(transport, own, initial, options)
            return real(transport, own, initial, **options)

        monkeypatch.setattr(scanned, "start_scan", faulty)

    return install


def test_wrong_decay(start_scan):
    def spoil(transport, own, initial, options):
        halved = Diagonal(own.transition.parameters[0] / 2)
        return AffineMap(own.update, halved), initial

    start_scan(spoil)
    assert worst_errors(method="zeco")["o"] > 1e-6


def test_gate_of_head_0_used_for_all_heads(start_scan):
    def spoil(transport, own, initial, options):
        first = own.transition.parameters[0][:, :1].expand_as(own.transition.parameters[0])
        return AffineMap(own.update, Diagonal(first)), initial

    start_scan(spoil)
    assert worst_errors(method="zeco")["o"] > 1e-6


def test_only_the_neighbours_state_is_passed_on(start_scan):
    def spoil(transport, own, initial, options):
        forgets = Diagonal(torch.full_like(own.transition.parameters[0], -torch.inf))
        return AffineMap(own.update, forgets), initial

    start_scan(spoil)
    assert worst_errors(method="zeco")["o"] > 1e-6


def test_initial_state_dropped(start_scan):
    start_scan(lambda transport, own, initial, options: (own, None))
    assert worst_errors(method="zeco")["o"] > 1e-6


def test_leaving_state_not_asked_for_at_a_turn(start_scan):
    def spoil(transport, own, initial, options):
        options["output_leaving"] = False
        return own, initial

    start_scan(spoil)
    problem = Problem(CASES["gla"], SETTINGS["zigzag"])
    with pytest.raises(zeco.ZecoError, match="without its leaving state"):
        problem.sharded(4, method="zeco")


def test_gradient_of_the_final_state_dropped(monkeypatch):
    real = AffineMap.adjoint
    monkeypatch.setattr(AffineMap, "adjoint", lambda self, d, last: real(self, d, None))
    errors = worst_errors(method="zeco")
    assert errors["o"] < 1e-10
    assert errors["d_k"] > 1e-6


def test_shifted_rank(start_scan):
    """Every rank contributes its neighbour's map: right shapes, wrong order."""

    def spoil(transport, own, initial, options):
        tag = transport.next_tags()
        found = transport.all_gather(own.update.contiguous(), tag, "fault")
        return AffineMap(found[transport.rank - 1], own.transition), initial

    start_scan(spoil)
    assert worst_errors(method="zeco")["o"] > 1e-3


def test_missing_transpose(monkeypatch):
    """A dense transition applied as it is in the backward scan."""
    from zeco import Dense, all_scan
    from zeco.testing import run_ranks

    def gradient(group):
        g = torch.Generator().manual_seed(group.rank)
        update = torch.randn(1, 1, 3, 2, generator=g, dtype=torch.float64).requires_grad_()
        matrix = torch.randn(1, 1, 3, 3, generator=g, dtype=torch.float64)
        entering, _ = all_scan(update, Dense(matrix), group=group)
        entering.pow(2).sum().backward()
        return update.grad

    right = run_ranks(3, gradient)
    monkeypatch.setattr(Dense, "transpose", lambda self: self)
    wrong = run_ranks(3, gradient)
    assert float((right[0] - wrong[0]).abs().max()) > 1e-3


def test_dropped_tail():
    """The last token of a rank isn't folded into its state."""
    problem = Problem(CASES["gla"], SETTINGS["plain"])
    operator = CASES["gla"].operator

    def drops_tail(q, k, v, g, **options):
        keep = torch.ones(1, k.shape[1], 1, 1, dtype=k.dtype)
        keep[:, -1:] = 0
        return operator(q, k * keep, v, g, **options)

    found = problem.solve(drops_tail, output_final_state=True)
    assert relative_errors(found, problem.oracle())["o"] > 1e-6
