"""All-Scan inside kernels between GPUs of one host, against NCCL in the same run.

    torchrun --standalone --nproc-per-node 2 benchmarks/device_scan_gpus.py --out FILE

Correctness first, against the scan driven by the host over NCCL. Then scans forward and reverse in turn:
each must have reached its last rank before the next can leave it, so the time of many, divided by their
number, is that of one. NCCL's send and receive go back and forth alike; both are queued behind a kernel
that sleeps, so that launches are hidden. The rank that woke up last has the time without the other's
sleep. NVLink multicast is not used.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeco
from zeco.benchmarks.record import write_record
from zeco.collectives.groups import transport_of
from zeco.core.maps import AffineMap
from zeco.core.transitions import Dense, Diagonal, Identity, Transition

KINDS = ("identity", "diagonal", "dense")
MIB = (0.0625, 0.25, 2.0, 8.0, 64.0)
ROUNDS = 20
REPEATS = 7
SLEEP_CYCLES = 60_000_000  # about 30 ms


def make_transition(kind: str, shape: tuple[int, int, int, int]) -> Transition:
    B, H, K, _ = shape
    if kind == "identity":
        return Identity()
    if kind == "diagonal":
        return Diagonal(-torch.rand(B, H, K, device="cuda"))
    return Dense(torch.randn(B, H, K, K, device="cuda") / K**0.5)


def shape_of(mib: float) -> tuple[int, int, int, int]:
    return 1, max(1, int(mib * 2**20) // (128 * 128 * 4)), 128, 128


def error_of(kind: str, mib: float) -> float:
    """Return the largest relative difference to the chain over NCCL, on any rank."""
    shape = shape_of(mib)
    worst = torch.zeros(1, device="cuda")
    for step in range(6):
        update, transition = torch.randn(shape, device="cuda"), make_transition(kind, shape)
        options = {"reverse": step % 2 == 1}
        found = zeco.all_scan(update, transition, algorithm="device_chain", **options)
        expected = zeco.all_scan(update, transition, algorithm="chain", num_blocks=1, **options)
        for x, y in zip(found, expected, strict=True):
            worst = torch.maximum(worst, (x - y).norm() / (y.norm() + 1e-30))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def time_us(stream: torch.cuda.Stream, call: Callable[[int], object]) -> dict[str, float]:
    """Return the microseconds of one of many calls queued at once, the last riser's."""
    times = []
    for repeat in range(REPEATS + 1):
        dist.barrier(device_ids=[torch.cuda.current_device()])
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            start.record()
        for number in range(ROUNDS):
            call(number)
        late = start.query()
        end.record(stream)
        torch.cuda.synchronize()
        took = torch.tensor([start.elapsed_time(end) * 1e3 / ROUNDS], device="cuda")
        if late:
            took.fill_(torch.inf)
        dist.all_reduce(took, op=dist.ReduceOp.MIN)
        if repeat:
            times.append(float(took))
    return {"us": statistics.median(times), "least_us": min(times), "most_us": max(times)}


def measure(kind: str, mib: float) -> dict[str, Any]:
    shape = shape_of(mib)
    transport = transport_of(None)
    ring = transport.device_ring(torch.device("cuda", torch.cuda.current_device()))
    own = AffineMap(torch.randn(shape, device="cuda"), make_transition(kind, shape))

    def scan(number: int) -> None:
        ring.scan(own, None, reverse=number % 2 == 1, check=lambda: None)

    return time_us(ring.stream, scan)


def measure_nccl(mib: float) -> dict[str, Any]:
    """Time a state's way from rank to rank by NCCL, and its all-gather."""
    rank, size = dist.get_rank(), dist.get_world_size()
    state = torch.randn(shape_of(mib), device="cuda")
    whole = list(state.new_empty(size, *state.shape))

    def hop(number: int) -> None:
        down = number % 2 == 1
        first, last = (size - 1, 0) if down else (0, size - 1)
        step = -1 if down else 1
        if rank != first:
            dist.recv(state, rank - step)
        if rank != last:
            dist.send(state, rank + step)

    stream = torch.cuda.current_stream()
    return {
        "chain_of_send_and_receive": time_us(stream, hop),
        "all_gather": time_us(stream, lambda _: dist.all_gather(whole, state)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    figures: dict[str, Any] = {"ranks": dist.get_world_size(), "runs": []}
    for mib in MIB:
        row: dict[str, Any] = {"state_mib": mib, "nccl": measure_nccl(mib)}
        for kind in KINDS:
            error = error_of(kind, mib)
            row[kind] = {"error": error}
            if error < 1e-5:
                row[kind] |= measure(kind, mib)
        figures["runs"].append(row)
        if dist.get_rank() == 0:
            print(row, flush=True)
    transport_of(None).check_device_scans()
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        command = (
            f"torchrun --standalone --nproc-per-node {ranks} benchmarks/device_scan_gpus.py "
            f"--out {arguments.out}"
        )
        write_record(arguments.out, command=command, figures=figures)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
