"""Run a function on P ranks that are processes of this machine, with gloo and a file rendezvous."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import pickle
import queue
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeco.core.errors import RankFailedError


def _load(name: str, file: str | None) -> None:
    """Import a module; from its file where its name leads nowhere, as with pytest's importlib mode."""
    if name in sys.modules:
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location(name, file) if file else None
        if spec is None or spec.loader is None:
            raise
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _enter(
    module: tuple[str, str | None],
    call: bytes,
    rank: int,
    num_ranks: int,
    folder: str,
    timeout_s: float,
    results: Any,
) -> None:
    torch.set_num_threads(1)
    _load(*module)
    function, arguments = pickle.loads(call)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        # By value: a tensor shared by handle would be gone with this process.
        results.put((rank, True, pickle.dumps(function(*arguments))))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        results.put((rank, False, f"{type(error).__name__}: {error}\n{text}"))
    finally:
        results.close()
        results.join_thread()
        dist.destroy_process_group()


def run_processes(
    num_ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 60.0,
) -> list[Any]:
    """Call a function in P processes that form the default process group; return all results.

    Args:
        num_ranks: P.
        function: a function of a module, not of another function, as are its results' types; called
            with ``arguments``.
        arguments: passed to every rank.
        timeout_s: of the group's messages and of the whole call.

    Raises:
        RankFailedError: a rank raised (its traceback is in the message) or didn't end in time; the
            others are ended.
    """
    name = function.__module__
    # The program itself is loaded by multiprocessing.
    home = "builtins" if name == "__main__" else name
    module = home, getattr(sys.modules[home], "__file__", None)
    call = pickle.dumps((function, arguments))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="zeco-ranks-") as folder:
        results = context.Queue()
        processes = [
            context.Process(
                target=_enter,
                args=(module, call, rank, num_ranks, folder, timeout_s, results),
                daemon=True,
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, num_ranks, timeout_s)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(results: Any, num_ranks: int, timeout_s: float) -> list[Any]:
    """Take one result of every rank, or raise the error of the first that failed."""
    found: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(found) + len(failures) < num_ranks:
        try:
            rank, good, value = results.get(timeout=timeout_s if not failures else 5)
        except queue.Empty:
            break
        if good:
            found[rank] = pickle.loads(value)
        else:
            failures[rank] = value
    if failures:
        text = "\n".join(f"rank {rank} raised {failures[rank]}" for rank in sorted(failures))
        raise RankFailedError(text)
    missing = [rank for rank in range(num_ranks) if rank not in found]
    if missing:
        raise RankFailedError(f"ranks {missing} gave no result within {timeout_s:g} s")
    return [found[rank] for rank in range(num_ranks)]
