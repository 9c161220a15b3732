"""Scans inside kernels, as far as a machine without a GPU can tell: who may, and what is said if not."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch

import zeco
from zeco.collectives.local_rings import programs_that_fit
from zeco.collectives.mirrored import MirroredTransport
from zeco.collectives.symmetric_ring import Place, why_not_together
from zeco.collectives.transport import Ended
from zeco.testing import run_processes, run_ranks

UPDATE = torch.zeros(1, 1, 2, 2)


@pytest.mark.parametrize(
    "ranks,programs", [(1, 16), (2, 16), (8, 12), (16, 6), (50, 1)], ids=lambda x: str(x)
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

        def start(own, initial, *, reverse):
            seen.append(reverse)
            return Ended((own.update, own.update))

        group.start_device_scan = start
        MirroredTransport(group).start_device_scan(own_map, None, reverse=False)
        MirroredTransport(MirroredTransport(group)).start_device_scan(own_map, None, reverse=False)
        return seen

    from zeco.core.maps import AffineMap
    from zeco.core.transitions import Identity

    own_map = AffineMap(UPDATE, Identity())
    assert run_ranks(2, rank_function) == [[True, False]] * 2


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the package triton is missing; install zeco-sp[gpu]",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_mailboxes_lie_apart_and_aligned(kind, dtype):
    from zeco.collectives.device_ring import initialise, memory_size, split_memory
    from zeco.kernels.device_scan import make_layout

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
