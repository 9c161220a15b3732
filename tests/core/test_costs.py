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


@pytest.mark.parametrize("ranks,nodes,limit_s", [(16, (4,) * 4, 0.05), (256, (8,) * 32, 1.0)])
@pytest.mark.parametrize("fabric", [LOOPBACK, NVLINK_BY_NCCL])
def test_the_choice_is_quick(fabric, ranks, nodes, limit_s):
    choose_plan.cache_clear()
    start = time.thread_time()
    choose_plan(ranks, SHAPE, "diagonal", 4, nodes=nodes, fabric=fabric)
    assert time.thread_time() - start < limit_s
