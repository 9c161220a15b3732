"""All-Scan inside kernels: P virtual ranks of one GPU, what a rank more costs.

    python benchmarks/device_scan.py --out benchmarks/results/device_scan.json

Correctness first: no times for a kind that is wrong. Then scans back and forth, forward and reverse in
turn: each must have reached its last rank before the next can leave it, so the time of many, divided by
their number, is that of one. All launches are queued behind a kernel that sleeps; what is left of them
is the start of the next kernel on a stream that has it waiting. --sweep tries other cuts of the state.

Times are of what layers ask for: the state that leaves is written by no rank (contiguous shards) or by
the last one of the direction (where a zigzag turns; the gradient of an initial state). For the check all
ranks write it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch

from zeco.benchmarks.record import write_record
from zeco.collectives.device_ring import has_tensor_cores, initialise, make_ports, memory_size
from zeco.collectives.local_rings import programs_that_fit
from zeco.core.transitions import Dense, Diagonal, Identity, Transition
from zeco.kernels.device.scan import Role, ScanLayout, launch_scan, make_layout, read_status

RANKS = (2, 4, 8, 16)
KINDS = ("identity", "diagonal", "dense")
MIB = (0.25, 2.0, 8.0, 64.0)
SCANS = 20
CYCLES_PER_S = 1.98e9
TIMEOUT_S = 2.0

# Ranks that write the state that leaves them.
LEAVING = ("none", "last", "all")

# Words of 16 bytes a block, warps.
ELEMENTWISE_CUTS = ((512, 16), (1024, 16), (1024, 32), (2048, 32))
# Columns, warps, tensor cores, channels a step.
DENSE_CUTS = ((16, 8, True, 64), (16, 4, False, 16), (32, 8, False, 16))


def make_transition(kind: str, shape: tuple[int, int, int, int]) -> Transition:
    B, H, K, _ = shape
    if kind == "identity":
        return Identity()
    if kind == "diagonal":
        return Diagonal(-torch.rand(B, H, K, device="cuda"))
    return Dense(torch.randn(B, H, K, K, device="cuda") / K**0.5)


def shape_of(mib: float) -> tuple[int, int, int, int]:
    return 1, max(1, int(mib * 2**20) // (128 * 128 * 4)), 128, 128


class Line:
    """P ranks on streams of their own."""

    def __init__(self, layout: ScanLayout, ranks: int) -> None:
        self.layout = layout
        self.leaving = "all"
        self.ranks = ranks
        device = torch.device("cuda")
        memory = [
            torch.empty(memory_size(layout), dtype=torch.int64, device=device) for _ in range(ranks)
        ]
        for own in memory:
            initialise(own, layout)
        broken = torch.zeros(1, dtype=torch.int64, device=device)
        pairs = [
            make_ports(layout, memory[r], memory[r - 1], memory[(r + 1) % ranks], broken)
            for r in range(ranks)
        ]
        self.ports = [[pair[way] for pair in pairs] for way in (0, 1)]
        self.updates = [torch.randn(layout.shape, device=device) for _ in range(ranks)]
        self.transitions = [make_transition(layout.kind, layout.shape) for _ in range(ranks)]
        self.results = [
            [torch.empty(2, *layout.shape, device=device) for _ in range(ranks)] for _ in range(2)
        ]
        self.streams = [torch.cuda.Stream(priority=-1) for _ in range(ranks)]
        self.sleep_s = 5e-3
        self.launch_us = float("nan")

    def launch(self, rank: int, reverse: bool, alone: bool = False) -> None:
        first, last = (self.ranks - 1, 0) if reverse else (0, self.ranks - 1)
        entering, leaving = self.results[reverse][rank]
        writes = self.leaving == "all" or (self.leaving == "last" and rank == last)
        launch_scan(
            self.layout, self.ports[reverse][rank],
            Role(rank, alone or rank == first, alone or rank == last), self.updates[rank],
            self.transitions[rank], None, timeout_s=TIMEOUT_S,
            entering=entering, leaving=leaving if writes else None,
        )  # fmt: skip

    def warm_up(self) -> None:
        """Compile and load before anything waits."""
        ports = self.ports
        self.ports = [[replace(p, epochs=torch.zeros_like(p.epochs)) for p in way] for way in ports]
        self.launch(0, False, alone=True)
        torch.cuda.synchronize()
        self.ports = ports

    def back_and_forth(self, scans: int, alone: bool = False) -> float:
        """Return the microseconds that a scan takes."""
        for _ in range(6):
            microseconds = self._queue(scans, alone)
            if microseconds is not None:
                return microseconds
            self.sleep_s *= 2
        raise RuntimeError("the launches took longer than the sleep")

    def _queue(self, scans: int, alone: bool) -> float | None:
        """Return the microseconds of a scan; None if the sleep ended before all were launched."""
        gate = torch.cuda.Stream()
        start = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(gate):
            torch.cuda._sleep(int(self.sleep_s * CYCLES_PER_S))
            start.record()
        ends = []
        for stream in self.streams:
            stream.wait_event(start)
        began = time.perf_counter()
        for scan in range(scans):
            for rank, stream in enumerate(self.streams):
                with torch.cuda.stream(stream):
                    self.launch(rank, bool(scan % 2), alone)
        for stream in self.streams:
            end = torch.cuda.Event(enable_timing=True)
            end.record(stream)
            ends.append(end)
        self.launch_us = (time.perf_counter() - began) * 1e6 / (scans * self.ranks)
        late = start.query()
        torch.cuda.synchronize()
        self.check()
        return None if late else max(start.elapsed_time(end) for end in ends) * 1e3 / scans

    def check(self) -> None:
        losses = [read_status(p.status) for way in self.ports for p in way]
        if any(losses):
            raise RuntimeError(f"a scan failed: {[loss for loss in losses if loss]}")

    def error(self) -> float:
        """Return the largest relative error of one scan each way, against a fold in fp64."""
        worst = 0.0
        self.leaving = "all"
        self.back_and_forth(2)
        for reverse in (False, True):
            state = torch.zeros(self.layout.shape, device="cuda", dtype=torch.float64)
            for rank in reversed(range(self.ranks)) if reverse else range(self.ranks):
                own = [p.double() for p in self.transitions[rank].parameters]
                leaving = self.transitions[rank].with_parameters(tuple(own))(state)
                leaving = leaving + self.updates[rank].double()
                for found, expected in zip(
                    self.results[reverse][rank], (state, leaving), strict=True
                ):
                    distance = (found.double() - expected).norm()
                    worst = max(worst, float(distance / (expected.norm() + 1e-30)))
                state = leaving
        return worst


def measure(layout: ScanLayout, ranks: int, repeats: int, leaving: str) -> dict[str, Any]:
    line = Line(layout, ranks)
    line.warm_up()
    error = line.error()
    if not error < 1e-5:
        return {"ranks": ranks, "error": error, "refused": "wrong"}
    line.leaving = leaving
    line.back_and_forth(4)
    times = sorted(line.back_and_forth(SCANS) for _ in range(repeats))
    alone = statistics.median(line.back_and_forth(SCANS, alone=True) for _ in range(3))
    return {
        "ranks": ranks,
        "error": error,
        "scan_us": statistics.median(times),
        "least_us": times[0],
        "most_us": times[-1],
        "without_messages_us": alone,
        "launch_us": line.launch_us,
    }


def describe(layout: ScanLayout) -> dict[str, Any]:
    return {
        "kind": layout.kind,
        "state_mib": 4 * layout.num_blocks * layout.words * layout.lanes / 2**20,
        "scope": layout.scope,
        "programs": layout.programs,
        "words": layout.words,
        "num_warps": layout.num_warps,
        "columns": layout.columns,
        "precision": layout.precision,
        "step": layout.step,
        "num_blocks": layout.num_blocks,
    }


def run(
    kind: str, mib: float, ranks: tuple[int, ...], repeats: int, *, leaving: str, **options: Any
) -> dict[str, Any]:
    found: dict[str, Any] = {"leaving": leaving, "rows": []}
    for count in ranks:
        chosen = dict(options)
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        chosen.setdefault("tensor_cores", has_tensor_cores(torch.device("cuda")))
        chosen.setdefault("max_programs", programs_that_fit(count, multiprocessors, 32))
        layout = make_layout(shape_of(mib), torch.float32, kind, scope="gpu", **chosen)
        found |= describe(layout)
        try:
            row = measure(layout, count, repeats, leaving)
        except RuntimeError as error:
            row = {"ranks": count, "refused": str(error)[:300]}
        found["rows"].append(row | {"programs": layout.programs})
        torch.cuda.empty_cache()
    timed = [r for r in found["rows"] if "scan_us" in r]
    if len(timed) > 1:
        a, b = timed[0], timed[-1]
        found["added_rank_us"] = (b["scan_us"] - a["scan_us"]) / (b["ranks"] - a["ranks"])
    text = " ".join(
        f"P={r['ranks']}x{r['programs']}:{r.get('scan_us', float('nan')):.1f}"
        f"({r.get('without_messages_us', float('nan')):.1f})" for r in found["rows"]
    )  # fmt: skip
    errors = max((r.get("error", float("nan")) for r in found["rows"]), default=0)
    settings = f"w{found['words']}/{found['num_warps']}"
    if found["columns"]:
        settings = f"c{found['columns']}/{found['num_warps']} {found['precision']}/{found['step']}"
    print(
        f"{kind:9} {mib:5} MiB {settings:22} leaving {leaving:4} {text} "
        f"added {found.get('added_rank_us', -1):.2f} us error {errors:.1e}",
        *[r["refused"] for r in found["rows"] if "refused" in r], flush=True,
    )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--leaving", nargs="+", choices=LEAVING, default=LEAVING[:2])
    parser.add_argument("--sweep", action="store_true", help="try other cuts at 2 MiB")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"runs": [], "sweep": []}
    for kind in KINDS:
        for mib in MIB:
            ranks = RANKS if mib < 64 else (2, 8)
            for leaving in arguments.leaving:
                figures["runs"].append(run(kind, mib, ranks, arguments.repeats, leaving=leaving))
    command = "python " + shlex.join(sys.argv)
    write_record(arguments.out, command=command, figures=figures)
    if arguments.sweep:
        for words, warps in ELEMENTWISE_CUTS:
            options = {"leaving": "none", "words": words, "num_warps": warps}
            figures["sweep"].append(run("diagonal", 2.0, (2, 8), 3, **options))
        for columns, warps, tensor_cores, step in DENSE_CUTS:
            options = {"leaving": "none", "columns": columns, "num_warps": warps, "step": step}
            options |= {"tensor_cores": tensor_cores}
            figures["sweep"].append(run("dense", 2.0, (2, 8), 3, **options))
        write_record(arguments.out, command=command, figures=figures)


if __name__ == "__main__":
    main()
