from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zeco.benchmarks import cluster
from zeco.benchmarks.cluster import ClusterSpec, check_able, emulated, sweep
from zeco.benchmarks.hosts import run_on_hosts
from zeco.cli.main import main
from zeco.core.errors import ArgumentError, GroupError, RankFailedError


def _why_not() -> str:
    try:
        check_able()
        cluster._run(["ip", "netns", "list"])
        with emulated(ClusterSpec(1, 1e9)):
            pass
    except GroupError as error:
        return str(error)
    return ""


WHY_NOT = _why_not() if sys.platform == "linux" else "network namespaces are Linux's"
needs_hosts = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "hosts can be emulated")


def own_namespaces(pid: int) -> list[str]:
    return [name for name in cluster._namespaces() if name.startswith(f"zeco-{pid}-")]


@needs_hosts
@pytest.mark.parametrize("nodes", [None, (1, 2)])
def test_a_message_takes_what_its_link_allows(nodes: tuple[int, ...] | None) -> None:
    spec = ClusterSpec(3, 100e6, nodes, inside_bits_per_s=800e6)
    found = run_on_hosts(
        spec, "zeco.benchmarks.calibration:calibrate_for_json", {"repetitions": 2}, timeout_s=60
    )
    assert found[0] == found[1] == found[2]
    link = found[0] if nodes is None else found[0]["between"]
    assert 100e6 / 8 * 0.6 < link["bandwidth_bytes_per_s"] < 100e6 / 8 * 1.15
    assert own_namespaces(os.getpid()) == []


FAULT = """
import time
def fail_on_rank_1(transport, message):
    if transport.rank == 1:
        raise ValueError(message)
    time.sleep(60)
"""


@needs_hosts
def test_a_rank_that_fails_ends_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_fault.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 raised ValueError: planted"):
        run_on_hosts(
            ClusterSpec(2, 1e9),
            "planted_fault:fail_on_rank_1",
            {"message": "planted"},
            timeout_s=60,
        )
    assert time.monotonic() - start < 30
    assert own_namespaces(os.getpid()) == []


# A test runner in the background may ignore SIGINT, and its children would inherit that.
LAY = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from zeco.benchmarks.cluster import ClusterSpec, emulated
with emulated(ClusterSpec(2, 1e9)):
    print("laid", flush=True)
    time.sleep(30)
"""


@needs_hosts
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(signum: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAY], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"laid\n"
        assert len(own_namespaces(process.pid)) == 3
        process.send_signal(signum)
        process.wait(20)
    if signum == signal.SIGKILL:  # nobody could tidy up: the next one does
        assert len(own_namespaces(process.pid)) == 3
        assert len([n for n in sweep() if n.startswith(f"zeco-{process.pid}-")]) == 3
    assert own_namespaces(process.pid) == []


def test_without_root_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["bench", "cluster", "--ranks", "2"]) == 2
    shown = capsys.readouterr().err
    assert "need root" in shown
    assert shown.count("\n") == 1


def test_without_tools_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(GroupError, match="need ip and tc"):
        check_able()


@pytest.mark.parametrize(
    "given, message",
    [
        (["cluster", "--rate", "200"], "rate '200' isn't a positive number with a unit"),
        (["cluster", "--nodes", "2,x"], "--nodes '2,x'"),
        (["comm", "--ranks", "1"], "at least 2 ranks"),
        (["comm", "--kind", "dens"], "did you mean 'dense'"),
        (["comm", "--state", "16x128"], "heads x keys x values"),
        (["comm", "--fabric", "nowhere.json"], "nowhere.json holds no fabric"),
        (["weak-scaling", "--ranks", "3"], "16 heads don't divide by 3 ranks"),
        (["weak-scaling", "--methods", "zecco"], "did you mean 'zeco'"),
        (["overlap", "--layer", "nowhere.json"], "no layer's times"),
        (["overlap", "--repetitions", "0"], "at least 1"),
    ],
)
def test_wrong_use_is_one_line(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *given]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_nodes_must_add_up() -> None:
    with pytest.raises(ArgumentError, match="sum to 3"):
        ClusterSpec(4, 1e9, (1, 2))
