"""All GPUs of a host in one call: right first, then layers, a model, its longest sequence, and scans.

    python benchmarks/multi_gpu.py --out benchmarks/results

It starts a process for each GPU. Parts, any of which --parts picks:

check      every operator and method on all GPUs against one: outputs, states and gradients
layers     operators under every method, no sequence parallelism, and FLA's context parallelism
model      a 1B model, FSDP2: a sequence over all GPUs against one a GPU, and a trace of the scans
longest    the longest sequence on which that model trains
scans      All-Scan inside kernels, driven by the host, and NCCL's collectives, by the state's size

Each has its time (--limits PART=SECONDS): when that is over it starts nothing more and keeps what it
has; a part that hangs is ended, and the others run without it. A part times only what it has found right
itself. Figures are stored as they come, as gpus_RANKS.json; charts as PNG beside it. On one GPU
there are virtual ranks where a part knows them, and what it skips is said. --device cpu --tiny tries it
all without GPUs. NVLink multicast is left as the environment has it.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shlex
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeco.benchmarks.gpus import charts
from zeco.benchmarks.gpus.check import COMPILED, check, check_virtual, prepare_check
from zeco.benchmarks.gpus.layers import (
    HEADS,
    LAYER_CASES,
    LayerCase,
    LayerSizes,
    cases_to_prepare,
    measure_layers,
    peers_to_prepare,
    prepare_cases,
    prepare_peer,
)
from zeco.benchmarks.gpus.scans import ScanSizes, measure_scans
from zeco.benchmarks.gpus.store import HELPER, Store, Watch, has_ended
from zeco.benchmarks.gpus.team import Team, Told, new_group
from zeco.benchmarks.record import write_record
from zeco.models import ModelConfig
from zeco.testing.cases import SETTINGS
from zeco.training.launch import World, launch

sys.path.append(str(Path(__file__).parent))  # for what lies beside this file
from multi_gpu_model import (
    ModelSizes,
    measure_longest,
    measure_model,
    prepare_model,
)

VIRTUAL_RANKS = 4
PREPARING = 9
"""Processes that compile kernels beside the ranks; each takes a share of the machine's memory. Where
FLA's kernels are tuned, nothing else may run on a GPU."""

LIMITS_S = {
    "prepare": 120.0,
    "check": 90.0,
    "layers": 150.0,
    "model": 60.0,
    "longest": 90.0,
    "scans": 60.0,
}
"""Seconds of each part; "prepare": since the start, at most waited for kernels before what is timed."""


def run_check(team: Team, given: argparse.Namespace, told: Told) -> dict[str, Any]:
    names = ("gla", "kda", "linear_attention") if given.tiny and not team.on_gpu else ()
    if team.size == 1:
        return check_virtual(team, told, num_ranks=VIRTUAL_RANKS, names=names)
    if given.tiny:
        return check(team, told, settings=[SETTINGS["plain"]], names=names)
    return check(team, told, names=names)


def run_scans(team: Team, given: argparse.Namespace, told: Told) -> dict[str, Any]:
    sizes = ScanSizes()
    if given.tiny:
        sizes = ScanSizes(mib=(0.01,), head_dim=16, rounds=2, repetitions=2)
        if team.on_gpu:
            sizes = ScanSizes(mib=(2.0, 0.25), repetitions=2)
    return measure_scans(team, told, sizes)


def run_layers(team: Team, given: argparse.Namespace, told: Told) -> dict[str, Any]:
    return measure_layers(team, told, layer_sizes(given))


def layer_sizes(given: argparse.Namespace) -> LayerSizes:
    if not given.tiny:
        picked = [c for c in LAYER_CASES if c.op in given.ops and c.tokens in given.tokens]
        return LayerSizes(picked, fla_tuning=given.fla_tuning, methods=given.methods)
    if given.device == "cuda":  # what FLA's kernels take, in few of them
        cases = [LayerCase("gated_delta_rule", 1024, heads=2, head_dim=64)]
        return LayerSizes(cases, check_tokens=256, repetitions=2)
    cases = [LayerCase(op, 64, heads=2, head_dim=16) for op in ("gla", "kda")]
    return LayerSizes(cases, check_tokens=32, dtype=torch.float32, repetitions=2)


def run_model(team: Team, given: argparse.Namespace, told: Told) -> dict[str, Any]:
    path = record_path(given)
    picture = path.with_name(f"{path.stem}_timeline.png")
    return measure_model(team, told, model_sizes(given), picture)


def run_longest(team: Team, given: argparse.Namespace, told: Told) -> dict[str, Any]:
    return measure_longest(team, told, model_sizes(given))


def model_sizes(given: argparse.Namespace) -> ModelSizes:
    if not given.tiny:
        return ModelSizes()
    # Key dims of 12 are none that kernels have to be compiled for.
    config = ModelConfig(width=48, num_layers=2, num_heads=2)
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    return ModelSizes(config, tokens=64, repetitions=2, dtype=dtype, longest=256)


def preparations(given: argparse.Namespace) -> dict[str, Callable[[Team], None]]:
    """Return what compiles kernels, by name: jobs of their own."""
    jobs: dict[str, Callable[[Team], None]] = {}
    if "check" in given.parts and not given.tiny:
        for name in COMPILED:
            jobs[f"check-{name}"] = partial(prepare_check, name=name, num_ranks=given.ranks)
    if "layers" in given.parts:
        sizes = layer_sizes(given)
        cases = cases_to_prepare(sizes, given.ranks)
        for op, heads in dict.fromkeys((case.op, case.heads) for case in cases):
            some = [case for case in cases if (case.op, case.heads) == (op, heads)]
            jobs[f"{op}-{heads}"] = partial(prepare_cases, sizes=replace(sizes, cases=some))
        for case in peers_to_prepare(sizes):
            jobs[f"{case.op}-fla"] = partial(prepare_peer, case=case, sizes=sizes)
    if "model" in given.parts or "longest" in given.parts:
        jobs["model"] = partial(prepare_model, sizes=model_sizes(given))
    return jobs


RUNS: dict[str, Callable[[Team, argparse.Namespace, Told], dict[str, Any]]] = {
    "check": run_check,
    "layers": run_layers,
    "model": run_model,
    "longest": run_longest,
    "scans": run_scans,
}


def run_parts(
    world: World, given: argparse.Namespace, parts: list[str], folder: Path, started: float
) -> None:
    """Run parts one after the other; on every rank."""
    store = Store(folder)
    if not dist.is_initialized():
        join_alone(world.device, folder / f"alone-{started}")
    group = new_group(world.size, world.device)
    for part in parts:
        if part != "check" or given.fla_tuning != "off":
            prepared = wait_until_prepared(store, given)
            Team(group, world.device).gather()
            if world.rank == 0:
                store.put("prepared", prepared)
        begun = time.monotonic()
        if world.rank == 0:
            store.begin(part)

        def told(figures: dict[str, Any], part: str = part, begun: float = begun) -> None:
            if world.rank == 0:
                store.put(part, figures)
                print(f"{part}: {time.monotonic() - begun:.1f} s, {extent(figures)}", flush=True)

        team = Team(group, world.device, begun + given.limits[part])
        figures = RUNS[part](team, given, told)
        team.gather()
        figures["seconds"] = round(time.monotonic() - begun, 1)
        told(figures)
        if world.rank == 0:
            print(f"{part}: ended{'' if figures['complete'] else ', not complete'}", flush=True)
            store.end()
        del figures
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def extent(figures: dict[str, Any]) -> str:
    """Say how far a part has come."""
    if "rows" in figures:
        return f"{len(figures['rows'])} rows"
    if "errors" in figures:
        return (
            f"{len(figures['errors'])} checks, largest error {figures.get('largest_error', 0):.1e}"
        )
    return "steps timed"


def prepare(names: list[str], number: int, given: argparse.Namespace, folder: Path) -> None:
    """Do some of the `preparations`, in a process of their own, beside the ranks' first part.

    The process ends when nobody waits for it any more, to disturb nothing that is timed.
    """
    left = given.started + given.limits["prepare"] - time.time()
    timer = threading.Timer(max(left, 0.0), os._exit, (1,))
    timer.daemon = True
    timer.start()
    device = torch.device(given.device)
    if given.device == "cuda":
        time.sleep(number + 1)  # into the machine's memory one by one, the ranks first
        device = torch.device("cuda", number % given.ranks)
        torch.cuda.set_device(device)
    done = Store(folder)
    try:
        join_alone(device, folder / f"prepare-{number}")
        assert dist.group.WORLD is not None
        team = Team(dist.group.WORLD, device)
        jobs = preparations(given)
        for name in names:
            jobs[name](team)
            done.put(f"prepared-{name}", round(time.time() - given.started, 1))
    finally:  # nobody waits for what failed, nor for what would have followed
        for name in names:
            if done.get(f"prepared-{name}") is None:
                done.put(f"prepared-{name}", "failed")


def start_preparing(given: argparse.Namespace, folder: Path) -> None:
    """Start all preparations; they end with this process, or by themselves."""
    context = multiprocessing.get_context("spawn")
    names = list(preparations(given))
    most = PREPARING if given.fla_tuning == "off" else given.ranks
    for number in range(min(len(names), most)):
        arguments = (names[number::most], number, given, folder)
        context.Process(
            target=prepare, args=arguments, name=f"{HELPER}-{number}", daemon=True
        ).start()


def wait_until_prepared(store: Store, given: argparse.Namespace) -> dict[str, Any]:
    """Wait for the preparations, which would disturb what is timed; return when they had ended."""
    names = list(preparations(given))
    while time.time() < given.started + given.limits["prepare"]:
        if all(store.get(f"prepared-{name}") is not None for name in names):
            break
        time.sleep(0.2)
    return {name: store.get(f"prepared-{name}") for name in names}


def join_alone(device: torch.device, rendezvous: Path) -> None:
    """Make a process group of this process."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    where = f"file://{rendezvous}"
    dist.init_process_group(backend, init_method=where, rank=0, world_size=1)


def run_all(given: argparse.Namespace, store: Store) -> None:
    """Run all parts; where one brings its ranks down, run the rest on new ones."""
    start_preparing(given, store.folder)
    left = list(given.parts)
    while left:
        store.end()
        try:
            launch(
                run_parts, given, left, store.folder, time.time(),
                num_ranks=given.ranks, device=given.device,
            )  # fmt: skip
        except Exception as error:  # RankFailedError; with one rank, which is this process, any
            traceback.print_exception(error)
            blame(left, store, str(error))
        left = [part for part in left if not has_ended(store.get(part))]


def blame(parts: list[str], store: Store, reason: str) -> None:
    """Put down which of the parts brought the ranks down, unless the watch has and said so."""
    running = store.get("running")
    figures = [store.get(part) for part in parts]
    if running is not None:
        store.fail(running["part"], reason)
    elif not any(found is not None and "failed" in found for found in figures):
        # They fell before the first part, between parts or behind the last.
        after = next((part for part in parts if not has_ended(store.get(part))), None)
        if after is not None:
            store.fail(after, reason)


def record_path(given: argparse.Namespace) -> Path:
    return given.out / f"gpus_{given.ranks}.json"


def write(given: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Write the record of the figures so far."""
    write_record(
        record_path(given),
        command="python " + shlex.join(sys.argv),
        figures={"ranks": given.ranks, "device": given.device, **figures},
    )


def draw(given: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Draw the charts that there are figures for."""
    machine = f"{given.ranks} x {given.machine}" if given.ranks > 1 else given.machine
    drawn = {"scans": charts.draw_scans, "layers": charts.draw_layers}
    for part, chart in drawn.items():
        if figures.get(part, {}).get("rows"):
            path = record_path(given)
            chart(path.with_name(f"{path.stem}_{part}.png"), figures[part], machine)


def limit(text: str) -> tuple[str, float]:
    part, _, seconds = text.partition("=")
    if part not in LIMITS_S:
        raise argparse.ArgumentTypeError(f"{part!r} isn't one of {', '.join(LIMITS_S)}")
    return part, float(seconds)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for JSON and charts")
    parser.add_argument("--parts", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--limits", nargs="*", default=[], type=limit, metavar="PART=SECONDS")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, help="left out: a rank for each GPU")
    parser.add_argument("--ops", nargs="*", default=list(HEADS), choices=list(HEADS))
    lengths = sorted({case.tokens for case in LAYER_CASES})
    parser.add_argument(
        "--tokens",
        nargs="*",
        default=lengths,
        type=int,
        choices=lengths,
        help="of layers, on a rank",
    )
    methods = list(LayerSizes().methods)
    parser.add_argument(
        "--methods", nargs="*", default=methods, choices=methods, help="of layers, beside none"
    )
    parser.add_argument(
        "--fla-tuning", default="off", choices=["default", "off"], help="of its kernels, in layers"
    )
    parser.add_argument("--tiny", action="store_true", help="sizes to try the script itself with")
    given = parser.parse_args(arguments)
    given.limits = {**LIMITS_S, **dict(given.limits)}
    given.started = time.time()
    if given.ranks is None:
        given.ranks = torch.cuda.device_count() if given.device == "cuda" else 2
    given.machine = torch.cuda.get_device_name(0) if given.device == "cuda" else "cpu"
    return given


def main(arguments: list[str]) -> int:
    # Streams of scans, messages and parameters are more than the 8 that a GPU serves by default.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    given = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="zeco-gpus-") as folder:
        store = Store(Path(folder))
        try:
            with Watch(store, ("prepared", *RUNS), given.limits, partial(write, given)):
                run_all(given, store)
        finally:  # whoever ends this early keeps what there is
            figures = store.figures(RUNS)
            draw(given, figures)
    bad = [part for part, found in figures.items() if "failed" in found or found.get("wrong")]
    for part in bad:
        print(f"{part}: {figures[part].get('failed') or figures[part]['wrong']}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
