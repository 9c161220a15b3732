"""The context: recomputation, agreement, traffic, bad input."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import zeco
from zeco.collectives.scan import start_scan
from zeco.core.errors import ArgumentError
from zeco.core.fabric import Fabric
from zeco.core.fabric_file import fabric_to_dict
from zeco.sequence_parallel.methods import scanned
from zeco.sequence_parallel.methods.ulysses import Ulysses
from zeco.testing import run_processes, run_ranks

B, T, H, K, V = 1, 70, 2, 8, 6
STATE_BYTES = B * H * K * V * 4


def inputs(seed: int = 0, **overrides) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    found = {
        "q": torch.randn(B, T, H, K, generator=g),
        "k": torch.randn(B, T, H, K, generator=g),
        "v": torch.randn(B, T, H, V, generator=g),
        "g": -torch.rand(B, T, H, K, generator=g),
    }
    return {**found, **overrides}


def two_layers(x: dict[str, torch.Tensor], sp: zeco.SequenceParallel) -> torch.Tensor:
    o, _ = zeco.ops.gla(**x, sp=sp)
    o, _ = zeco.ops.gla(x["q"], x["k"], o, x["g"], sp=sp)
    return o


WAYS = {
    "none": lambda f, *a: f(*a),
    "zeco": zeco.checkpoint,
    "torch": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False),
}


def run_two_layers(group, way: str):
    sp = zeco.SequenceParallel(group, algorithm="chain", num_blocks=2)
    x = {name: t.requires_grad_() for name, t in inputs(sp.rank).items()}
    o = WAYS[way](two_layers, x, sp)
    o.pow(2).sum().backward()
    return sp.ledger, {name: t.grad for name, t in x.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_state_a_layer_each_way_with_or_without_checkpointing(ranks, way):
    for rank, (ledger, _) in enumerate(run_ranks(ranks, lambda g: run_two_layers(g, way))):
        assert ledger.sent["forward"].bytes == (2 * STATE_BYTES if rank < ranks - 1 else 0)
        assert ledger.sent["backward"].bytes == (2 * STATE_BYTES if rank > 0 else 0)
        assert ledger.scans["forward"] == 2


def test_checkpointing_changes_no_gradient():
    plain = run_ranks(3, lambda g: run_two_layers(g, "none"))
    for way in ("zeco", "torch"):
        for (_, a), (_, b) in zip(
            plain, run_ranks(3, lambda g, w=way: run_two_layers(g, w)), strict=True
        ):
            for name in a:
                assert torch.equal(a[name], b[name]), name


def test_a_backward_pass_repeated_through_a_checkpoint():
    def rank_function(group):
        sp = zeco.SequenceParallel(group)
        x = {name: t.requires_grad_() for name, t in inputs(sp.rank).items()}
        loss = WAYS["torch"](two_layers, x, sp).pow(2).sum()
        grads = [torch.autograd.grad(loss, list(x.values()), retain_graph=True) for _ in range(2)]
        return [torch.equal(a, b) for a, b in zip(*grads, strict=True)], sp.ledger.scans

    for same, scans in run_ranks(2, rank_function):
        assert all(same)
        assert scans["forward"] == 2


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_scans_write_what_leaves_only_at_a_turn(layout, monkeypatch):
    """Finals are the segments' own: there is no other reader in training, nor in prefill."""
    asked = {rank: [] for rank in range(3)}

    def noted(transport, *args, **options):
        if options["output_leaving"]:
            asked[transport.rank].append((options["purpose"], options["reverse"]))
        return start_scan(transport, *args, **options)

    monkeypatch.setattr(scanned, "start_scan", noted)

    def rank_function(group):
        sp = zeco.SequenceParallel(group, layout=layout)
        q = torch.randn(1, 4, 1, 4, requires_grad=True)
        o, state = zeco.ops.linear_attention(q, q, q, sp=sp, output_final_state=True)
        (o.sum() + state.sum()).backward()

    run_ranks(3, rank_function)
    turns = {2: [("forward", False), ("backward", False)]} if layout == "zigzag" else {}
    assert asked == {rank: turns.get(rank, []) for rank in range(3)}


def test_waiting_is_measured():
    ledgers = run_ranks(2, lambda g: run_two_layers(g, "none")[0])
    assert all(ledger.wait_s > 0 for ledger in ledgers)


@pytest.mark.parametrize(
    "overrides,message",
    [
        ({"q": torch.zeros(B, T, H)}, "q has 3 dims"),
        ({"k": torch.zeros(B, T, H, K + 1)}, "k has K=9"),
        ({"v": torch.zeros(B, T + 1, H, V)}, "v has T=71"),
        ({"g": torch.full((B, T, H, K), 0.5)}, "g .*0.5"),
        ({"v": torch.zeros(B, T, 3, V)}, "3 value heads"),
        ({"backend": "cuda"}, "backend 'cuda' does not exist"),
        ({"backend": "triton"}, "'triton'"),
        ({"initial_state": torch.zeros(B, H, K, V + 1)}, "initial_state"),
    ],
)
def test_bad_input_raises_the_same_on_every_rank(overrides, message):
    def rank_function(group):
        sp = zeco.SequenceParallel(group)
        with pytest.raises(zeco.ZecoError, match=message) as raised:
            zeco.ops.gla(**inputs(**overrides), sp=sp)
        zeco.ops.gla(**inputs(), sp=sp)  # and the group is as good as before
        return str(raised.value)

    assert len(set(run_ranks(3, rank_function, timeout_s=20))) == 1


def one_rank_gets_positive_gates():
    sp = zeco.SequenceParallel()
    gates = torch.full((B, T, H, K), 0.5 if sp.rank == 1 else -0.5)
    try:
        zeco.ops.gla(**inputs(g=gates), sp=sp)
    except zeco.ZecoError as error:
        return str(error)
    return None


@pytest.mark.timeout(60)
def test_bad_values_on_one_rank_reach_every_rank():
    for message in run_processes(3, one_rank_gets_positive_gates, timeout_s=40):
        assert "0.5" in message
    for message in run_processes(3, one_rank_gets_positive_gates, timeout_s=40)[::2]:
        assert "rank 1 raised" in message


def test_nan_is_found_where_it_is_looked_for():
    bad = inputs()["k"].clone()
    bad[0, 5, 1, 3] = float("nan")
    zeco.ops.gla(**inputs(k=bad), sp=zeco.SequenceParallel(check=False))
    with pytest.raises(zeco.ZecoError, match=r"k .*NaN"):
        zeco.ops.gla(**inputs(k=bad), sp=zeco.SequenceParallel(check=True))


def test_ranks_that_disagree_raise_the_same_error():
    def rank_function(group):
        sp = zeco.SequenceParallel(group, check=True)
        dtype = torch.float64 if group.rank == 2 else torch.float32
        with pytest.raises(zeco.ZecoError, match="ranks disagree") as raised:
            zeco.ops.gla(**{n: x.to(dtype) for n, x in inputs().items()}, sp=sp)
        return str(raised.value)

    messages = set(run_ranks(3, rank_function, timeout_s=20))
    assert len(messages) == 1
    assert "torch.float64 on ranks [2]" in messages.pop()


@pytest.mark.parametrize(
    "options,message",
    [
        ({"method": "zecoo"}, "did you mean 'zeco'"),
        ({"algorithm": "ring"}, "algorithm 'ring' does not exist"),
        ({"method": "lasp1", "num_blocks": 4}, "num_blocks=4"),
        ({"method": "lasp1", "overlap": False}, "overlap=False"),
        ({"layout": "striped"}, "layout 'striped' does not exist"),
        ({"shard_sizes": (1, 2)}, "must be 1 numbers"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"group": 3}, "must be a ProcessGroup"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(zeco.ZecoError, match=message):
        zeco.SequenceParallel(**options)


def test_wrong_tokens_for_the_shard_sizes():
    sp = zeco.SequenceParallel(shard_sizes=(T + 1,))
    with pytest.raises(zeco.ZecoError, match="shard_sizes gives rank 0"):
        zeco.ops.gla(**inputs(), sp=sp)


def test_ulysses_names_the_methods_that_need_no_divisible_heads():
    def rank_function(group):
        with pytest.raises(zeco.ZecoError, match="2 heads on 3 ranks; 'zeco', 'lasp1'"):
            zeco.ops.gla(**inputs(), sp=zeco.SequenceParallel(group, method="ulysses"))

    run_ranks(3, rank_function, timeout_s=20)


def test_zigzag_batches_are_put_together_again():
    tokens = torch.arange(23)[None]

    def rank_function(group):
        sp = zeco.SequenceParallel(group, layout="zigzag")
        part = zeco.shard_batch({"input_ids": tokens}, sp)
        return part, zeco.unshard(part["input_ids"], sp)

    found = run_ranks(3, rank_function)
    for part, whole in found:
        assert torch.equal(whole, tokens)
        assert torch.equal(part["position_ids"], part["input_ids"])
    assert found[0][0]["input_ids"].tolist() == [[0, 1, 2, 3, 20, 21, 22]]


def test_the_choice_follows_a_calibrated_fabric(tmp_path):
    slow = Fabric(1.0, 1e9, 1e-6, 1e12)
    file = tmp_path / "fabric.json"
    file.write_text(json.dumps({"figures": {"fabric": fabric_to_dict(slow)}}))

    # With a second a hop, two rounds beat a chain of three hops.
    for fabric in (slow, file, str(file)):

        def chosen(transport, fabric=fabric):
            sp = zeco.SequenceParallel(transport, fabric=fabric)
            return sp.explain((1, 4, 32, 32)).splitlines()[0]

        assert "chain" not in run_ranks(4, chosen)[0]
    with pytest.raises(ArgumentError, match="holds no fabric"):
        zeco.SequenceParallel(fabric=tmp_path / "nothing.json")


def test_ranks_that_disagree_on_the_fabric_are_told():
    def call(transport):
        fabric = Fabric(1e-3 * (1 + transport.rank % 2), 1e9, 1e-6, 1e12)
        sp = zeco.SequenceParallel(transport, fabric=fabric, check=True)
        q = torch.zeros(1, 4, 1, 4)
        zeco.ops.linear_attention(q, q, q, sp=sp)

    with pytest.raises(ArgumentError, match=r"fabric is .* on ranks"):
        run_ranks(3, call)


def test_explain_names_the_choice_first():
    def rank_function(group):
        sp = zeco.SequenceParallel(group, nodes=(2, 2))
        return sp.explain((1, 4, 32, 32)).splitlines()

    lines = run_ranks(4, rank_function)[0]
    assert lines[0].startswith("chosen: ")
    assert any("two_level" in line for line in lines)
    times = [float(line.split()[-3]) for line in lines]
    assert times == sorted(times)


def test_nodes_that_do_not_add_up():
    with pytest.raises(zeco.ZecoError, match="must be the ranks on each node"):
        zeco.SequenceParallel(nodes=(2, 2))


def test_ulysses_takes_shards_of_any_size_and_asks_for_them_unless_told():
    x = inputs()
    cuts = [0, 50, 70]

    def rank_function(group):
        found = []
        for shard_sizes in (None, [50, 20]):
            sp = zeco.SequenceParallel(group, method="ulysses", shard_sizes=shard_sizes)
            sp.ledger.clear()
            mine = {n: t[:, cuts[sp.rank] : cuts[sp.rank + 1]] for n, t in x.items()}
            found.append((zeco.ops.gla(**mine, sp=sp)[0], sp.ledger.sent_messages))
        return found

    asked, told = zip(*run_ranks(2, rank_function, timeout_s=20), strict=True)
    for found in (asked, told):
        o = torch.cat([part for part, _ in found], 1)
        torch.testing.assert_close(o, zeco.ops.gla(**x)[0], rtol=1e-4, atol=1e-4)
    for (_, with_sizes), (_, without) in zip(asked, told, strict=True):
        assert with_sizes == without + 1


def test_ulysses_repeats_shared_heads_that_do_not_divide():
    keys = torch.randn(1, 6, 3, 2)  # three heads for six of the values: two ranks can't share them
    queries, values = torch.randn(1, 6, 2, 2), torch.randn(1, 6, 6, 2)

    def rank_function(transport):
        exchange = Ulysses(transport, [((0, 3),), ((3, 6),)])
        mine = slice(3 * transport.rank, 3 * transport.rank + 3)
        states = torch.zeros(1, 6, 2, 2)
        return exchange.to_heads([x[:, mine] for x in (queries, keys, values)], states)[0]

    for rank, found in enumerate(run_ranks(2, rank_function, timeout_s=20)):
        heads = slice(3 * rank, 3 * rank + 3)
        expected = queries[:, :, rank : rank + 1], keys.repeat_interleave(2, 2)[:, :, heads]
        for x, y in zip(found, (*expected, values[:, :, heads]), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(
    "cu_seqlens,message",
    [
        (torch.tensor([1, T]), "must start at 0"),
        (torch.tensor([0, T - 1]), "cu_seqlens ends at 69"),
        (torch.tensor([0, 9, 5, T]), "decreases from 9 to 5"),
        (torch.tensor([0, T], device="meta"), "cu_seqlens is on meta"),
        (torch.tensor([0.0, T]), "must be int32 or int64"),
    ],
)
def test_bad_document_boundaries(cu_seqlens, message):
    for sp in (None, zeco.SequenceParallel()):
        with pytest.raises(zeco.ZecoError, match=message):
            zeco.ops.gla(**inputs(), cu_seqlens=cu_seqlens, sp=sp)
    with pytest.raises(zeco.ZecoError, match="one state"):
        zeco.ops.gla(
            **inputs(), cu_seqlens=torch.tensor([0, 5, T]), initial_state=torch.zeros(1, H, K, V)
        )
