"""Scans inside kernels, as far as a machine without a GPU can tell: who may, and what is said if not."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import zeco
from zeco.benchmarks import calibration
from zeco.collectives.local_rings import programs_that_fit
from zeco.collectives.mirrored import MirroredTransport
from zeco.collectives.scan import can_scan_in_kernels, start_scan
from zeco.collectives.symmetric_ring import Place, why_not_together
from zeco.collectives.transport import Ended
from zeco.core.costs import NVLINK_BY_NCCL
from zeco.core.errors import UnsupportedError
from zeco.core.fabric import DeviceChain
from zeco.testing import run_processes, run_ranks

UPDATE = torch.zeros(1, 1, 2, 2)


@pytest.mark.parametrize(
    "ranks,programs", [(1, 32), (2, 32), (8, 12), (16, 6), (50, 1)], ids=lambda x: str(x)
)
def test_all_thread_blocks_of_all_ranks_fit_at_once(ranks, programs):
    found = programs_that_fit(ranks, 132, connections=128)
    assert found == programs
    assert ranks * found <= 132 * 3 // 4


@pytest.mark.parametrize(
    "ranks,connections,message",
    [(100, 256, "at most 99 ranks' scans fit"), (8, 8, "at most 4 ranks fit; set CUDA_DEVICE_MAX")],
)
def test_more_ranks_than_fit_are_refused(ranks, connections, message):
    with pytest.raises(zeco.ZecoError, match=message):
        programs_that_fit(ranks, 132, connections)


def test_ranks_must_be_on_gpus_of_one_host():
    here = [Place(None, "here", str(gpu), 132) for gpu in range(2)]
    assert why_not_together(here) is None
    assert "ranks 0 and 2 share a GPU" in str(why_not_together([*here, here[0]]))
    old = Place("cuda:0 has compute capability (6, 1)", "here", "2", 56)
    assert "on rank 2, cuda:0 has compute capability" in str(why_not_together([*here, old]))
    far = Place(None, "there", "3", 132)
    assert "rank 2 is on another host than rank 0" in str(why_not_together([*here, far]))


def test_cpu_states_are_refused_with_the_remedy():
    def rank_function(group):
        return zeco.all_scan(UPDATE, group=group, algorithm="device_chain")

    with pytest.raises(zeco.ZecoError, match="states are on cpu; move them to a CUDA device"):
        rank_function(None)
    with pytest.raises(zeco.ZecoError, match="states are on cpu; move them to a CUDA device"):
        run_ranks(2, rank_function)


def on_process():
    found = []
    for _ in range(2):
        try:
            zeco.all_scan(UPDATE, algorithm="device_chain")
        except zeco.ZecoError as error:
            found.append(str(error))
    entering, _ = zeco.all_scan(UPDATE + 1, algorithm="auto")
    return found, float(entering.sum())


def test_processes_agree_that_they_cannot():
    for rank, (messages, total) in enumerate(run_processes(2, on_process)):
        assert len(messages) == 2
        assert all("states are on cpu" in message for message in messages)
        assert total == 4.0 * rank


def test_blocks_are_not_for_the_caller_to_choose():
    with pytest.raises(zeco.ZecoError, match="num_blocks=4, but algorithm='device_chain'"):
        zeco.all_scan(UPDATE, algorithm="device_chain", num_blocks=4)
    assert zeco.SequenceParallel(algorithm="device_chain").size == 1
    with pytest.raises(zeco.ZecoError, match="did you mean 'device_chain'"):
        zeco.SequenceParallel(algorithm="device_chian")


def test_a_mirrored_group_scans_the_other_way():
    def rank_function(group):
        seen = []

        def start(own, initial, *, reverse, output_leaving):
            seen.append((reverse, output_leaving))
            return Ended((own.update, None))

        group.start_device_scan = start
        mirror = MirroredTransport(group)
        mirror.start_device_scan(own_map, None, reverse=False, output_leaving=True)
        MirroredTransport(mirror).start_device_scan(
            own_map, None, reverse=False, output_leaving=False
        )
        return seen

    from zeco.core.maps import AffineMap
    from zeco.core.transitions import Identity

    own_map = AffineMap(UPDATE, Identity())
    assert run_ranks(2, rank_function) == [[(True, True), (False, False)]] * 2


def pretend_on_device(group, *, fails=False):
    """Let a group of threads offer scans inside kernels, which host-driven ones then stand in for."""
    seen = []

    class Ring:
        def layout_of(self, own):
            return SimpleNamespace(num_blocks=7)

    def device_ring(device):
        if fails:
            group._why_no_ring = "no peer access"
            raise UnsupportedError(group._why_no_ring)
        return Ring()

    def start_device_scan(own, initial, *, reverse, output_leaving):
        seen.append(own.transition.kind)
        handle = start_scan(group, own, initial, reverse=reverse, algorithm="chain", num_blocks=1)
        entering, leaving = handle.wait()
        return Ended((entering, leaving if output_leaving else None))

    group.why_no_device_scans = lambda device: group._why_no_ring
    group.device_ring, group.start_device_scan = device_ring, start_device_scan
    return seen


def total_of(group, **options):
    entering, leaving = zeco.all_scan(UPDATE + 1, group=group, **options)
    assert torch.equal(leaving, entering + 1)
    return float(entering.sum())


def test_auto_takes_the_scan_inside_kernels_where_it_is_cheapest():
    def rank_function(group):
        seen = pretend_on_device(group)
        sp = zeco.SequenceParallel(group, fabric=NVLINK_BY_NCCL)
        first = sp.explain((1, 1, 2, 2)).splitlines()[0]
        totals = [total_of(group, reverse=reverse) for reverse in (False, True)]
        group.fabric = replace(NVLINK_BY_NCCL, device_chain=DeviceChain(hop_s=1.0))
        last = sp.explain((1, 1, 2, 2)).splitlines()[-1]
        totals += [
            total_of(group),
            total_of(group, algorithm="chain"),
            total_of(group, num_blocks=2),
        ]
        return first, last, len(seen), totals, group.ledger.sent["forward"].messages

    found = run_ranks(3, rank_function)
    for rank, (first, last, times, totals, _) in enumerate(found):
        assert first.startswith("chosen: device_chain          own blocks")
        assert "device_chain" in last
        assert times == 2
        assert totals == [4.0 * rank, 4.0 * (2 - rank), 4.0 * rank, 4.0 * rank, 4.0 * rank]
    assert found[1][4] >= 14


def test_auto_weighs_no_scan_inside_kernels_elsewhere():
    def rank_function(group):
        shape, cpu = (1, 1, 2, 2), torch.device("cpu")
        lines = [zeco.SequenceParallel(group).explain(shape)]
        assert "states are on cpu" in group.why_no_device_scans(cpu)
        seen = pretend_on_device(group)
        assert can_scan_in_kernels(group, shape, "diagonal", cpu)
        lines.append(zeco.SequenceParallel(group, nodes=(1, 1)).explain(shape))
        group.nodes = None
        if importlib.util.find_spec("triton") is not None:
            assert can_scan_in_kernels(group, (1, 1, 256, 2), "dense", cpu)
            assert not can_scan_in_kernels(group, (1, 1, 257, 2), "dense", cpu)
        mirror = MirroredTransport(group)
        assert can_scan_in_kernels(mirror, shape, "diagonal", cpu)
        return [*lines, str(seen)]

    for lines in run_ranks(2, rank_function):
        assert not any("device_chain" in line for line in lines)
    assert "device_chain" not in zeco.SequenceParallel().explain((1, 1, 2, 2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a process without a CUDA device")
def test_explain_is_of_states_on_a_device():
    def rank_function(group):
        assert "sees no CUDA device" in group.why_no_device_scans(torch.device("cuda"))
        sp = zeco.SequenceParallel(group)
        before = sp.explain((1, 1, 2, 2), device="cuda")
        pretend_on_device(group)
        group.scans_only_in_kernels = lambda device: device.type == "cuda"
        return before, sp.explain((1, 1, 2, 2), device="cuda"), sp.explain((1, 1, 2, 2))

    for before, on_gpu, on_cpu in run_ranks(2, rank_function):
        assert "device_chain" not in before
        assert on_gpu.startswith("chosen: device_chain")
        assert len(on_gpu.splitlines()) == 1
        assert len(on_cpu.splitlines()) > 1


def test_calibration_times_it_where_it_can_run(monkeypatch):
    monkeypatch.setattr(calibration, "SHAPE", (1, 2, 8, 8))

    def rank_function(group):
        usual = calibration.calibrate(group, repetitions=1).device_chain
        kinds = pretend_on_device(group)
        return usual, calibration.calibrate(group, repetitions=1).device_chain, kinds

    for usual, measured, kinds in run_ranks(2, rank_function):
        assert usual == DeviceChain()
        assert measured.start_s > 0
        assert measured.bytes_per_s > 0
        assert measured.flop_per_s > 0
        assert kinds == ["identity"] * 6 + ["dense"] * 2


def test_auto_says_what_it_finds_out_late_and_goes_on(caplog):
    def rank_function(group):
        seen = pretend_on_device(group, fails=True)
        sp = zeco.SequenceParallel(group, fabric=NVLINK_BY_NCCL)
        before = sp.explain((1, 1, 2, 2))
        totals = [total_of(group), total_of(group)]
        return seen, totals, "device_chain" in before, "device_chain" in sp.explain((1, 1, 2, 2))

    for rank, found in enumerate(run_ranks(2, rank_function)):
        assert found == ([], [4.0 * rank] * 2, True, False)
    messages = [r.getMessage() for r in caplog.records if r.name == "zeco.scans"]
    assert messages == ["auto takes no scan inside kernels: no peer access"] * 2


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the package triton is missing; install zeco-sp[gpu]",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_mailboxes_lie_apart_and_aligned(kind, dtype):
    from zeco.collectives.device_ring import initialise, memory_size, split_memory
    from zeco.kernels.device.scan import make_layout

    layout = make_layout((1, 3, 33, 17), dtype, kind, max_programs=5)
    memory = torch.full((memory_size(layout),), 7)
    initialise(memory, layout)
    pieces = []
    for inbox, room in split_memory(memory, layout):
        assert inbox.numel() == layout.inbox_elements
        assert len(room) >= layout.programs
        assert inbox.eq(-1).all()
        assert room.eq(0).all()
        pieces += [inbox, room]
    places = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in pieces]
    assert all((start - memory.data_ptr()) % 16 == 0 for start, _ in places)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))
    assert not memory.eq(7).any()
