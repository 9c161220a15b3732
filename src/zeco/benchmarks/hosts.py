"""Start a task on every host of an emulated cluster, and collect what the ranks return."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zeco.benchmarks.cluster import ClusterSpec, emulated
from zeco.core.errors import RankFailedError

POLL_S = 0.05


def run_on_hosts(
    spec: ClusterSpec, task: str, arguments: dict[str, Any], *, timeout_s: float = 120.0
) -> list[Any]:
    """Run a task on emulated hosts; return what each rank returned.

    Args:
        spec: the cluster.
        task: ``"module:function"``; called on every rank with its transport and the arguments, as
            keywords. Arguments and results must be representable in JSON.
        arguments: passed on.
        timeout_s: for the whole run; then all ranks are ended. Also the group's timeout.

    Raises:
        GroupError: hosts can't be emulated here.
        RankFailedError: a rank raised or died (the earliest error is told), or time ran out.
    """
    with (
        emulated(spec) as names,
        tempfile.TemporaryDirectory(prefix="zeco-hosts-") as where,
    ):
        folder = Path(where)
        job = {
            "task": task,
            "arguments": arguments,
            "num_ranks": spec.num_ranks,
            "nodes": spec.nodes,
            "latency_s": spec.latency_s,
            "timeout_s": timeout_s,
            "parent": os.getpid(),
        }
        (folder / "job.json").write_text(json.dumps(job))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, name in enumerate(names):
                processes.append(_start(name, folder, rank))
            _wait(processes, folder, timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
            for process in processes:
                process.wait()
        return [
            json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(len(names))
        ]


def _start(namespace: str, folder: Path, rank: int) -> subprocess.Popen[bytes]:
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "zeco.benchmarks.host"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    with (folder / f"output-{rank}").open("wb") as output:
        # A session of its own: Ctrl-C is this process's to handle, which then ends the ranks.
        return subprocess.Popen(
            [*command, str(folder), str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code is not None]
        if failed:
            raise RankFailedError(_first_error(folder, failed[0], codes[failed[0]]))
        waiting = [r for r in range(len(codes)) if not (folder / f"result-{r}.json").exists()]
        if not waiting:
            return
        if time.monotonic() > deadline:
            raise RankFailedError(f"ranks {waiting} did not end within {timeout_s:g} s")
        time.sleep(POLL_S)


def _first_error(folder: Path, rank: int, code: int | None) -> str:
    """Return the earliest error that a rank left: later ones are its consequences."""
    errors = [json.loads(path.read_text()) for path in folder.glob("error-*.json")]
    if errors:
        first = min(errors, key=lambda error: error["time"])
        return f"rank {first['rank']} raised {first['message']}"
    last = (folder / f"output-{rank}").read_text(errors="replace").strip().splitlines()[-1:]
    return f"rank {rank} ended with code {code}; its last words: {' '.join(last) or 'none'}"
