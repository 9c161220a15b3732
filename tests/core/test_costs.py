"""The engine's times where they are known in closed form; the choice of scan that follows."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from zeco.core.bounds import at_least_s
from zeco.core.costs import (
    LOOPBACK,
    NVLINK_BY_NCCL,
    Fabric,
    Link,
    Load,
    Plan,
    choose_plan,
    explain_plan,
    load_of,
    predict_s,
)
from zeco.core.engine import play
from zeco.core.errors import ArgumentError, ScheduleError
from zeco.core.fabric import DeviceChain
from zeco.core.schedule import BUILDERS, build_schedule
from zeco.core.topology import check_nodes

SHAPE = (1, 16, 128, 128)
LOAD = Load(1000.0, 100.0)
PLAIN = Fabric(2.0, 100.0, 0.5, 1e9)


def end_s(algorithm, ranks, blocks, fabric=PLAIN, load=LOAD, nodes=None, **options):
    schedule = build_schedule(algorithm, ranks, blocks, nodes=nodes)
    return play(schedule, load, fabric, nodes=nodes, **options)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_chain_of_one_block_takes_a_message_a_hop(ranks):
    found = end_s("chain", ranks, 1)
    assert found.end_s == pytest.approx((ranks - 1) * (0.5 + 2.0 + 10.0), rel=1e-6)
    assert found.entering_s == pytest.approx([i * 12.5 for i in range(ranks)], rel=1e-6)
    assert found.sent_inside_bytes == [1000.0] * (ranks - 1) + [0.0]


@pytest.mark.parametrize("ranks,blocks", [(2, 4), (5, 10)])
def test_a_chain_of_many_blocks_is_pipelined(ranks, blocks):
    block_s = 10.0 / blocks
    expected = (ranks - 1) * (0.5 + 2.0 + block_s) + (blocks - 1) * block_s
    assert end_s("chain", ranks, blocks).end_s == pytest.approx(expected, rel=1e-6)


def test_doubling_takes_a_message_a_round():
    # Rank 1 gets a state in the first round, and passes what leaves it to rank 3 in the second.
    found = end_s("doubling", 4, 1)
    assert found.end_s == pytest.approx(2 * (0.5 + 2.0 + 10.0), rel=1e-6)


def test_gather_takes_a_message_for_every_other_rank_or_one_collective():
    assert end_s("gather", 5, 1).end_s == pytest.approx(4 * 0.5 + 2.0 + 4 * 11.0, rel=1e-6)
    collective = replace(PLAIN, collective_gather=True)
    found = end_s("gather", 5, 1, collective)
    assert found.end_s == pytest.approx(0.5 + 3 * 2.0 + 4 * 11.0, rel=1e-6)


def test_ranks_of_a_node_share_its_port_or_have_one_each():
    slow = replace(PLAIN, between=Link(2.0, 1.0), overhead_s=0.0, latency_s=0.0)
    rails = end_s("two_level", 8, 4, slow, nodes=(4, 4))
    shared = end_s("two_level", 8, 4, replace(slow, shared_nic=True), nodes=(4, 4))
    # A quarter of a state takes 250 s; through one port the four of them take 1000 s.
    assert 252 < rails.end_s < 300
    assert 1002 < shared.end_s < 1050
    assert rails.sent_between_bytes == [250.0] * 4 + [0.0] * 4


def test_a_late_rank_delays_only_those_after_it():
    found = end_s("chain", 3, 1, start_s=[0.0, 100.0, 0.0])
    assert found.entering_s == pytest.approx([0.0, 100.0, 112.5], rel=1e-6)


def test_dense_maps_cost_their_matrix_products():
    load = Load(1000.0, 1000.0, apply_flop=7.0, compose_flop=1e3)
    fabric = replace(PLAIN, combine_flop_per_s=1.0)
    one = end_s("chain", 2, 1, fabric, load)
    assert one.end_s == pytest.approx(7.0 + 12.5 + 7.0, rel=1e-5)


def test_a_schedule_that_hangs_is_refused():
    schedule = build_schedule("chain", 2)
    schedule = replace(schedule, programs=((), schedule.programs[1]))
    with pytest.raises(ScheduleError, match="rank 1 waits for ever at step 0"):
        play(schedule, LOAD, PLAIN)


FABRICS = [
    LOOPBACK,
    NVLINK_BY_NCCL,
    replace(LOOPBACK, between=Link(1e-3, 1e8)),
    replace(LOOPBACK, between=Link(1e-5, 1e8), shared_nic=True),
    replace(NVLINK_BY_NCCL, between=Link(1e-5, 2.5e10)),
]
CLUSTERS = [(2,), (3,), (8,), (16,), (4, 4), (4, 4, 4, 4), (2, 5, 1), (1, 1, 1), (1, 6)]


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_bounds_are_below_what_the_engine_finds_and_the_choice_is_the_fastest(kind, fabric):
    load = load_of(SHAPE, kind, 4)
    for nodes in CLUSTERS:
        ranks = sum(nodes)
        ranked = explain_plan(ranks, SHAPE, kind, 4, nodes=nodes, fabric=fabric)
        assert [s for _, s in ranked] == sorted(s for _, s in ranked)
        for plan, seconds in ranked:
            known = check_nodes(plan.nodes, ranks)
            bound = at_least_s(plan.algorithm, plan.num_blocks, known, load, fabric)
            assert bound <= seconds * (1 + 1e-9), plan
        chosen = choose_plan(ranks, SHAPE, kind, 4, nodes=nodes, fabric=fabric)
        assert predict_s(chosen, ranks, load, fabric) == ranked[0][1]


@pytest.mark.parametrize("seed", range(12))
def test_bounds_hold_on_fabrics_of_any_proportions(seed):
    draw = random.Random(seed)

    def magnitude(low, high):
        return 10 ** draw.uniform(low, high)

    link = [Link(magnitude(-7, -1), magnitude(7, 11)) for _ in range(2)]
    fabric = Fabric(
        link[0].latency_s,
        link[0].bandwidth_bytes_per_s,
        magnitude(-7, -2),
        magnitude(9, 12),
        combine_flop_per_s=magnitude(9, 13),
        combine_overhead_s=magnitude(-7, -3),
        between=draw.choice([None, link[1]]),
        shared_nic=draw.random() < 0.5,
        grouped_calls=draw.random() < 0.5,
        blocking_sends=draw.random() < 0.5,
        collective_gather=draw.random() < 0.5,
        burst_bytes=draw.choice([0.0, 72e3]),
        start_s=draw.choice([0.0, 1e-3]),
        receive_overhead_s=draw.choice([0.0, magnitude(-6, -3)]),
        processors=draw.choice([None, 2, 5]),
    )
    for nodes in draw.sample(CLUSTERS, 3):
        ranks, kind = sum(nodes), draw.choice(["diagonal", "dense"])
        load = load_of(SHAPE, kind, 4)
        ranked = explain_plan(ranks, SHAPE, kind, 4, nodes=nodes, fabric=fabric)
        for plan, seconds in ranked:
            known = check_nodes(plan.nodes, ranks)
            bound = at_least_s(plan.algorithm, plan.num_blocks, known, load, fabric)
            assert bound <= seconds * (1 + 1e-9), plan
        chosen = choose_plan(ranks, SHAPE, kind, 4, nodes=nodes, fabric=fabric)
        assert predict_s(chosen, ranks, load, fabric) == ranked[0][1]


def test_ranks_that_share_processors_wait_for_a_free_one():
    fabric = replace(PLAIN, overhead_s=3.0, receive_overhead_s=1.0, latency_s=0.0)
    alone = end_s("chain", 4, 1, fabric, Load(1.0, 0.0)).end_s
    assert alone == pytest.approx(3 * (3.0 + 0.01 + 1.0), rel=1e-6)
    # One message at a time keeps one processor busy: to share it costs nothing.
    shared = replace(fabric, processors=1)
    assert end_s("chain", 4, 1, shared, Load(1.0, 0.0)).end_s == pytest.approx(alone, rel=1e-6)
    # But all 3 x 100 blocks take their 4 s from the one processor.
    many = end_s("chain", 4, 100, shared, Load(100.0, 0.0)).end_s
    assert 1200 <= many < 1210
    assert end_s("chain", 4, 100, fabric, Load(100.0, 0.0)).end_s < 320


def test_a_rested_link_passes_a_burst_at_once():
    bursting = replace(PLAIN, burst_bytes=400.0, latency_s=0.0)
    # Of 1000 bytes the bucket holds 400; the other 600 take 6 s.
    assert end_s("chain", 2, 1, bursting).end_s == pytest.approx(0.5 + 6.0, rel=1e-6)
    # Blocks of 250 bytes have but one bucket, and fill it up meanwhile.
    in_blocks = end_s("chain", 2, 4, replace(bursting, overhead_s=0.0)).end_s
    assert in_blocks == pytest.approx(6.0, rel=1e-6)


def test_a_start_keeps_every_rank_busy():
    late = replace(PLAIN, start_s=7.0)
    assert end_s("chain", 3, 1, late).end_s == pytest.approx(7.0 + 25.0, rel=1e-6)
    # Three starts on two processors: the third waits.
    crowded = end_s("gather", 3, 1, replace(late, processors=2, overhead_s=0.0))
    assert crowded.end_s >= 14.0


def test_transfers_of_an_exchange_with_one_peer_are_one_message():
    # Two ranks own 8 blocks each: each gives the other its part of those, and the second gets its
    # entering state's other half.
    found = end_s("two_level", 2, 16, PLAIN, keep_spans=True)
    sent = sorted((s.rank, s.num_bytes) for s in found.spans if s.name == "send")
    assert sent == [(0, 500.0), (0, 500.0), (1, 550.0)]


def test_every_scan_plays_on_any_nodes():
    generator = random.Random(0)
    for algorithm in BUILDERS:
        for _ in range(5):
            nodes = tuple(generator.randint(1, 4) for _ in range(generator.randint(1, 4)))
            blocks = 1 if algorithm == "serial" else generator.randint(1, 6)
            fabric = generator.choice(FABRICS)
            found = end_s(algorithm, sum(nodes), blocks, fabric, LOAD, nodes, keep_spans=True)
            assert max(found.entering_s) <= found.end_s
            sent = sum(found.sent_inside_bytes) + sum(found.sent_between_bytes)
            if algorithm != "gather":
                spans = sum(s.num_bytes for s in found.spans)
                assert sent == pytest.approx(spans)


def test_fewer_hops_win_where_latency_rules_and_the_chain_where_bandwidth_does():
    far = replace(LOOPBACK, latency_s=20e-3)
    assert choose_plan(16, SHAPE, "dense", 4, fabric=far).algorithm in ("doubling", "two_level")
    narrow = replace(LOOPBACK, bandwidth_bytes_per_s=25e6)
    assert choose_plan(16, SHAPE, "diagonal", 4, fabric=narrow).algorithm == "chain"


def test_slow_links_between_nodes_call_for_two_levels():
    slow = replace(LOOPBACK, between=Link(2e-3, 2.5e7))
    plan = choose_plan(16, SHAPE, "diagonal", 4, nodes=(4, 4, 4, 4), fabric=slow)
    assert plan.algorithm.startswith("two_level")
    load = load_of(SHAPE, "diagonal", 4)
    chain = choose_plan(16, SHAPE, "diagonal", 4, algorithm="chain", nodes=(4,) * 4, fabric=slow)
    assert predict_s(chain, 16, load, slow) > 1.8 * predict_s(plan, 16, load, slow)


def test_what_the_caller_gives_is_kept():
    assert choose_plan(4, SHAPE, "dense", 4, algorithm="chain", num_blocks=3) == Plan("chain", 3)
    assert choose_plan(4, SHAPE, "dense", 4, algorithm="gather") == Plan("gather", 1)
    assert choose_plan(4, SHAPE, "dense", 4, num_blocks=3).num_blocks == 3
    assert choose_plan(1, SHAPE, "dense", 4, algorithm="two_level") == Plan("two_level", 1)
    nodes = (2, 2)
    assert choose_plan(4, SHAPE, "dense", 4, algorithm="two_level", nodes=nodes).nodes == nodes


@pytest.mark.parametrize(
    "options,message",
    [
        ({"algorithm": "chian"}, "did you mean 'chain'"),
        ({"nodes": (1, 2)}, "sum to 3"),
        ({"kind": "diagnal"}, "did you mean 'diagonal'"),
    ],
)
def test_bad_arguments_are_named(options, message):
    kind = options.pop("kind", "dense")
    with pytest.raises(ArgumentError, match=message):
        choose_plan(4, SHAPE, kind, 4, **options)


def test_the_chain_inside_kernels_is_weighed_where_it_can_run():
    shape = (1, 32, 128, 128)
    costs = DeviceChain(start_s=1e-6, hop_s=2e-6, bytes_per_s=1e11, flop_per_s=1e12)
    fabric = replace(NVLINK_BY_NCCL, device_chain=costs)
    for kind, flop in (("diagonal", 0), ("dense", 2 * 32 * 128**3)):
        ranked = explain_plan(8, shape, kind, 4, fabric=fabric, on_device=True)
        prices = {plan: seconds for plan, seconds in ranked if plan.algorithm == "device_chain"}
        expected = 1e-6 + 7 * 2e-6 + 2**21 / 1e11 + flop / 1e12
        assert prices == {Plan("device_chain", 0): pytest.approx(expected)}
        assert choose_plan(8, shape, kind, 4, fabric=fabric, on_device=True) == ranked[0][0]
        assert ranked[0][0].algorithm == "device_chain"
    usual = choose_plan(8, shape, "diagonal", 4, fabric=fabric)
    assert usual.algorithm in BUILDERS
    slow = replace(fabric, device_chain=replace(costs, bytes_per_s=1e8))
    assert choose_plan(8, shape, "diagonal", 4, fabric=slow, on_device=True) == usual
    asked = choose_plan(8, shape, "diagonal", 4, num_blocks=4, fabric=fabric, on_device=True)
    assert (asked.algorithm in BUILDERS, asked.num_blocks) == (True, 4)


@pytest.mark.parametrize("ranks,nodes,limit_s", [(16, (4,) * 4, 0.05), (256, (8,) * 32, 1.0)])
@pytest.mark.parametrize("fabric", [LOOPBACK, NVLINK_BY_NCCL])
def test_the_choice_is_quick(fabric, ranks, nodes, limit_s):
    choose_plan.cache_clear()
    start = time.thread_time()
    choose_plan(ranks, SHAPE, "diagonal", 4, nodes=nodes, fabric=fabric)
    assert time.thread_time() - start < limit_s
