"""Start the ranks of a run, or join those that torchrun started.

Own ranks find each other through a file in a temporary folder: no port has to be free. When one
fails, all are ended at once and its error is the one that is shown; when the parent goes, they go.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from zeco.core.errors import ConfigError, RankFailedError, ZecoError

R = TypeVar("R")


@dataclass(frozen=True)
class World:
    """This process among all ranks of a run.

    Attributes:
        rank: 0 to size - 1.
        size: all ranks.
        device: where this rank computes.
    """

    rank: int
    size: int
    device: torch.device


def launch(
    function: Callable[..., R], *arguments: Any, num_ranks: int | None = None, device: str = "auto"
) -> R:
    """Run ``function(world, *arguments)`` on every rank.

    Under torchrun this process is one rank and the others run elsewhere. Otherwise ``num_ranks``
    processes are started (none for one rank, which needs no process group), each with its share of
    the cores; function and arguments must then be picklable.

    Args:
        function: what a rank does; collectives may be used in it when there is more than one.
        arguments: passed on.
        num_ranks: ranks wanted; None is torchrun's number, or 1.
        device: "auto", "cpu" or "cuda"; "auto" is CUDA where there is one.

    Returns:
        What the function returned in this process, or on rank 0 of those that were started.

    Raises:
        ConfigError: ``num_ranks`` differs from torchrun's, or there are too few devices.
        RankFailedError: a started rank raised or died; names the rank and its error.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        size = int(os.environ["WORLD_SIZE"])
        if num_ranks not in (None, size):
            raise ConfigError(
                f"{num_ranks} ranks were asked for, but torchrun started {size}; "
                f"use torchrun --nproc-per-node {num_ranks}"
            )
        return _run_under_torchrun(function, arguments, device)
    num_ranks = num_ranks or 1
    kind = choose_device(device, num_ranks)
    if num_ranks == 1:
        return function(World(0, 1, _device(kind, 0)), *arguments)
    with tempfile.TemporaryDirectory(prefix="zeco-ranks-") as folder:
        return _start_ranks(function, arguments, num_ranks, kind, Path(folder))


def choose_device(device: str, num_local_ranks: int) -> str:
    """Return "cpu" or "cuda" for the ranks of this machine, or refuse."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and not available):
        return "cpu"
    if available < num_local_ranks:
        raise ConfigError(
            f"device={device!r} gives each of {num_local_ranks} ranks a CUDA device, but this "
            f"machine has {available}; use --device cpu or at most {available} ranks"
        )
    return "cuda"


def _device(kind: str, local_rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _init(kind: str, **where: Any) -> None:
    dist.init_process_group("gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl", **where)


def _run_under_torchrun(function: Callable[..., R], arguments: Sequence[Any], device: str) -> R:
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    kind = choose_device(device, num_local)
    on = _device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_num_threads(max(1, _cores() // num_local))
    world = World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), on)
    _init(kind, init_method="env://")
    try:
        return function(world, *arguments)
    finally:
        dist.destroy_process_group()


def _start_ranks(
    function: Callable[..., R], arguments: Sequence[Any], num_ranks: int, kind: str, folder: Path
) -> R:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=_rank_main,
            args=(function, arguments, rank, num_ranks, kind, str(folder)),
            name=f"zeco-rank-{rank}",
            daemon=True,
        )
        for rank in range(num_ranks)
    ]
    with _termination_raised():
        try:
            with _interrupts_ignored():
                for process in processes:
                    process.start()
            _wait_for_all(processes, folder)
        finally:
            _end(processes)
    return pickle.loads((folder / "result").read_bytes())


def _interrupts_ignored() -> AbstractContextManager[None]:
    """Let children inherit that Ctrl-C is not theirs to handle: this process ends them."""
    return _handling(signal.SIGINT, signal.SIG_IGN)


def _termination_raised() -> AbstractContextManager[None]:
    """Make SIGTERM an exception, so that ranks are ended and their folder is removed."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    return _handling(signal.SIGTERM, leave)


@contextmanager
def _handling(signum: signal.Signals, handler: Any) -> Generator[None]:
    """Handle a signal otherwise for a while; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signum, handler)
    try:
        yield
    finally:
        signal.signal(signum, previous)


def _wait_for_all(processes: Sequence[SpawnProcess], folder: Path) -> None:
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        for sentinel in wait(list(running)):
            rank = running.pop(int(sentinel))  # pyright: ignore[reportArgumentType]
            processes[rank].join()
            if processes[rank].exitcode != 0:
                _raise_first_error(processes, rank, folder)


def _raise_first_error(processes: Sequence[SpawnProcess], rank: int, folder: Path) -> NoReturn:
    """Raise the earliest error that ranks left behind: later ones are its consequences."""
    errors = [json.loads(path.read_text()) for path in folder.glob("error-*.json")]
    if not errors:
        code = processes[rank].exitcode or 0
        if code < 0:
            raise RankFailedError(
                f"rank {rank} was killed by signal {-code}; it may have run out of memory"
            )
        raise RankFailedError(f"rank {rank} exited with code {code}; its output above tells more")
    first = min(errors, key=lambda error: error["time"])
    raised = RankFailedError(f"rank {first['rank']}: {first['message']}")
    raised.add_note(first["traceback"])
    raise raised


def _end(processes: Sequence[SpawnProcess]) -> None:
    alive = [process for process in processes if process.pid is not None and process.is_alive()]
    for process in alive:
        process.terminate()
    deadline = time.monotonic() + 3.0
    for process in alive:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _rank_main(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    rank: int,
    num_ranks: int,
    kind: str,
    folder: str,
) -> None:
    _follow_parent()
    torch.set_num_threads(max(1, _cores() // num_ranks))
    try:
        on = _device(kind, rank)
        rendezvous = f"file://{folder}/rendezvous"
        _init(kind, init_method=rendezvous, rank=rank, world_size=num_ranks)
        result = function(World(rank, num_ranks, on), *arguments)
        if rank == 0:
            Path(folder, "result").write_bytes(pickle.dumps(result))
    except BaseException as error:
        message = str(error) if isinstance(error, ZecoError) else f"{type(error).__name__}: {error}"
        record = {
            "rank": rank,
            "time": time.time(),
            "message": message.partition("\n")[0],
            "traceback": "".join(traceback.format_exception(error)),
        }
        unfinished = Path(folder, f"unfinished-{rank}")
        unfinished.write_text(json.dumps(record))
        unfinished.rename(Path(folder, f"error-{rank}.json"))
        # Leave at once, the group undestroyed: its end would make other ranks fail before this
        # one's message is there, and an orderly exit could wait for ranks that wait for this one.
        _leave(1)
    dist.destroy_process_group()
    # All that this process had to write is written. In the interpreter's own end, threads of torch and
    # gloo that still run have aborted it.
    _leave(0)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _follow_parent() -> None:
    """End this process as soon as its parent is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def follow() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
