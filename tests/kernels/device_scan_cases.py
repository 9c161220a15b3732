"""Cases of test_device_scan.py: run with TRITON_INTERPRET=1.

The ranks run one after the other in the order of travel, so that nothing is ever waited for.
"""

from __future__ import annotations

import sys

import torch
from decay_cases import let_numpy_index

from zeco.core.transitions import Dense, Diagonal, Identity, Reset, Scalar
from zeco.kernels.device.scan import (
    Ports,
    Role,
    launch_scan,
    make_layout,
    read_status,
)

KINDS = ("identity", "scalar", "diagonal", "dense")
BOUNDS = {torch.float32: 2e-6, torch.float64: 1e-14}


def make_transition(kind, shape, dtype):
    B, H, K, _ = shape
    match kind:
        case "identity":
            return Identity()
        case "scalar":
            return Scalar(-torch.rand(B, H, dtype=dtype))
        case "diagonal":
            return Diagonal(-torch.rand(B, H, K, dtype=dtype))
        case _:
            return Dense(torch.randn(B, H, K, K, dtype=dtype) / K**0.5)


def make_ports(layout, ranks, *, reverse):
    """Return every rank's ports of one direction."""
    inboxes = [torch.full((layout.inbox_elements,), -1, dtype=layout.bits) for _ in range(ranks)]
    rooms = [torch.zeros(layout.programs, dtype=torch.int64) for _ in range(ranks)]
    step = -1 if reverse else 1
    return [
        Ports(
            inbox=inboxes[rank],
            outbox=inboxes[(rank + step) % ranks],
            room=rooms[rank],
            room_before=rooms[(rank - step) % ranks],
            epochs=torch.zeros(layout.programs, dtype=torch.int64),
            status=torch.zeros(1, dtype=torch.int64),
            broken=torch.zeros(1, dtype=torch.int64),
        )
        for rank in range(ranks)
    ]


def run_rank(layout, ports, rank, ranks, update, transition, initial, *, reverse, leaves=True):
    first, last = (ranks - 1, 0) if reverse else (0, ranks - 1)
    entering = torch.full_like(update, torch.nan)
    leaving = torch.full_like(update, torch.nan) if leaves else None
    launch_scan(
        layout, ports[rank], Role(rank, rank == first, rank == last), update, transition, initial,
        timeout_s=1.0, entering=entering, leaving=leaving,
    )  # fmt: skip
    return entering, leaving


def relative(found, expected):
    return float((found - expected).norm() / (expected.norm() + 1e-30))


def check(kind, shape, dtype, *, ranks=3, reverse=False, resets=(), initial=True, **options):
    layout = make_layout(shape, dtype, kind, max_programs=2, words=32, **options)
    ports = make_ports(layout, ranks, reverse=reverse)
    # Which ranks' leaving states are written: everyone's, the last one's of the direction, none.
    wanted = {1: range(ranks), 2: [0 if reverse else ranks - 1], 3: []}
    for epoch in (1, 2, 3):
        transitions = [make_transition(kind, shape, dtype) for _ in range(ranks)]
        for rank in resets:
            transitions[rank] = Reset(kind)
        updates = [torch.randn(shape, dtype=dtype) for _ in range(ranks)]
        given = torch.randn(shape, dtype=dtype) if initial else None
        state = torch.zeros(shape, dtype=dtype) if given is None else given
        for rank in reversed(range(ranks)) if reverse else range(ranks):
            found = run_rank(
                layout, ports, rank, ranks, updates[rank], transitions[rank], given,
                reverse=reverse, leaves=rank in wanted[epoch],
            )  # fmt: skip
            leaving = transitions[rank](state) + updates[rank]
            assert (found[1] is None) == (rank not in wanted[epoch])
            for one, expected in zip(found, (state, leaving), strict=True):
                if one is None:
                    continue
                error = relative(one, expected)
                assert error < BOUNDS[dtype], (kind, shape, rank, epoch, error)
            state = leaving
        for port in ports:
            assert read_status(port.status) is None
            assert port.epochs.eq(epoch).all()
            assert port.inbox.eq(-1).all()
    return layout


def elementwise():
    for kind, shape in (
        ("identity", (1, 3, 5, 3)),
        ("scalar", (2, 3, 5, 7)),
        ("diagonal", (1, 2, 24, 20)),
    ):
        for reverse in (False, True):
            check(kind, shape, torch.float32, reverse=reverse, resets=(1,) if reverse else ())
        check(kind, shape, torch.float64, initial=False, resets=(1,))
    check("diagonal", (1, 1, 33, 5), torch.float64, ranks=2)
    check("diagonal", (1, 1, 8, 8), torch.float32, ranks=1)
    layouts()
    not_a_number_travels_as_data()


def dense():
    shape = (1, 2, 20, 24)
    check("dense", shape, torch.float32)
    check("dense", shape, torch.float32, reverse=True, resets=(1,), tensor_cores=True)
    assert check("dense", (1, 1, 70, 24), torch.float32, ranks=2, tensor_cores=True).holds
    check("dense", (1, 1, 40, 3), torch.float64, ranks=2, initial=False, resets=(0, 1))
    check("dense", (1, 2, 16, 16), torch.float32, ranks=1)


def layouts():
    """Small states take few programs; every element is in a block."""
    layout = make_layout((1, 1, 2, 2), torch.float32, "diagonal", max_programs=16)
    assert (layout.programs, layout.num_blocks, layout.words) == (1, 1, 32)
    layout = make_layout((1, 32, 128, 128), torch.float32, "diagonal", max_programs=16)
    assert layout.num_blocks * layout.words * layout.lanes == 32 * 128 * 128
    layout = make_layout((2, 3, 40, 50), torch.float64, "dense", max_programs=16)
    assert layout.num_blocks == 6 * 2
    assert layout.words * layout.lanes == 64 * 32


def not_a_number_travels_as_data():
    """NaNs of a state, whatever their bits, are no signal."""
    shape = (1, 1, 8, 16)
    layout = make_layout(shape, torch.float32, "identity", max_programs=1)
    ports = make_ports(layout, 2, reverse=False)
    update = torch.full(shape, -1, dtype=torch.int32).view(torch.float32)
    run_rank(layout, ports, 0, 2, update, Identity(), None, reverse=False)
    entering, _ = run_rank(layout, ports, 1, 2, update, Identity(), None, reverse=False)
    assert entering.isnan().all()
    assert read_status(ports[1].status) is None


def what_never_comes_is_nan_downstream_and_noted():
    for kind in ("diagonal", "dense"):
        shape = (1, 1, 16, 16)
        layout = make_layout(shape, torch.float32, kind, max_programs=1)
        ports = make_ports(layout, 4, reverse=False)
        update, transition = torch.randn(shape), make_transition(kind, shape, torch.float32)
        # Rank 0 never ran: rank 1 gives up, and the others after it at once.
        for rank, cause in ((1, "didn't come in time"), (2, "had lost"), (3, "had lost")):
            for result in run_rank(layout, ports, rank, 4, update, transition, None, reverse=False):
                assert result.isnan().all()
            loss = read_status(ports[rank].status)
            assert (loss.rank, loss.block, loss.scan) == (rank, 0, 1)
            assert cause in loss.cause


def a_receiver_that_never_reads_is_noted():
    shape = (1, 1, 8, 16)
    layout = make_layout(shape, torch.float32, "identity", max_programs=1)
    ports = make_ports(layout, 2, reverse=False)
    update = torch.randn(shape)
    for epoch in (1, 2):
        before = ports[0].outbox.clone()
        run_rank(layout, ports, 0, 2, update, Identity(), None, reverse=False)
        loss = read_status(ports[0].status)
        assert (loss is None) == (epoch == 1)
    assert "didn't take" in loss.cause
    # What wasn't read was not written over.
    assert torch.equal(before, ports[0].outbox)


def failures():
    what_never_comes_is_nan_downstream_and_noted()
    a_receiver_that_never_reads_is_noted()


if __name__ == "__main__":
    torch.manual_seed(0)
    let_numpy_index()
    {"elementwise": elementwise, "dense": dense, "failures": failures}[sys.argv[1]]()
