"""All-Scan against one sequential loop: results, gradients, traffic, for every kind and direction."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zeco
from zeco.collectives import all_scan as all_scan_module
from zeco.collectives.groups import transport_of
from zeco.collectives.scan import start_scan
from zeco.core.maps import AffineMap
from zeco.core.transitions import Dense, Diagonal, Identity, Scalar, Transition
from zeco.testing import run_processes, run_ranks

B, H, K, V = 2, 3, 5, 4
KINDS = ["identity", "scalar", "diagonal", "dense"]
ALGORITHMS = [
    ("chain", 1),
    ("chain", 4),
    ("chain", 1000),
    ("serial", None),
    ("gather", None),
    ("doubling", None),
    ("doubling", 3),
    ("two_level", None),
    ("two_level", 3),
    ("two_level_doubling", None),
]


def make_transition(kind: str, parameter: Tensor | None) -> Transition:
    if kind == "identity":
        return Identity()
    assert parameter is not None
    return {"scalar": Scalar, "diagonal": Diagonal, "dense": Dense}[kind](parameter)


def make_case(kind: str, ranks: int, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = {"scalar": (B, H), "diagonal": (B, H, K), "dense": (B, H, K, K)}.get(kind, (0,))
    parameters = torch.randn(ranks, *shape, generator=g, dtype=torch.float64)
    return {
        "update": torch.randn(ranks, B, H, K, V, generator=g, dtype=torch.float64),
        "parameter": parameters * 0.4 if kind == "dense" else -parameters.abs(),
        "initial": torch.randn(B, H, K, V, generator=g, dtype=torch.float64),
        "d_entering": torch.randn(ranks, B, H, K, V, generator=g, dtype=torch.float64),
        "d_leaving": torch.randn(ranks, B, H, K, V, generator=g, dtype=torch.float64),
    }


def reference(kind: str, case: dict[str, Tensor], reverse: bool) -> dict[str, Tensor]:
    """The loop that All-Scan replaces, differentiated by plain autograd."""
    leaves = {n: case[n].clone().requires_grad_() for n in ("update", "parameter", "initial")}
    ranks = len(leaves["update"])
    state, entering, leaving = leaves["initial"], {}, {}
    for rank in reversed(range(ranks)) if reverse else range(ranks):
        entering[rank] = state
        state = make_transition(kind, leaves["parameter"][rank])(state) + leaves["update"][rank]
        leaving[rank] = state
    found = {
        "entering": torch.stack([entering[r] for r in range(ranks)]),
        "leaving": torch.stack([leaving[r] for r in range(ranks)]),
    }
    loss = (found["entering"] * case["d_entering"]).sum()
    loss = loss + (found["leaving"] * case["d_leaving"]).sum()
    loss.backward()
    found |= {n: x.grad for n, x in leaves.items() if x.grad is not None}
    return found


def on_rank(group, kind, case, reverse, algorithm, num_blocks, overlapped=False):
    rank = transport_of(group).rank
    size = len(case["update"])
    first = size - 1 if reverse else 0
    update = case["update"][rank].clone().requires_grad_()
    parameter = case["parameter"][rank].clone().requires_grad_()
    initial = case["initial"].clone().requires_grad_() if rank == first else None
    options = {"reverse": reverse, "algorithm": algorithm, "num_blocks": num_blocks}
    transition = make_transition(kind, parameter)
    if overlapped:
        handle = zeco.all_scan_start(update, transition, group=group, initial=initial, **options)
        entering, leaving = handle.wait()
    else:
        entering, leaving = zeco.all_scan(
            update, transition, group=group, initial=initial, **options
        )
    loss = (entering * case["d_entering"][rank]).sum() + (leaving * case["d_leaving"][rank]).sum()
    loss.backward()
    return {
        "entering": entering.detach(),
        "leaving": leaving.detach(),
        "update": update.grad,
        "parameter": parameter.grad,
        "initial": None if initial is None else initial.grad,
    }


def compare(found: list[dict[str, Tensor | None]], expected: dict[str, Tensor], first: int) -> None:
    for rank, results in enumerate(found):
        for name, value in results.items():
            if value is None:
                continue
            wanted = expected[name] if name == "initial" else expected[name][rank]
            torch.testing.assert_close(value, wanted, rtol=1e-11, atol=1e-11, msg=f"{rank} {name}")
    assert found[first]["initial"] is not None


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("algorithm,num_blocks", ALGORITHMS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_loop(kind, algorithm, num_blocks, reverse, ranks):
    case = make_case(kind, ranks)
    found = run_ranks(ranks, lambda g: on_rank(g, kind, case, reverse, algorithm, num_blocks))
    compare(found, reference(kind, case, reverse), ranks - 1 if reverse else 0)


@pytest.mark.parametrize("nodes", [(2, 3), (1, 3, 2), (2, 2, 2), (1, 1, 1, 1, 1)])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("algorithm", ["two_level", "two_level_doubling"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_levels_equal_the_loop_on_any_nodes(kind, algorithm, reverse, nodes):
    ranks = sum(nodes)
    case = make_case(kind, ranks)

    def rank_function(group):
        group.nodes = nodes
        return on_rank(group, kind, case, reverse, algorithm, None, overlapped=True)

    found = run_ranks(ranks, rank_function)
    compare(found, reference(kind, case, reverse), ranks - 1 if reverse else 0)


def test_nodes_that_do_not_hold_the_ranks_are_refused():
    def rank_function(group):
        group.nodes = (2, 2)
        zeco.all_scan(torch.zeros(1, 1, 2, 2), group=group, algorithm="two_level")

    with pytest.raises(zeco.ZecoError, match=r"nodes=\(2, 2\) sum to 4, but the group has 3"):
        run_ranks(3, rank_function)


def test_start_and_wait_with_other_scans_in_between():
    case = make_case("diagonal", 4)

    def rank_function(group):
        def start(u):
            return zeco.all_scan_start(u, Diagonal(case["parameter"][group.rank]), group=group)

        updates = [(i + 1) * case["update"][group.rank].clone().requires_grad_() for i in range(3)]
        handles = [start(u) for u in updates]
        waited = [handles[i].wait()[0] for i in (2, 0, 1)]
        (waited[0] + waited[1] + waited[2]).sum().backward()
        return waited

    for a, b, c in run_ranks(4, rank_function):
        torch.testing.assert_close(a, 3 * b)
        torch.testing.assert_close(c, 2 * b)


def test_wait_twice_is_refused():
    handle = zeco.all_scan_start(torch.zeros(1, 1, 2, 2))
    handle.wait()
    with pytest.raises(zeco.ZecoError, match="twice"):
        handle.wait()


def ledger_of(ranks: int, algorithm: str, num_blocks: int | None):
    case = make_case("diagonal", ranks)

    def rank_function(group):
        on_rank(group, "diagonal", case, False, algorithm, num_blocks)
        return group.ledger

    return run_ranks(ranks, rank_function)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_the_chain_sends_one_state_a_rank_whatever_the_number_of_ranks(ranks):
    state = B * H * K * V * 8
    for rank, ledger in enumerate(ledger_of(ranks, "chain", 4)):
        assert ledger.sent["forward"].bytes == (state if rank < ranks - 1 else 0)
        assert ledger.sent["backward"].bytes == (state if rank > 0 else 0)
        assert ledger.sent["forward"].messages == (4 if rank < ranks - 1 else 0)


def test_gather_sends_a_map_to_every_other_rank():
    state, parameters = B * H * K * V * 8, B * H * K * 8
    for ledger in ledger_of(5, "gather", None):
        assert ledger.sent["forward"].bytes == 4 * (state + parameters)


def process_function(reverse, algorithm, kind):
    size = torch.distributed.get_world_size()
    case = make_case(kind, size)
    return on_rank(torch.distributed.group.WORLD, kind, case, reverse, algorithm, None, True)


@pytest.mark.parametrize(
    "kind,algorithm",
    [
        ("dense", "chain"),
        ("diagonal", "gather"),
        ("dense", "doubling"),
        ("dense", "two_level"),
    ],
)
def test_over_processes(kind, algorithm):
    case = make_case(kind, 3)
    found = run_processes(3, process_function, True, algorithm, kind)
    compare(found, reference(kind, case, True), 2)


def subgroup_function():
    ranks = [3, 1]
    group = torch.distributed.new_group([1, 3])
    me = torch.distributed.get_rank()
    if me not in ranks:
        try:
            zeco.all_scan(torch.zeros(1, 1, 2, 2), group=group)
        except zeco.ZecoError as error:
            return str(error)
        return None
    entering, _ = zeco.all_scan(torch.full((1, 1, 2, 2), float(me)), group=group)
    return float(entering[0, 0, 0, 0])


def test_peers_are_group_ranks_and_outsiders_are_told():
    outsider, first, other, second = run_processes(4, subgroup_function)
    assert (first, second) == (0.0, 1.0)
    assert "isn't in the given group" in outsider
    assert "isn't in the given group" in other


def failing_function():
    shape = (1, 1, 2) if torch.distributed.get_rank() == 1 else (1, 1, 2, 2)
    update = torch.zeros(shape)
    try:
        zeco.all_scan(update, num_blocks=1)
    except zeco.ZecoError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.timeout(60)
def test_a_rank_that_raises_makes_the_others_raise_its_error():
    first, second, third = run_processes(3, failing_function)
    assert "update has 3 dims" in second
    assert "rank 1 raised ArgumentError" in third
    assert "rank 1 raised ArgumentError" in first


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"update": torch.zeros(1, 2, 2)}, "update has 3 dims"),
        ({"transition": Scalar(torch.zeros(1, 3))}, "log_decay has H=3"),
        ({"transition": Diagonal(torch.zeros(1, 2, 9))}, "log_decay has K=9"),
        ({"transition": Dense(torch.zeros(1, 2, 4, 3))}, "K=3"),
        ({"algorithm": "chian"}, "did you mean 'chain'"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"update": torch.zeros(1, 2, 4, 4, dtype=torch.bfloat16)}, "states are fp32 or fp64"),
        ({"initial": torch.zeros(1, 2, 4, 4, dtype=torch.float64)}, "initial has dtype"),
        ({"initial": torch.zeros(2, 2, 4, 4)}, "B=2"),
        ({"group": "everyone"}, "must be a ProcessGroup"),
        ({"transition": Scalar(torch.zeros(1, 2, dtype=torch.float64))}, "dtype"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(zeco.ZecoError, match=message):
        zeco.all_scan(**{"update": torch.zeros(1, 2, 4, 4), **arguments})


@pytest.mark.parametrize("algorithm", ["chain", "gather", "doubling"])
@pytest.mark.parametrize("reverse", [False, True])
def test_only_ranks_that_ask_get_the_leaving_state(reverse, algorithm):
    case = make_case("diagonal", 3)
    expected = reference("diagonal", case, reverse)
    last = 0 if reverse else 2

    def rank_function(group):
        rank = group.rank
        own = AffineMap(case["update"][rank], Diagonal(case["parameter"][rank]))
        scan = start_scan(
            group,
            own,
            case["initial"],
            reverse=reverse,
            algorithm=algorithm,
            output_leaving=rank == last,
        )
        if rank != last:
            with pytest.raises(zeco.ZecoError, match="output_leaving=True"):
                scan.wait_for_both()
        return scan.wait()

    for rank, (entering, leaving) in enumerate(run_ranks(3, rank_function)):
        torch.testing.assert_close(entering, expected["entering"][rank].detach())
        assert (leaving is None) == (rank != last)
        if leaving is not None:
            torch.testing.assert_close(leaving, expected["leaving"][rank].detach())


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_adjoint_asks_for_what_leaves_only_where_it_is_a_gradient(
    reverse, differentiable, monkeypatch
):
    """All ranks get the public scan's leaving state, the first one alone the gradient of ``initial``."""
    case, first = make_case("scalar", 3), 2 if reverse else 0
    asked = {rank: [] for rank in range(3)}

    def noted(transport, *args, **options):
        asked[transport.rank].append(options.get("output_leaving", True))
        return start_scan(transport, *args, **options)

    monkeypatch.setattr(all_scan_module, "start_scan", noted)

    def rank_function(group):
        update = case["update"][group.rank].clone().requires_grad_()
        initial = case["initial"].clone().requires_grad_(differentiable)
        states = zeco.all_scan(update, group=group, initial=initial, reverse=reverse)
        torch.stack(states).sum().backward()
        return initial.grad is not None

    given = run_ranks(3, rank_function)
    assert given == [differentiable and rank == first for rank in range(3)]
    assert asked == {rank: [True, given[rank]] for rank in range(3)}


def test_recomputation_does_not_scan_again():
    case = make_case("diagonal", 3)

    def gradient(group, checkpointed):
        update = case["update"][group.rank].clone().requires_grad_()
        transition = Diagonal(case["parameter"][group.rank])

        def region(update):
            entering, leaving = zeco.all_scan(update.sin(), transition, group=group)
            return (entering * leaving).cos()

        loss = zeco.checkpoint(region, update) if checkpointed else region(update)
        loss.sum().backward()
        return update.grad, dict(group.ledger.scans)

    for (a, scans), (b, _) in zip(
        run_ranks(3, lambda g: gradient(g, True)),
        run_ranks(3, lambda g: gradient(g, False)),
        strict=True,
    ):
        assert torch.equal(a, b)
        assert scans == {"forward": 1, "backward": 1}
