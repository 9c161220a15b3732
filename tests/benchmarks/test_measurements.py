from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from zeco.benchmarks import comm, steps
from zeco.benchmarks.calibration import calibrate
from zeco.benchmarks.report import draw_lines
from zeco.benchmarks.sleep import LayerTimes, SleepSegment, read_layer, stretched_times
from zeco.collectives.groups import transport_of
from zeco.core.errors import ArgumentError
from zeco.core.fabric import LOOPBACK, Link
from zeco.core.fabric_file import fabric_from_dict, fabric_to_dict, read_fabric
from zeco.core.maps import AffineMap
from zeco.core.transitions import Identity
from zeco.testing.processes import run_processes


@pytest.fixture(autouse=True)
def _importable_in_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let spawned ranks import this file's functions: they start with this process's path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


def _measure_comm(kind: str) -> dict[str, object]:
    which = [vars(c) for c in comm.candidates((4,), nodes=True)]
    return comm.measure(
        transport_of(None), shape=[2, 8, 8], kind=kind, which=which, repetitions=2, fabric=None
    )


@pytest.mark.parametrize("kind", comm.KINDS)
def test_comm_compares_right_results(kind: str) -> None:
    ranks = run_processes(2, _measure_comm, kind)
    point = comm.merge(ranks)
    sent = {row["name"]: row["most_ledger_bytes"] for row in point["rows"]}
    assert sent["chain, 1 block"] == sent["chain, 4 blocks"] == 2 * 8 * 8 * 4
    assert all(row["median_ms"] > 0 and row["runs"] == 2 for row in point["rows"])
    assert fabric_from_dict(point["fabric"]) == fabric_from_dict(ranks[1]["fabric"])


def test_comm_refuses_to_time_a_wrong_result() -> None:
    state = torch.ones(1, 1, 2, 2)
    with pytest.raises(ArithmeticError, match="chain: relative error"):
        comm._check(comm.Candidate("chain", "chain"), state * 1.01, state, 0)


def _measure_steps(times: LayerTimes) -> dict[str, object]:
    return steps.measure(
        transport_of(None),
        shape=[2, 4, 4],
        tokens=4,
        times=vars(times),
        methods=list(steps.METHODS),
        repetitions=1,
    )


def test_steps_of_every_method() -> None:
    times = LayerTimes(0.02, 0.05, 0.03, 0.02, 0.05, 0.03)
    found = run_processes(2, _measure_steps, times)
    took = {row["method"]: row["median_ms"] for row in found[0]["rows"]}
    assert took.keys() == steps.METHODS.keys()
    assert all(ms >= 200 for ms in took.values())
    assert took["LASP-1"] >= 400


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_sleeping_pass_runs_once(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    state = torch.zeros(1, 1, 2, 2)
    segment = SleepSegment(LayerTimes(1, 2, 4, 8, 16, 32), AffineMap(state, Identity()))
    if overlaps:
        segment.summarize()
        segment.prepare()
    _, finals = segment.output(state, None)
    assert sum(slept) == 7
    if overlaps:
        segment.adjoint(state, None)
    segment.replay(state, None)
    segment.backward(state, finals)
    assert sum(slept) == 63


def test_sleeps_add_up_to_the_measured_layer() -> None:
    layer = read_layer()
    times = stretched_times(layer, (16, 128, 128), 50e9 * 8)
    assert times.forward_s == pytest.approx(layer["forward_ms"] * 1e-3)
    whole = times.forward_s + times.backward_s
    assert whole == pytest.approx(layer["forward_backward_ms"] * 1e-3)


def _calibrate() -> dict[str, object]:
    transport = transport_of(None)
    transport.nodes = (2, 1)
    return fabric_to_dict(calibrate(transport, repetitions=2))


def test_every_rank_gets_the_same_fabric() -> None:
    found = run_processes(3, _calibrate)
    assert found[0] == found[1] == found[2]
    fabric = fabric_from_dict(found[0])
    assert isinstance(fabric.between, Link)
    may_be_nothing = ("burst_bytes", "start_s", "receive_overhead_s")
    values = [
        v for k, v in vars(fabric).items() if isinstance(v, float) and k not in may_be_nothing
    ]
    assert min(values) > 0


def test_one_rank_has_no_links() -> None:
    with pytest.raises(ArgumentError, match="at least 2 ranks"):
        calibrate(transport_of(None))


def test_fabric_files(tmp_path: Path) -> None:
    path = tmp_path / "fabric.json"
    write = partial(path.write_text, encoding="utf-8")
    write(json.dumps({"figures": {"fabric": fabric_to_dict(LOOPBACK)}}))
    assert read_fabric(path) == LOOPBACK
    write(json.dumps({"figures": {"fabric": {"latency": 1.0}}}))
    with pytest.raises(ArgumentError, match="did you mean 'latency_s'"):
        read_fabric(path)
    write(json.dumps({"figures": {"fabric": {"latency_s": 1.0}}}))
    with pytest.raises(ArgumentError, match="zeco calibrate"):
        read_fabric(path)


def test_a_chart_is_written(tmp_path: Path) -> None:
    lines = {"zeco": [(1.0, 2.0), (2.0, 2.1)]}
    path = tmp_path / "new" / "chart.png"
    draw_lines(path, lines, title="steps", note=steps.SLEEPS, axes=("ranks", "ms"))
    assert path.read_bytes().startswith(b"\x89PNG")
