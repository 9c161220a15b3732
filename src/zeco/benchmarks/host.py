"""A rank on an emulated host: ``python -m zeco.benchmarks.host FOLDER RANK``, started by `hosts`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from zeco.benchmarks.cluster import BURST_BYTES
from zeco.benchmarks.latency import LatentTransport


def main(folder: Path, rank: int) -> None:
    """Join the group, run the task, leave the result or the error in the folder."""
    job = json.loads((folder / "job.json").read_text())
    threading.Thread(target=_follow, args=(job["parent"],), daemon=True).start()
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=job["num_ranks"],
            timeout=timedelta(seconds=job["timeout_s"]),
        )
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("there is no process group after its initialisation")
        nodes = None if job["nodes"] is None else tuple(job["nodes"])
        transport = LatentTransport(group, job["latency_s"], nodes)
        transport.fabric = replace(transport.fabric, burst_bytes=BURST_BYTES)
        module, _, function = job["task"].partition(":")
        found = getattr(importlib.import_module(module), function)(transport, **job["arguments"])
        _leave(folder, f"result-{rank}.json", found)
    except BaseException as error:
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        record = {"rank": rank, "time": time.time(), "message": message}
        _leave(folder, f"error-{rank}.json", record)
        # At once: an orderly end of the group would wait for ranks that wait for this one.
        os._exit(1)
    # Stay until everyone has a result: to leave now would break messages of slower ranks.
    time.sleep(job["timeout_s"])
    os._exit(1)


def _leave(folder: Path, name: str, value: object) -> None:
    unfinished = folder / f"unfinished-{name}"
    unfinished.write_text(json.dumps(value))
    unfinished.rename(folder / name)


def _follow(parent: int) -> None:
    """End this process when the one that started it is gone, however it went."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
