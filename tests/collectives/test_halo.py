"""The halo against slicing the whole sequence, for ranks longer and shorter than its reach."""

from __future__ import annotations

import pytest
import torch

import zeco
from zeco.collectives.halo import halo, split_tails
from zeco.core.partition import shard_bounds
from zeco.testing import run_processes, run_ranks

B, D = 2, 3


def problem(length: int, reach: int):
    g = torch.Generator().manual_seed(length * 10 + reach)
    x = torch.randn(B, length, D, generator=g, dtype=torch.float64)
    initial = torch.randn(B, reach, D, generator=g, dtype=torch.float64)
    weights = torch.randn(8, B, reach, D, generator=g, dtype=torch.float64)
    return x, initial, weights


def reference(sizes, reach):
    x, initial, weights = problem(sum(sizes), reach)
    x.requires_grad_()
    initial.requires_grad_()
    whole = torch.cat([initial, x], 1)
    lefts = []
    for rank in range(len(sizes)):
        start, _ = shard_bounds(sizes, rank)
        lefts.append(whole[:, start : start + reach])
    sum((left * w).sum() for left, w in zip(lefts, weights, strict=False)).backward()
    return [left.detach() for left in lefts], x.grad, initial.grad


def on_rank(transport, sizes, reach):
    x, initial, weights = problem(sum(sizes), reach)
    start, stop = shard_bounds(sizes, transport.rank)
    mine = x[:, start:stop].clone().requires_grad_()
    initial.requires_grad_()
    left = halo(mine, reach, transport, initial=initial)
    (left * weights[transport.rank]).sum().backward()
    d_x = torch.zeros_like(mine) if mine.grad is None else mine.grad
    return left.detach(), d_x, initial.grad


SIZES = [(9,), (5, 4), (3, 3, 3), (1, 1, 1, 6), (0, 4, 0, 0, 5), (2, 0, 1, 0, 0, 0, 1)]


@pytest.mark.parametrize("reach", [1, 3, 5])
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_slicing(sizes, reach):
    lefts, d_x, d_initial = reference(sizes, reach)
    found = run_ranks(len(sizes), lambda t: on_rank(t, sizes, reach))
    for (left, _, _), expected in zip(found, lefts, strict=True):
        assert torch.equal(left, expected)
    torch.testing.assert_close(torch.cat([d for _, d, _ in found], 1), d_x)
    torch.testing.assert_close(found[0][2], d_initial)


def test_reach_zero_sends_nothing():
    def rank_function(transport):
        left = halo(torch.ones(1, 2, 3), 0, transport)
        return left.shape, transport.ledger.sent_messages

    assert run_ranks(2, rank_function) == [((1, 0, 3), 0)] * 2


def test_bad_reach_and_initial():
    with pytest.raises(zeco.ZecoError, match="reach=-1"):
        halo(torch.ones(1, 2, 3), -1, run_ranks(1, lambda t: t)[0])
    with pytest.raises(zeco.ZecoError, match="initial"):
        halo(torch.ones(1, 2, 3), 2, run_ranks(1, lambda t: t)[0], initial=torch.ones(1, 3, 3))


def test_recomputation_sends_nothing():
    def rank_function(transport):
        x = torch.randn(1, 4, 3, requires_grad=True)
        y = zeco.checkpoint(lambda x: torch.cat([halo(x, 2, transport), x], 1).sin(), x)
        y.sum().backward()
        return transport.ledger.sent["halo"].messages

    # One message forward from every rank but the last, one backward from every rank but the first.
    assert run_ranks(3, rank_function) == [1, 2, 1]


@pytest.mark.parametrize("sizes", [(7,), (3, 5), (1, 0, 6), (0,)])
@pytest.mark.parametrize("spread", [False, True])
def test_gradients_of_tails_go_in_their_places(sizes, spread):
    """Also where the gradient of the rest is one number spread over it."""
    reach = 2
    x = torch.randn(B, sum(sizes), D, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(len(sizes), B, reach, D, dtype=torch.float64)

    def loss(y, tails):
        rest = y.sum() if spread else y.square().sum()
        return rest + sum(
            (t * w[:, : t.shape[1]]).sum() for t, w in zip(tails, weights, strict=True)
        )

    (found,) = torch.autograd.grad(loss(*split_tails(x, sizes, reach)), x)
    parts = [part[:, max(0, part.shape[1] - reach) :] for part in x.split(sizes, 1)]
    (expected,) = torch.autograd.grad(loss(x, parts), x)
    torch.testing.assert_close(found, expected)


def in_process_group(sizes, reach):
    from zeco.collectives.groups import transport_of

    return on_rank(transport_of(None), sizes, reach)


@pytest.mark.timeout(60)
def test_over_processes():
    sizes, reach = (1, 4, 1), 3
    lefts, d_x, _ = reference(sizes, reach)
    found = run_processes(3, in_process_group, sizes, reach)
    for (left, _, _), expected in zip(found, lefts, strict=True):
        assert torch.equal(left, expected)
    torch.testing.assert_close(torch.cat([d for _, d, _ in found], 1), d_x)
