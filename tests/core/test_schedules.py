"""Every scan over every number of ranks is complete and free of deadlock; faults are refused."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from zeco.core.checker import check_schedule
from zeco.core.errors import ArgumentError, ScheduleError
from zeco.core.schedule import (
    BUILDERS,
    ENTERING,
    LEAVING,
    AllGather,
    Combine,
    Exchange,
    Form,
    Receive,
    Schedule,
    Send,
    Step,
    build_schedule,
)
from zeco.core.topology import node_of_ranks

TWO_LEVEL = ["two_level", "two_level_doubling"]
FLAT = [name for name in BUILDERS if name not in TWO_LEVEL]
MAX_RANKS, MAX_NODES = 64, 8


def blocks_of(algorithm: str) -> list[int]:
    return {"serial": [1], "gather": [1, 2], "doubling": [1, 3]}.get(algorithm, [1, 2, 7])


def flat_cases():
    for algorithm in FLAT:
        for ranks in range(1, MAX_RANKS + 1):
            for blocks in blocks_of(algorithm):
                for reverse in (False, True):
                    yield algorithm, ranks, blocks, reverse, None


def ragged(ranks: int, num_nodes: int, generator: random.Random) -> tuple[int, ...]:
    cuts = sorted(generator.sample(range(1, ranks), num_nodes - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, ranks], strict=True))


def two_level_cases():
    generator = random.Random(0)
    for algorithm in TWO_LEVEL:
        for ranks in range(1, MAX_RANKS + 1):
            for num_nodes in range(1, min(ranks, MAX_NODES) + 1):
                size, more = divmod(ranks, num_nodes)
                even = tuple(size + (node < more) for node in range(num_nodes))
                for nodes in {even, ragged(ranks, num_nodes, generator)}:
                    for blocks in {min(max(nodes), 8), generator.choice([1, 2, 5, 11])}:
                        yield algorithm, ranks, blocks, bool(generator.getrandbits(1)), nodes


def check(case) -> None:
    algorithm, ranks, blocks, reverse, nodes = case
    check_schedule(build_schedule(algorithm, ranks, blocks, reverse=reverse, nodes=nodes))


@pytest.mark.long
@pytest.mark.parametrize("cases", [flat_cases, two_level_cases])
def test_the_whole_matrix(cases):
    for case in cases():
        check(case)


@pytest.mark.parametrize("cases", [flat_cases, two_level_cases])
def test_a_sample_of_the_matrix(cases):
    for case in random.Random(1).sample(list(cases()), 60):
        check(case)


@pytest.mark.parametrize("reverse", [False, True])
def test_all_small_two_level_clusters(reverse):
    for nodes in [(1,), (2,), (1, 1), (1, 2), (2, 1), (3, 1, 2), (1, 1, 1, 1, 1), (2, 2, 2)]:
        for algorithm in TWO_LEVEL:
            for blocks in (1, 2, 5):
                check((algorithm, sum(nodes), blocks, reverse, nodes))


def transfers(schedule: Schedule, rank: int) -> list[Send | Receive]:
    found: list[Send | Receive] = []
    for step in schedule.programs[rank]:
        if isinstance(step, Exchange):
            found += step.transfers
        elif isinstance(step, Send | Receive):
            found.append(step)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 13, 16, 33, 64])
def test_doubling_takes_logarithmically_many_rounds_and_sends_states_where_it_can(ranks):
    schedule = build_schedule("doubling", ranks)
    rounds = math.ceil(math.log2(ranks))
    for rank, program in enumerate(schedule.programs):
        assert sum(isinstance(s, Exchange) for s in program) <= rounds
        for number, sent in enumerate(t for t in transfers(schedule, rank) if isinstance(t, Send)):
            # Before round k a rank's prefix covers 2**k ranks: the first 2**k ranks have states.
            assert sent.form is (Form.STATE if rank < 2**number else Form.MAP)


@pytest.mark.parametrize("nodes", [(4, 4, 4), (8, 8), (3, 5, 4), (1, 4, 2)])
def test_two_level_sends_states_between_nodes_evenly_cut_over_their_ranks(nodes):
    blocks = math.lcm(*nodes)
    schedule = build_schedule("two_level", sum(nodes), blocks, nodes=nodes)
    node_of = node_of_ranks(nodes)
    for rank in range(sum(nodes)):
        outside = [
            t
            for t in transfers(schedule, rank)
            if isinstance(t, Send) and node_of[t.peer] != node_of[rank]
        ]
        assert all(t.form is Form.STATE for t in outside)
        last = node_of[rank] == len(nodes) - 1
        assert len(outside) == (0 if last else blocks // nodes[node_of[rank]])


def edited(schedule: Schedule, rank: int, steps: list[Step]) -> Schedule:
    programs = list(schedule.programs)
    programs[rank] = tuple(steps)
    return replace(schedule, programs=tuple(programs))


def without(schedule: Schedule, rank: int, number: int) -> Schedule:
    steps = list(schedule.programs[rank])
    del steps[number]
    return edited(schedule, rank, steps)


def test_a_planted_deadlock_is_refused_and_its_steps_named():
    schedule = build_schedule("doubling", 2)
    for rank in (0, 1):
        other = 1 - rank
        steps: list[Step] = [
            Receive(other, 0, "x", Form.MAP),
            Send(other, 0, "own", Form.MAP),
        ]
        schedule = edited(schedule, rank, steps)
    with pytest.raises(ScheduleError, match=r"deadlock.*rank 0, step 0 \(Receive.*rank 1, step 0"):
        check_schedule(schedule)


def test_a_send_that_nobody_awaits_is_refused_and_named():
    schedule = build_schedule("chain", 3, 2)
    schedule = edited(schedule, 2, list(schedule.programs[2][:2]))
    with pytest.raises(ScheduleError, match=r"deadlock.*rank 1, step 5 \(Send\(peer=2, block=1"):
        check_schedule(schedule)


def test_a_lost_block_is_refused_and_its_step_named():
    # Neither sent nor received: the second rank's second block never comes.
    schedule = build_schedule("chain", 2, 2)
    schedule = without(without(schedule, 0, 3), 1, 2)
    message = r"rank 1, step 2 \(Combine\(block=1.*reads 'entering', block 1, before anything"
    with pytest.raises(ScheduleError, match=message):
        check_schedule(schedule)


def test_a_block_that_is_not_composed_is_refused_and_the_end_named():
    schedule = without(build_schedule("chain", 2, 2), 1, 3)
    with pytest.raises(
        ScheduleError, match=r"rank 1, at its end, after step 2.*'leaving', block 1"
    ):
        check_schedule(schedule)


def test_a_wrong_order_is_refused_and_its_step_named():
    schedule = build_schedule("doubling", 4)
    steps = list(schedule.programs[3])
    number = next(i for i, s in enumerate(steps) if isinstance(s, Combine) and s.target == ENTERING)
    step = steps[number]
    assert isinstance(step, Combine)
    steps[number] = replace(step, later=step.earlier, earlier=step.later)
    with pytest.raises(ScheduleError, match=rf"rank 3, step {number} .*aren't neighbours"):
        check_schedule(edited(schedule, 3, steps))


def test_a_map_sent_as_a_state_is_refused_and_its_step_named():
    schedule = build_schedule("doubling", 3)
    steps = list(schedule.programs[1])
    exchange = steps[0]
    assert isinstance(exchange, Exchange)
    wrong = tuple(
        replace(t, form=Form.STATE) if isinstance(t, Send) else t for t in exchange.transfers
    )
    steps[0] = Exchange(wrong)
    with pytest.raises(ScheduleError, match=r"rank 1, step 0 .*sends a map as a state to rank 2"):
        check_schedule(edited(schedule, 1, steps))


def test_ranks_that_gather_different_blocks_are_refused():
    schedule = build_schedule("gather", 2, 2)
    steps = [replace(s, block=1) if isinstance(s, AllGather) else s for s in schedule.programs[1]]
    with pytest.raises(ScheduleError, match="different blocks"):
        check_schedule(edited(schedule, 1, steps))


def test_transfers_that_cannot_be_told_apart_are_refused():
    schedule = build_schedule("chain", 2)
    twice = Exchange((Send(1, 0, LEAVING, Form.STATE), Send(1, 0, LEAVING, Form.STATE)))
    steps = [*schedule.programs[0][:1], twice]
    with pytest.raises(ScheduleError, match=r"rank 0, step 1 .*two transfers of block 0"):
        check_schedule(edited(schedule, 0, steps))


@pytest.mark.parametrize("peer", [0, 5])
def test_an_impossible_peer_is_refused(peer):
    schedule = build_schedule("chain", 2)
    steps = [*schedule.programs[0][:1], Send(peer, 0, LEAVING, Form.STATE)]
    with pytest.raises(ScheduleError, match=f"rank 0, step 1 .*names rank {peer}"):
        check_schedule(edited(schedule, 0, steps))


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"algorithm": "two_levels", "num_ranks": 2}, "did you mean 'two_level'"),
        ({"algorithm": "chain", "num_ranks": 0}, "num_ranks=0"),
        ({"algorithm": "serial", "num_ranks": 2, "num_blocks": 2}, "'serial' has one block"),
        ({"algorithm": "two_level", "num_ranks": 4, "nodes": (2, 3)}, "sum to 5.*4 ranks"),
        ({"algorithm": "two_level", "num_ranks": 4, "nodes": (4, 0)}, "at least 1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        build_schedule(**arguments)
