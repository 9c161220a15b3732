"""Sharding, gathering and the loss, against one device."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import zeco
from zeco.testing import run_ranks

L, VOCABULARY = 11, 7


def batch(**more):
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (2, L), generator=g)
    return {"input_ids": tokens, "labels": tokens.clone(), **more}


def test_labels_are_shifted_before_the_cut():
    parts = run_ranks(4, lambda g: zeco.shard_batch(batch(), zeco.SequenceParallel(g)))
    labels = torch.cat([p["shift_labels"] for p in parts], 1)
    tokens = batch()["input_ids"]
    assert torch.equal(labels[:, :-1], tokens[:, 1:])
    assert bool((labels[:, -1] == -100).all())
    assert torch.equal(torch.cat([p["input_ids"] for p in parts], 1), tokens)
    positions = torch.cat([p["position_ids"] for p in parts], 1)
    assert torch.equal(positions, torch.arange(L).expand(2, L))
    assert [p["input_ids"].shape[1] for p in parts] == [3, 3, 3, 2]


def test_documents_have_no_label_across_their_ends():
    tokens = torch.arange(6)[None]
    cu = torch.tensor([0, 2, 2, 6])
    part = zeco.shard_batch(
        {"input_ids": tokens, "labels": tokens, "cu_seqlens": cu}, zeco.SequenceParallel()
    )
    assert part["shift_labels"].tolist() == [[1, -100, 3, 4, 5, -100]]
    assert part["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3]]
    assert torch.equal(part["cu_seqlens"], cu)


def test_what_else_is_in_the_batch():
    extra = batch(
        attention_mask=torch.ones(2, L),
        position_ids=torch.arange(L).expand(3, 2, L) + 5,
        name="x",
        pair=torch.zeros(2, 3),
    )
    parts = run_ranks(2, lambda g: zeco.shard_batch(extra, zeco.SequenceParallel(g)))
    assert [p["attention_mask"].shape for p in parts] == [(2, 6), (2, 5)]
    assert [p["position_ids"].shape for p in parts] == [(3, 2, 6), (3, 2, 5)]
    assert int(parts[1]["position_ids"][0, 0, 0]) == 11
    assert parts[0]["name"] == "x"
    assert parts[0]["pair"].shape == (2, 3)


def test_shard_sizes():
    def sizes(group):
        sp = zeco.SequenceParallel(group, shard_sizes=(0, 10, 1))
        return zeco.shard_batch(batch(), sp)["input_ids"].shape[1]

    assert run_ranks(3, sizes) == [0, 10, 1]


@pytest.mark.parametrize(
    "given,options,message",
    [
        ({}, {}, "needs a tensor 'input_ids'"),
        ({"input_ids": torch.zeros(1, 5), "labels": torch.zeros(1, 4)}, {}, "labels has shape"),
        ({"input_ids": torch.zeros(1, 5)}, {"shard_sizes": (4,)}, "sum to 4"),
        (
            {"input_ids": torch.zeros(1, 5), "cu_seqlens": torch.tensor([0, 4])},
            {},
            "cu_seqlens ends at 4",
        ),
    ],
)
def test_bad_batches(given, options, message):
    with pytest.raises(zeco.ZecoError, match=message):
        zeco.shard_batch(given, zeco.SequenceParallel(**options))


@pytest.mark.parametrize("masked", ["none", "some", "a whole shard", "everything"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_is_that_of_one_device(masked, reduction):
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(2, L, VOCABULARY, generator=g, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (2, L), generator=g)
    cut = {"none": slice(0, 0), "some": slice(1, 3), "a whole shard": slice(0, 4)}
    labels[:, cut.get(masked, slice(None))] = -100
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="sum")
    if reduction == "mean":
        expected = expected / (labels != -100).sum().clamp(min=1)
    expected.backward()

    def rank_function(group):
        sp = zeco.SequenceParallel(group)
        start, stop = sp.bounds(L)
        mine = logits[:, start:stop].clone().requires_grad_()
        loss = zeco.cross_entropy(mine, labels[:, start:stop], sp, reduction=reduction)
        loss.backward()
        return loss.detach(), mine.grad

    found = run_ranks(3, rank_function)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in found], 1), whole.grad)


@pytest.mark.parametrize(
    "logits,labels,options,message",
    [
        (torch.zeros(1, 2, 3), torch.zeros(1, 3), {}, r"\[B, T, vocabulary\]"),
        (torch.zeros(1, 2, 3), torch.zeros(1, 2), {"reduction": "men"}, "did you mean 'mean'"),
    ],
)
def test_bad_losses(logits, labels, options, message):
    with pytest.raises(zeco.ZecoError, match=message):
        zeco.cross_entropy(logits, labels.long(), **options)


def test_unshard_and_its_gradient():
    g = torch.Generator().manual_seed(2)
    x = torch.randn(2, L, 3, generator=g)
    weights = torch.randn(3, 2, L, 3, generator=g)

    def rank_function(group):
        sp = zeco.SequenceParallel(group, shard_sizes=(4, 0, 7))
        start, stop = sp.bounds(L)
        mine = x[:, start:stop].clone().requires_grad_()
        whole = zeco.unshard(mine, sp)
        (whole * weights[sp.rank]).sum().backward()
        return whole.detach(), mine.grad

    found = run_ranks(3, rank_function)
    assert all(torch.equal(whole, x) for whole, _ in found)
    torch.testing.assert_close(torch.cat([d for _, d in found], 1), weights.sum(0))


def test_final_state_of_the_last_rank():
    def rank_function(group):
        sp = zeco.SequenceParallel(group)
        state = torch.full((1, 1, 2, 2), float(sp.rank), requires_grad=True)
        final = zeco.gather_final_state(state, sp)
        (final * (sp.rank + 1)).sum().backward()
        return float(final.detach()[0, 0, 0, 0]), float(state.grad[0, 0, 0, 0])

    assert run_ranks(3, rank_function) == [(2.0, 0.0), (2.0, 0.0), (2.0, 6.0)]
