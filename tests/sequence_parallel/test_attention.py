"""Softmax attention on any ranks equals the formula written out; what doesn't fit is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import zeco
from zeco import SequenceParallel, shard_batch
from zeco.core.errors import ArgumentError, UnsupportedError
from zeco.sequence_parallel import scores
from zeco.sequence_parallel.attention import PastKeys, attention, extend_past
from zeco.testing import run_ranks

L, HQ, HKV, D, V = 23, 4, 2, 6, 5
DOCUMENTS = (0, 1, 9, 9, 17, 23)


def inputs(batch: int = 1, length: int = L) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    shapes = {"q": (HQ, D), "k": (HKV, D), "v": (HKV, V)}
    return {
        name: torch.randn(batch, length, *shape, generator=g, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def formula(q, k, v, *, causal=True, window=None, documents=None) -> Tensor:
    k, v = (x.repeat_interleave(HQ // HKV, 2) for x in (k, v))
    t = torch.arange(q.shape[1])
    ahead = t - t[:, None]
    sees = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    if window is not None:
        sees = sees & (ahead.abs() < window)
    if documents is not None:
        ids = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(pairwise(documents))])
        sees = sees & (ids == ids[:, None])
    products = torch.einsum("bthd,bjhd->bhtj", q, k) * D**-0.5
    weights = products.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("bhtj,bjhv->bthv", weights, v)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


SIGHTS = [(True, None), (True, 4), (False, None), (False, 3)]
SPLITS = {
    "default": (3, {}),
    "uneven": (4, {"shard_sizes": (0, 15, 1, 7)}),
    "one rank": (3, {"shard_sizes": (0, 23, 0)}),
    "zigzag": (3, {"layout": "zigzag"}),
    "zigzag, uneven": (2, {"layout": "zigzag", "shard_sizes": (5, 0, 11, 7)}),
}


def sharded(ranks: int, options: dict, x: dict[str, Tensor], d_o: Tensor, call):
    """Return outputs and gradients, put together, and every rank's ledger."""

    def run(group):
        sp = SequenceParallel(group, **options)
        mine = shard_batch({"inputs_embeds": x["q"], "d_o": d_o, **x}, sp)
        leaves = [mine[name].clone().requires_grad_() for name in "qkv"]
        o = call(*leaves, sp=sp)
        gradients = torch.autograd.grad(o, leaves, mine["d_o"])
        return mine["position_ids"][0], (o.detach(), *gradients), sp.ledger

    results = run_ranks(ranks, run)
    order = torch.cat([places for places, _, _ in results]).argsort()
    parts = zip(*(found for _, found, _ in results), strict=True)
    return [torch.cat(part, 1)[:, order] for part in parts], [ledger for _, _, ledger in results]


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("causal,window", SIGHTS)
@pytest.mark.parametrize("exchange", ["heads", "gather"])
@pytest.mark.parametrize("split", SPLITS)
def test_ranks_equal_the_formula(split, exchange, causal, window, documents, monkeypatch):
    monkeypatch.setattr(scores, "MAX_MASK_ELEMENTS", 40)
    monkeypatch.setattr(scores, "MIN_BLOCK", 3)
    ranks, options = SPLITS[split]
    if exchange == "heads" and HKV % ranks:
        ranks, options = 2, {"layout": options.get("layout", "contiguous")}
    x = inputs(1 if documents else 2)
    leaves = [t.clone().requires_grad_() for t in x.values()]
    expected = formula(*leaves, causal=causal, window=window, documents=documents)
    d_o = torch.randn(expected.shape, dtype=torch.float64)
    wanted = [expected.detach(), *torch.autograd.grad(expected, leaves, d_o)]
    cu_seqlens = None if documents is None else torch.tensor(documents)

    def call(q, k, v, **others):
        return attention(
            q,
            k,
            v,
            causal=causal,
            window=window,
            cu_seqlens=cu_seqlens,
            exchange=exchange,
            **others,
        )

    close(call(*x.values()), wanted[0])
    found, _ = sharded(ranks, options, x, d_o, call)
    for one, other in zip(found, wanted, strict=True):
        close(one, other)


def test_uneven_contiguous_shards_need_no_sizes():
    x = inputs()

    def run(group):
        mine = slice(0, 20) if group.rank == 0 else slice(20, L)
        return attention(*(t[:, mine] for t in x.values()), sp=SequenceParallel(group))

    close(torch.cat(run_ranks(2, run), 1), formula(**x))


def test_gather_sends_to_those_who_can_see():
    x, d_o = inputs(length=24), torch.randn(1, 24, HQ, V, dtype=torch.float64)
    a_rank = 6 * HKV * (D + V) * 8

    def sent(**options) -> list[int]:
        def call(*args, sp):
            with torch.no_grad():
                attention(*args, sp=sp, exchange="gather", **options)
            seen.append((sp.rank, sp.ledger.sent["all-to-all"].bytes - 2 * 8 * 3))
            return attention(*args, sp=sp, exchange="gather", **options)

        seen: list[tuple[int, int]] = []
        sharded(4, {}, x, d_o, call)
        return [num_bytes for _, num_bytes in sorted(seen)]

    assert sent() == [3 * a_rank, 2 * a_rank, a_rank, 0]
    assert sent(causal=False) == [3 * a_rank] * 4
    assert sent(cu_seqlens=torch.tensor([0, 6, 18, 24])) == [0, a_rank, 0, 0]
    assert sent(window=2) == [a_rank // 6] * 3 + [0]


def test_auto_swaps_heads_where_they_divide():
    x = inputs()

    def run(group):
        sp = SequenceParallel(group)
        mine = shard_batch({"inputs_embeds": x["q"], **x}, sp)
        attention(*(mine[name] for name in "qkv"), sp=sp)
        return sp.ledger.sent["all-to-all"].messages

    # One for the sizes; then q, k and v and the outputs, or k and v to the ranks after.
    assert run_ranks(2, run) == [1 + 3 + 1] * 2
    assert run_ranks(3, run) == [2 + 2 * 2, 2 + 2, 2]


def test_checkpointing_sends_nothing_again():
    x, d_o = inputs(), torch.randn(1, L, HQ, V, dtype=torch.float64)
    for exchange in ("heads", "gather"):

        def plain(*args, sp, exchange=exchange):
            return attention(*args, sp=sp, exchange=exchange)

        def again(*args, sp, plain=plain):
            return zeco.checkpoint(plain, *args, sp=sp)

        expected, ledgers = sharded(2, {}, x, d_o, plain)
        found, others = sharded(2, {}, x, d_o, again)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        for one, other in zip(others, ledgers, strict=True):
            assert one.sent["all-to-all"].bytes == other.sent["all-to-all"].bytes


@pytest.mark.parametrize("window", [None, 3])
def test_packed_pasts_of_other_lengths_continue_as_a_batch(window):
    """Prompts are read packed, and decoded as a batch."""
    prompts, steps = (0, 1, 8, 8, 13), 3
    x, more = inputs(length=13), inputs(batch=4, length=steps)
    past = extend_past(None, x["k"], x["v"], cu_seqlens=torch.tensor(prompts), window=window)
    assert past.lengths.tolist() == [min(n, (window or 99) - 1) for n in (1, 7, 0, 5)]
    parts = []
    for t in range(steps):
        q, k, v = (m[:, t : t + 1] for m in more.values())
        parts.append(attention(q, k, v, past=past, window=window))
        past = extend_past(past, k, v, window=window)
    found = torch.cat(parts, 1)
    for i, (start, stop) in enumerate(pairwise(prompts)):
        whole = {
            name: torch.cat([x[name][:, start:stop], more[name][i, None]], 1) for name in "qkv"
        }
        close(found[i, None], formula(**whole, window=window)[:, stop - start :])


def test_half_precision_has_no_nan_on_empty_ranks():
    x = {name: t.bfloat16() for name, t in inputs().items()}

    def run(group):
        sp = SequenceParallel(group, shard_sizes=(0, L, 0))
        mine = shard_batch({"inputs_embeds": x["q"], **x}, sp)
        return attention(*(mine[name] for name in "qkv"), sp=sp)

    found = torch.cat(run_ranks(3, run), 1)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), formula(**inputs()), rtol=0.05, atol=0.05)
    assert attention(*(t[:, :0] for t in x.values())).shape == (1, 0, HQ, V)


def test_refuses_by_name():
    x = inputs()
    with pytest.raises(ArgumentError, match="did you mean 'heads'"):
        attention(**x, exchange="head")
    with pytest.raises(ArgumentError, match="window=0"):
        attention(**x, window=0)
    with pytest.raises(ArgumentError, match="k has 3 heads, which does not divide"):
        attention(x["q"], x["k"][:, :, [0, 1, 1]], x["v"][:, :, [0, 1, 1]])
    with pytest.raises(ArgumentError, match=r"v has T=3 .*"):
        attention(x["q"], x["k"], x["v"][:, :3])
    with pytest.raises(ArgumentError, match="cu_seqlens ends at 9"):
        attention(**x, cu_seqlens=torch.tensor([0, 9]))
    past = extend_past(None, x["k"], x["v"])
    with pytest.raises(ArgumentError, match="causal=False"):
        attention(**x, past=past, causal=False)
    with pytest.raises(ArgumentError, match=r"past\.lengths has N=2"):
        attention(**x, past=PastKeys(past.k, past.v, torch.tensor([1, 2])))


def test_refuses_what_the_ranks_cannot_do():
    x = inputs()

    def heads(group):
        attention(**x, sp=SequenceParallel(group), exchange="heads")

    with pytest.raises(UnsupportedError, match="use exchange='gather'"):
        run_ranks(3, heads)

    def zigzag(group):
        sp = SequenceParallel(group, layout="zigzag")
        attention(*(t[:, : 4 - group.rank] for t in x.values()), sp=sp)

    with pytest.raises(ArgumentError, match=r"cut batches with zeco\.shard_batch"):
        run_ranks(2, zigzag)

    def pasts(group):
        past = extend_past(None, x["k"], x["v"]) if group.rank == 0 else None
        attention(**x, sp=SequenceParallel(group), past=past)

    with pytest.raises(ArgumentError, match=r"the ranks have \[23, 0\] tokens of the past"):
        run_ranks(2, pasts)
