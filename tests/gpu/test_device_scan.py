"""All-Scan inside kernels, P virtual ranks on one GPU (and two GPUs, where there are two)."""

from __future__ import annotations

import functools
import os
import random
import threading

import pytest
import torch

import zeco
from zeco.collectives.groups import transport_of
from zeco.core.errors import RankFailedError
from zeco.core.maps import AffineMap
from zeco.core.transitions import Dense, Diagonal, Identity, Reset, Scalar
from zeco.testing import run_processes, run_ranks

# Read when CUDA starts; ranks that share a GPU need streams that don't wait for each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KINDS = ("identity", "scalar", "diagonal", "dense")
SHAPE = (1, 3, 40, 56)
LARGE = (1, 12, 128, 128)
"""Thread blocks take several blocks of it: for 16 ranks, elementwise, of two words a thread."""


def make_parameters(kind, *batch, shape=SHAPE, dtype=torch.float32):
    """Return parameters [*batch, ...] of transitions, None for identity."""
    B, H, K, _ = shape
    like = {"device": "cuda", "dtype": dtype}
    match kind:
        case "identity":
            return None
        case "scalar":
            return -torch.rand(*batch, B, H, **like)
        case "diagonal":
            return -torch.rand(*batch, B, H, K, **like)
        case _:
            return torch.randn(*batch, B, H, K, K, **like) / K**0.5


def transition_of(kind, parameter):
    classes = {"scalar": Scalar, "diagonal": Diagonal, "dense": Dense}
    return Identity() if kind == "identity" else classes[kind](parameter)


def open_rings(size, *, timeout_s=5.0):
    from zeco.collectives.local_rings import LocalRings

    rings = LocalRings(size, timeout_s=timeout_s)
    device = torch.device("cuda", torch.cuda.current_device())
    return [rings.ring(rank, device) for rank in range(size)]


def warm_up(streams, shape=SHAPE):
    """Load what the tests queue between scans, and fill each stream's pool of memory.

    Loading a kernel, or asking CUDA for memory, may wait for all kernels that run: on one GPU also for
    scans that wait for a rank that is just doing that.
    """
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1)
            kept = [torch.empty(shape, device="cuda") for _ in range(600)]
            kept += [torch.empty(2**20, device="cuda") for _ in range(16)]
    torch.cuda.synchronize()
    del kept


def nothing_failed():
    """Stand in for the transport's own look."""


def fold(kind, updates, parameters, resets, initial, *, reverse):
    """Return entering and leaving [n, P, ...] in fp64 of n scans at once."""
    n, ranks = updates.shape[:2]
    state = initial.double()
    entering, leaving = torch.empty_like(updates).double(), torch.empty_like(updates).double()
    for rank in reversed(range(ranks)) if reverse else range(ranks):
        entering[:, rank] = state
        moved = state
        if kind != "identity":
            own = parameters[:, rank].double()
            moved = own @ state if kind == "dense" else own.exp()[(...,) + (None,) * (
                state.ndim - own.ndim)] * state  # fmt: skip
        keep = ~resets[:, rank].reshape(n, 1, 1, 1, 1)
        state = torch.where(keep, moved, 0.0) + updates[:, rank].double()
        leaving[:, rank] = state
    return entering, leaving


def relative(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "kind,ranks,shape",
    [(kind, ranks, SHAPE) for kind in KINDS for ranks in (2, 4, 8, 16)]
    + [(kind, ranks, LARGE) for kind in ("diagonal", "dense") for ranks in (8, 16)],
    ids=str,
)
def test_a_thousand_scans_with_delays(kind, ranks, shape):
    """Directions, resets, delays and the order of launches are random; nothing is synchronised."""
    choose = random.Random(0)
    rings = open_rings(ranks)
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    warm_up(streams, shape)
    for _ in range(10):
        n = 100
        ways = torch.tensor([choose.random() < 0.5 for _ in range(n)])
        resets = torch.rand(n, ranks) < 0.1
        updates = torch.randn(n, ranks, *shape, device="cuda")
        parameters = make_parameters(kind, n, ranks, shape=shape)
        initial = torch.randn(n, *shape, device="cuda")
        torch.cuda.synchronize()
        found = [[None] * ranks for _ in range(n)]
        for scan in range(n):
            for rank in choose.sample(range(ranks), ranks):
                transition = Reset(kind) if resets[scan, rank] else transition_of(
                    kind, None if parameters is None else parameters[scan, rank]
                )  # fmt: skip
                with torch.cuda.stream(streams[rank]):
                    if choose.random() < 0.05:
                        torch.cuda._sleep(choose.randrange(1, 200_000))
                    found[scan][rank] = rings[rank].scan(
                        AffineMap(updates[scan, rank], transition), initial[scan],
                        reverse=bool(ways[scan]), check=nothing_failed,
                    )  # fmt: skip
        results = []
        for scan in range(n):
            for rank in range(ranks):
                with torch.cuda.stream(streams[rank]):
                    results.append(found[scan][rank].wait())
        torch.cuda.synchronize()
        assert [ring.find_failure() for ring in rings] == [None] * ranks
        for place in (0, 1):
            states = torch.stack([r[place] for r in results]).view(n, ranks, *shape)
            for reverse in (False, True):
                chosen = ways == reverse
                on_gpu = chosen.cuda()
                expected = fold(
                    kind, updates[on_gpu], None if parameters is None else parameters[on_gpu],
                    resets[chosen].cuda(), initial[on_gpu], reverse=reverse,
                )[place]  # fmt: skip
                assert relative(states[on_gpu], expected) < 1e-6


@pytest.mark.parametrize(
    "shape", [(1, 1, 2, 2), (2, 3, 33, 17), (1, 2, 256, 64), (1, 16, 128, 128)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_dtypes(kind, dtype, shape):
    rings = open_rings(3)
    streams = [torch.cuda.Stream() for _ in range(3)]
    warm_up(streams)
    updates = torch.randn(1, 3, *shape, device="cuda", dtype=dtype)
    parameters = make_parameters(kind, 1, 3, shape=shape, dtype=dtype)
    initial = torch.randn(1, *shape, device="cuda", dtype=dtype)
    torch.cuda.synchronize()
    for reverse in (False, True):
        scans = []
        for rank in range(3):
            transition = transition_of(kind, None if parameters is None else parameters[0, rank])
            with torch.cuda.stream(streams[rank]):
                own = AffineMap(updates[0, rank], transition)
                scans.append(
                    rings[rank].scan(own, initial[0], reverse=reverse, check=nothing_failed)
                )
        results = [scan.wait() for scan in scans]
        torch.cuda.synchronize()
        nothing = torch.zeros(1, 3, dtype=torch.bool, device="cuda")
        expected = fold(kind, updates, parameters, nothing, initial, reverse=reverse)
        for place in (0, 1):
            states = torch.stack([r[place] for r in results])[None]
            bound = 2e-6 if dtype == torch.float32 else 1e-14
            assert relative(states, expected[place]) < bound


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_only_ranks_that_ask_get_the_leaving_state(kind, reverse):
    """In turn the last one of the direction, as at a turn of a zigzag, and none, as in layers."""
    ranks = 4
    rings = open_rings(ranks)
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    warm_up(streams, LARGE)
    updates = torch.randn(1, ranks, *LARGE, device="cuda")
    parameters = make_parameters(kind, 1, ranks, shape=LARGE)
    initial = torch.randn(1, *LARGE, device="cuda")
    last = 0 if reverse else ranks - 1
    torch.cuda.synchronize()
    scans = []
    for asks in (last, None, last):
        for rank in range(ranks):
            transition = transition_of(kind, None if parameters is None else parameters[0, rank])
            with torch.cuda.stream(streams[rank]):
                own = AffineMap(updates[0, rank], transition)
                scans.append(
                    rings[rank].scan(
                        own, initial[0], reverse=reverse, check=nothing_failed,
                        output_leaving=rank == asks,
                    )
                )  # fmt: skip
    results = [scan.wait() for scan in scans]
    torch.cuda.synchronize()
    assert [ring.find_failure() for ring in rings] == [None] * ranks
    nothing = torch.zeros(1, ranks, dtype=torch.bool, device="cuda")
    entering, leaving = fold(kind, updates, parameters, nothing, initial, reverse=reverse)
    for place, (found, left) in enumerate(results):
        scan, rank = divmod(place, ranks)
        assert relative(found, entering[0, rank]) < 2e-6
        assert (left is not None) == (rank == last and scan != 1)
        if left is not None:
            assert relative(left, leaving[0, rank]) < 2e-6


def on_own_streams(ranks, prepare, function):
    """Give every rank's thread a stream of its own, and start when all have prepared."""
    ready = threading.Barrier(ranks, timeout=30)

    def call(group):
        stream = torch.cuda.Stream()
        warm_up([stream])
        with torch.cuda.stream(stream):
            given = prepare(group)
            torch.cuda.synchronize()
            ready.wait()
            result = function(group, *given)
        stream.synchronize()
        return result

    return call


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_autograd_agrees_with_cpu_ranks(kind, reverse):
    ranks = 4
    parameters = make_parameters(kind, ranks)
    updates = torch.randn(ranks, *SHAPE, device="cuda")
    weights = torch.randn(2, ranks, *SHAPE, device="cuda")
    initial = torch.randn(SHAPE, device="cuda")
    torch.cuda.synchronize()

    def prepare(group, device):
        def leaf(x):
            return x.to(device, copy=True).requires_grad_()

        own = None if parameters is None else leaf(parameters[group.rank])
        return leaf(updates[group.rank]), leaf(initial), own, weights[:, group.rank].to(device)

    def rank_function(group, update, given, own, weight, *, algorithm):
        losses = []
        for _ in range(3):
            entering, leaving = zeco.all_scan(
                update.sin(), transition_of(kind, own), group=group, initial=given,
                reverse=reverse, algorithm=algorithm,
            )  # fmt: skip
            losses.append((entering * weight[0]).sum() + (leaving * weight[1]).sum())
        torch.stack(losses).sum().backward()
        grads = [x.grad for x in (update, given, own) if x is not None and x.grad is not None]
        return [entering.detach(), leaving.detach(), *grads], group.ledger

    alone = transport_of(None)
    rank_function(alone, *prepare(alone, "cuda"), algorithm="device_chain")
    on_gpu = run_ranks(
        ranks,
        on_own_streams(
            ranks,
            lambda group: prepare(group, "cuda"),
            functools.partial(rank_function, algorithm="device_chain"),
        ),
        timeout_s=3,
    )
    on_cpu = run_ranks(ranks, lambda g: rank_function(g, *prepare(g, "cpu"), algorithm="chain"))
    for (found, ledger), (expected, reference) in zip(on_gpu, on_cpu, strict=True):
        assert len(found) == len(expected)
        for x, y in zip(found, expected, strict=True):
            assert relative(x.cpu(), y.double()) < 2e-6
        assert ledger.scans == reference.scans
        assert ledger.sent["forward"].bytes == reference.sent["forward"].bytes
        assert ledger.sent["backward"].bytes == reference.sent["backward"].bytes


def test_an_operator_over_virtual_ranks_equals_one_rank():
    ranks, T, H, K = 4, 256, 2, 64
    q, k, v = (torch.randn(1, ranks * T, H, K, device="cuda") for _ in range(3))
    g = -torch.rand(1, ranks * T, H, K, device="cuda")
    d_o = torch.randn(1, ranks * T, H, K, device="cuda")

    def prepare(span):
        return [x[:, span].detach().clone().requires_grad_() for x in (q, k, v, g)], d_o[:, span]

    def run(sp, leaves, d_o):
        o, _ = zeco.ops.gla(*leaves, sp=sp)
        o.backward(d_o)
        return [o.detach(), *(x.grad for x in leaves)]

    whole = run(None, *prepare(slice(None)))
    run(zeco.SequenceParallel(algorithm="device_chain"), *prepare(slice(0, T)))
    torch.cuda.synchronize()

    def rank_function(group, *given):
        return run(zeco.SequenceParallel(group, algorithm="device_chain"), *given)

    parts = run_ranks(
        ranks,
        on_own_streams(
            ranks, lambda g: prepare(slice(g.rank * T, (g.rank + 1) * T)), rank_function
        ),
        timeout_s=3,
    )
    for expected, *found in zip(whole, *parts, strict=True):
        assert relative(torch.cat(found, 1), expected.double()) < 2e-5


def test_a_captured_scan_can_be_replayed():
    ranks = 4
    rings = open_rings(ranks)
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    updates = torch.randn(ranks, *SHAPE, device="cuda")
    decays = make_parameters("diagonal", ranks)
    initial = torch.randn(SHAPE, device="cuda")

    def both_ways():
        start, found = torch.cuda.current_stream(), []
        for reverse in (False, True):
            scans = []
            for rank in range(ranks):
                streams[rank].wait_stream(start)
                with torch.cuda.stream(streams[rank]):
                    own = AffineMap(updates[rank], Diagonal(decays[rank]))
                    scans.append(
                        rings[rank].scan(own, initial, reverse=reverse, check=nothing_failed)
                    )
            for rank in range(ranks):
                with torch.cuda.stream(streams[rank]):
                    found.append(scans[rank].wait())
                start.wait_stream(streams[rank])
        return found

    both_ways()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both_ways()
    nothing = torch.zeros(1, ranks, dtype=torch.bool, device="cuda")
    for _ in range(5):
        updates.normal_()
        graph.replay()
        torch.cuda.synchronize()
        for way, reverse in enumerate((False, True)):
            expected = fold(
                "diagonal", updates[None], decays[None], nothing, initial[None], reverse=reverse
            )
            for place in (0, 1):
                states = torch.stack([r[place] for r in found[way * ranks : (way + 1) * ranks]])
                assert relative(states[None], expected[place]) < 1e-6
    assert [ring.find_failure() for ring in rings] == [None] * ranks


@pytest.mark.timeout(60)
def test_a_peer_that_never_comes_is_an_error_on_every_survivor():
    def rank_function(group):
        update = torch.randn(SHAPE, device="cuda")
        if group.rank == 1:
            return None
        entering, _ = zeco.all_scan(update, group=group, algorithm="device_chain")
        torch.cuda.current_stream().synchronize()
        if group.rank == 0:  # nothing has been lost for it yet
            return float(entering.sum())
        assert entering.isnan().all()
        with pytest.raises(RankFailedError, match=f"rank {group.rank} gave up in device scan 1"):
            zeco.all_scan(update, group=group, algorithm="device_chain")
        with pytest.raises(RankFailedError, match="block"):
            group.next_tags()
        return group.broken

    found = run_ranks(4, on_own_streams(4, lambda _: (), rank_function), timeout_s=0.5)
    assert found[0] == 0.0
    assert "didn't come in time" in found[2]
    # Which of the two gives up first depends on when their kernels began.
    assert "had lost the block" in found[3] or "didn't come in time" in found[3]


def test_auto_takes_it_for_threads_that_share_a_gpu():
    """No message carries their states: there is nothing else to take."""
    updates = torch.randn(2, *SHAPE, device="cuda")

    def rank_function(group):
        sp = zeco.SequenceParallel(group)
        assert len(sp.explain(SHAPE, device="cuda").splitlines()) == 1
        assert "device_chain" not in sp.explain(SHAPE)
        entering, leaving = zeco.all_scan(updates[group.rank], group=group)
        return entering, leaving, group.ledger.scans["forward"]

    zeco.all_scan(updates[0], algorithm="device_chain")
    torch.cuda.synchronize()
    first, second = run_ranks(2, on_own_streams(2, lambda _: (), rank_function), timeout_s=3)
    nothing = torch.zeros_like(updates[0])
    for expected, found in zip((nothing, updates[0], 1), first, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for expected, found in zip((updates[0], updates.sum(0), 1), second, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_threads_on_one_gpu_take_its_scope():
    (ring, _) = open_rings(2)
    own = AffineMap(torch.zeros(SHAPE, device="cuda"), Identity())
    assert ring.layout_of(own).scope == "gpu"


def test_more_ranks_than_the_gpu_holds_are_refused():
    update = torch.zeros(SHAPE, device="cuda")

    def rank_function(group):
        zeco.all_scan(update, group=group, algorithm="device_chain")

    with pytest.raises(zeco.ZecoError, match="ranks' scans fit"):
        run_ranks(200, rank_function)
    with pytest.raises(zeco.ZecoError, match="CUDA_DEVICE_MAX_CONNECTIONS"):
        run_ranks(17, rank_function)


def test_ranks_on_one_stream_are_refused():
    update = torch.zeros(SHAPE, device="cuda")
    with pytest.raises(zeco.ZecoError, match="stream of its own"):
        run_ranks(
            2, lambda g: zeco.all_scan(update, group=g, algorithm="device_chain"), timeout_s=0.2
        )
    torch.cuda.synchronize()


def one_process_each(kind, steps):
    rank = torch.distributed.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)
    updates = torch.randn(2, *SHAPE, device="cuda")
    parameters = make_parameters(kind, 2)
    worst = 0.0
    for step in range(1, steps + 1):
        reverse = step % 3 == 0
        own = transition_of(kind, None if parameters is None else parameters[rank])
        if step % 7 == rank:
            torch.cuda._sleep(100_000)
        entering, _ = zeco.all_scan(
            updates[rank] * step, own, algorithm="device_chain", reverse=reverse
        )
        nothing = torch.zeros(1, 2, dtype=torch.bool, device="cuda")
        expected, _ = fold(
            kind, updates[None] * step, None if parameters is None else parameters[None], nothing,
            torch.zeros(1, *SHAPE, device="cuda"), reverse=reverse,
        )  # fmt: skip
        difference = (entering - expected[0, rank]).norm() / (expected.norm() + 1e-30)
        worst = max(worst, float(difference))
    own = AffineMap(updates[rank], Identity())
    assert transport_of(None).device_ring(updates.device).layout_of(own).scope == "sys"
    return worst


@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_processes(kind, monkeypatch):
    """Over symmetric memory: on two GPUs, or taking turns on one."""
    shared = torch.cuda.device_count() < 2
    if shared:
        monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    found = run_processes(2, one_process_each, kind, 20 if shared else 200, timeout_s=30.0)
    assert max(found) < 1e-6
