"""All GPUs of a host: every operator and method over NCCL against one GPU, then the scans' times.

Run as ``torchrun --standalone --nproc-per-node GPUS benchmarks/multi_gpu.py --out DIR``. It ends before
it measures if anything is wrong. NVLink multicast is left as the environment has it.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import zeco
from zeco.benchmarks.record import write_record
from zeco.core.transitions import Diagonal
from zeco.testing.cases import CASES, SETTINGS
from zeco.testing.conformance import Problem, relative_errors

METHODS = ("zeco", "lasp1", "lasp2", "ulysses")
SETTINGS_CHECKED = {
    **{name: SETTINGS[name] for name in ("plain", "packed", "zigzag")},
    # Head sizes that the Triton kernels take.
    "wide": replace(SETTINGS["plain"], name="wide", key_dim=64, value_dim=64, length=1000),
}
BOUND = 2e-5  # fp32 on a GPU against one GPU
SCANS = (("chain", 1), ("chain", 4), ("chain", 16), ("gather", None), ("doubling", None))
MIB = (0.25, 1, 2, 8, 64)
REPETITIONS = 30


def check(device: torch.device) -> dict[str, float]:
    """Return the largest error of every operator and method; the same on every rank."""
    errors: dict[str, float] = {}
    for name, case in CASES.items():
        for setting in SETTINGS_CHECKED.values():
            problem = Problem(case, setting, torch.float32, device=device)
            expected = problem.one_rank()
            for method in METHODS:
                if method == "ulysses" and setting.heads % dist.get_world_size():
                    continue
                tokens, results = problem.on_rank(dist.group.WORLD, method=method)
                mine = tokens, {n: x.cpu() for n, x in results.items()}
                parts: list = [None] * dist.get_world_size()
                dist.all_gather_object(parts, mine)
                found = relative_errors(
                    problem.join(parts), {n: x.cpu() for n, x in expected.items()}
                )
                errors[f"{name}, {setting.name}, {method}"] = max(found.values())
    return errors


def time_us(function, device: torch.device) -> float:
    """Return the median time of a call on the GPU, the slowest rank's."""
    for _ in range(5):
        function()
    times = []
    for _ in range(REPETITIONS):
        dist.barrier(device_ids=[device.index])
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    median = torch.tensor([statistics.median(times)], device=device)
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return float(median)


def measure(device: torch.device) -> list[dict[str, object]]:
    """Time All-Scan driven by the host and NCCL's own all-gather, for several states."""
    rows: list[dict[str, object]] = []
    for mib in MIB:
        heads = max(1, int(mib * 2**20) // (128 * 128 * 4))
        update = torch.randn(1, heads, 128, 128, device=device)
        decay = Diagonal(-torch.rand(1, heads, 128, device=device))
        whole = update.new_empty(dist.get_world_size(), *update.shape)
        row: dict[str, object] = {
            "state_mib": mib,
            "nccl_all_gather_us": time_us(
                lambda whole=whole, update=update: dist.all_gather(list(whole), update), device
            ),
        }
        for algorithm, blocks in SCANS:

            def scan(update=update, decay=decay, algorithm=algorithm, blocks=blocks) -> None:
                with torch.no_grad():
                    zeco.all_scan(update, decay, algorithm=algorithm, num_blocks=blocks)

            row[f"{algorithm}_{blocks or ''}_us".replace("__", "_")] = time_us(scan, device)
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    errors = check(device)
    worst = max(errors, key=errors.__getitem__)
    if dist.get_rank() == 0:
        print(f"{len(errors)} checks, largest error {errors[worst]:.1e} ({worst})", flush=True)
    failed = {name: error for name, error in errors.items() if not error <= BOUND}
    if failed:
        print(f"rank {dist.get_rank()}: over {BOUND}: {failed}")
        return 1
    rows = measure(device)
    if dist.get_rank() == 0:
        for row in rows:
            print(row)
        ranks = dist.get_world_size()
        write_record(
            given.out / f"multi_gpu_{ranks}.json",
            command=f"torchrun --standalone --nproc-per-node {ranks} benchmarks/multi_gpu.py",
            figures={"largest_error": errors[worst], "checks": len(errors), "scans": rows},
        )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
