"""All-to-all: what every rank gets of tensors cut along any dim, and that the adjoint sends it back."""

from __future__ import annotations

import pytest
import torch

from zeco.collectives.all_to_all import PURPOSE, Swap, Way, all_to_all
from zeco.testing import run_ranks

P = 3
SIZES = (4, 0, 5)
"""Tokens of every rank."""

HEADS = 2
"""Of every rank, once tokens are swapped for heads."""


def tokens(rank: int, batch: int, dim: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rank)
    return torch.randn(batch, SIZES[rank], P * HEADS, dim, generator=g)


def weights(rank: int, batch: int, dim: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(10 + rank)
    return torch.randn(batch, sum(SIZES), HEADS, dim, generator=g)


@pytest.mark.parametrize("batch", [1, 2])  # with more than one, no rank's tokens lie in one piece
@pytest.mark.parametrize("dim", [3, 4])  # 12 bytes, and 16, which are copied 8 at a time
def test_swaps_tokens_for_heads_and_gradients_back(batch: int, dim: int) -> None:
    way = Way(2, (HEADS,) * P, 1, SIZES)

    def on_rank(transport):
        mine = tokens(transport.rank, batch, dim).requires_grad_()
        (found,) = all_to_all([Swap(mine, way)], transport)
        (found * weights(transport.rank, batch, dim)).sum().backward()
        (returned,) = all_to_all([Swap(found.detach(), way.back())], transport)
        return found.detach(), mine.grad, returned

    ranks = run_ranks(P, on_rank)
    whole = torch.cat([tokens(rank, batch, dim) for rank in range(P)], 1)
    gradient = torch.cat([weights(rank, batch, dim) for rank in range(P)], 2)
    for rank, (found, d_mine, returned) in enumerate(ranks):
        assert torch.equal(found, whole[:, :, rank * HEADS : (rank + 1) * HEADS])
        assert torch.equal(returned, tokens(rank, batch, dim))
        assert torch.equal(d_mine, gradient.split(SIZES, 1)[rank])


def test_cut_and_joined_along_one_dim() -> None:
    """Rank r sends r + p numbers to rank p, each telling where it comes from and goes."""

    def on_rank(transport):
        sizes = tuple(transport.rank + peer for peer in range(P))
        parts = [torch.full((1, n), 10.0 * transport.rank + peer) for peer, n in enumerate(sizes)]
        swap = Swap(torch.cat(parts, 1), Way(1, sizes, 1, sizes))
        return all_to_all([swap], transport)[0]

    for rank, found in enumerate(run_ranks(P, on_rank)):
        expected = [10.0 * source + rank for source in range(P) for _ in range(source + rank)]
        assert found.flatten().tolist() == expected


def test_sends_each_part_once_and_no_empty_one() -> None:
    def on_rank(transport):
        swaps = [Swap(tokens(transport.rank, 1, 3), Way(2, (HEADS,) * P, 1, SIZES))] * 2
        all_to_all(swaps, transport)
        sent = transport.ledger.sent[PURPOSE]
        return sent.messages, sent.bytes

    for rank, (messages, num_bytes) in enumerate(run_ranks(P, on_rank)):
        assert messages == (2 * (P - 1) if SIZES[rank] else 0)
        assert num_bytes == 2 * (P - 1) * SIZES[rank] * HEADS * 3 * 4
