"""The script for all GPUs of a host, on CPUs and tiny sizes; what it does when a part fails or hangs."""

from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeco.benchmarks.device import time_in_turn
from zeco.benchmarks.gpus import graphs
from zeco.benchmarks.gpus import store as store_module
from zeco.benchmarks.gpus.check import BOUND
from zeco.benchmarks.gpus.layers import LayerCase, LayerSizes, cases_to_prepare
from zeco.benchmarks.gpus.store import Store, Watch
from zeco.benchmarks.gpus.team import Team
from zeco.core.errors import RankFailedError
from zeco.testing import run_processes

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "multi_gpu.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("multi_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["multi_gpu"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(out: Path, *options: str) -> dict[str, Any]:
    command = [
        sys.executable,
        str(SCRIPT),
        "--device",
        "cpu",
        "--tiny",
        "--out",
        str(out),
        *options,
    ]
    subprocess.run(command, check=True, timeout=280)
    (path,) = out.glob("*.json")
    return json.loads(path.read_text())["figures"]


@pytest.mark.timeout(300)
def test_all_parts_on_two_ranks(tmp_path: Path) -> None:
    figures = run(tmp_path, "--ranks", "2")
    for part in ("check", "scans", "layers", "model", "longest"):
        assert figures[part]["complete"], part
        assert "failed" not in figures[part]
        assert not figures[part].get("wrong")
    assert figures["check"]["checks"] == 3 * 5
    assert 0 < figures["check"]["largest_error"] < BOUND
    # A CPU has no scan inside kernels, and says so.
    assert len(figures["check"]["refused"]) == 3
    (row,) = figures["scans"]["rows"]
    assert "device_chain" in row["refused"]
    assert {"auto", "send and receive"} <= row["in_a_row"].keys()
    assert row["alone_ms"]["auto"].keys() == {"forward", "reverse"}
    for case in figures["layers"]["rows"]:
        methods = {time["method"] for time in case["times"]}
        assert methods == {"none", "zeco", "zeco, chain", "lasp1", "lasp2", "ulysses"}
        assert case["left_out"].keys() == {"fla cp", "zeco, device_chain"}
        assert len(case["times"]) == 2 * len(methods)
        assert {time["how"] for time in case["times"]} == {"eager"}  # a CPU has no graphs
        assert case["ratios"]["eager"]["forward: zeco over none"] > 0
    assert figures["model"]["methods"].keys() == {"data parallel", "zeco, chain"}
    assert all(map(math.isfinite, figures["model"]["losses"]))
    assert [r["sequence"] for r in figures["longest"]["rows"]] == [128, 256, 512]
    charts = {path.name for path in tmp_path.glob("*.png")}
    assert {"gpus_2_scans.png", "gpus_2_layers.png"} <= charts


@pytest.mark.timeout(300)
def test_one_rank_says_what_it_skips(tmp_path: Path) -> None:
    figures = run(tmp_path, "--ranks", "1", "--parts", "check", "scans", "layers")
    assert figures["check"]["virtual_ranks"] == 4
    assert figures["check"]["largest_error"] < BOUND
    assert "skipped" in figures["check"]
    assert "skipped" in figures["scans"]
    methods = {time["method"] for time in figures["layers"]["rows"][0]["times"]}
    assert methods == {"none", "a middle rank, its scans arrived"}


def captured_by(rank_that_fails: int) -> tuple[list[str], dict[str, str]]:
    """Return what a rank captures and what not, where another one fails in the second of three runs."""
    group = dist.group.WORLD
    assert group is not None

    def capture(run: Any, **options: Any) -> Any:
        if run() == "b" and dist.get_rank() == rank_that_fails:
            raise RuntimeError("no graph of this")
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "capture", capture)
        patch.setattr(torch.cuda, "graph_pool_handle", tuple)
        runs = {name: lambda name=name: name for name in "abc"}
        replays, refused = graphs.capture_runs(Team(group, torch.device("cpu")), runs)
    return list(replays), refused


def test_what_one_rank_cannot_capture_no_rank_does() -> None:
    for found, refused in run_processes(2, captured_by, 1):
        assert found == ["a", "c"]
        assert refused == {"b": "rank 1: RuntimeError: no graph of this"}


def test_all_that_ranks_compute_on_is_prepared() -> None:
    sizes = LayerSizes([LayerCase("gla", 64, heads=6), LayerCase("gla", 2**30, heads=6)], 16)
    shapes = {(case.tokens, case.heads) for case in cases_to_prepare(sizes, 4)}
    ulysses = {(2 * 16, 3), (2 * 64, 3)}  # 4 ranks can't share 6 heads
    assert shapes == {(16, 6), (2 * 16, 6), (4 * 16, 6), (64, 6)} | ulysses


def given(script: ModuleType, folder: Path, *options: str) -> Any:
    return script.parse(["--out", str(folder), "--device", "cpu", "--tiny", *options])


def test_a_part_that_fails_loses_no_other(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    calls: list[list[str]] = []

    def launch(function: Any, options: Any, parts: list[str], *rest: Any, **more: Any) -> None:
        calls.append(list(parts))
        for part in parts:
            store.begin(part)
            store.put(part, {"rows": [1]})
            if part == "scans":
                raise RankFailedError("rank 1 was killed by signal 9")
            store.put(part, {"rows": [1], "seconds": 1.0})
            store.end()

    monkeypatch.setattr(script, "launch", launch)
    monkeypatch.setattr(script, "start_preparing", lambda *_: None)
    script.run_all(given(script, tmp_path, "--parts", "check", "scans", "layers"), store)
    assert calls == [["check", "scans", "layers"], ["layers"]]
    figures = store.figures(script.RUNS)
    assert figures["check"] == figures["layers"] == {"rows": [1], "seconds": 1.0}
    assert figures["scans"] == {"rows": [1], "failed": "rank 1 was killed by signal 9"}


def test_a_part_that_the_watch_ended_is_the_only_one_blamed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)

    def launch(function: Any, options: Any, parts: list[str], *rest: Any, **more: Any) -> None:
        if "layers" in parts:
            store.fail("layers", "still ran")
            raise RankFailedError("rank 1 was killed by signal 9")
        store.put("model", {"seconds": 1.0})

    monkeypatch.setattr(script, "launch", launch)
    monkeypatch.setattr(script, "start_preparing", lambda *_: None)
    script.run_all(given(script, tmp_path, "--parts", "layers", "model"), store)
    assert store.figures(script.RUNS) == {
        "layers": {"failed": "still ran"},
        "model": {"seconds": 1.0},
    }


@pytest.mark.timeout(60)
def test_a_part_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "GRACE_S", 0.5)
    store = Store(tmp_path)
    context = multiprocessing.get_context("spawn")
    rank, helper = (
        context.Process(target=time.sleep, args=(600,), name=name, daemon=True)
        for name in ("rank", "prepare-gla")
    )
    rank.start()
    helper.start()
    store.put("scans", {"rows": ["kept"]})
    written: list[dict[str, Any]] = []
    with Watch(store, ["scans"], {"scans": 0.1}, written.append):
        store.begin("scans")
        rank.join(30)
    assert rank.exitcode == -9
    assert helper.is_alive()
    helper.kill()
    assert written[-1]["scans"]["rows"] == ["kept"]
    assert "past its 0.1 s" in written[-1]["scans"]["failed"]


def test_runs_begin_where_the_ranks_meet() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    time_in_turn(runs, torch.device("cpu"), 2, meet=lambda: order.append("meet"))
    timed = order[6:]  # behind three of each to warm up
    assert timed == ["meet", "b", "meet", "a", "meet", "a", "meet", "b"]
