"""Timelines of layers where their times are known by hand; configurations; files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zeco.cli.simulate import run
from zeco.core.errors import ArgumentError
from zeco.core.fabric import Fabric, Load
from zeco.simulator import charts
from zeco.simulator.cluster import Cluster
from zeco.simulator.layer import METHODS, PassTimes, Work, schedule_of, simulate_pass
from zeco.simulator.simulation import simulate
from zeco.training.config_file import load_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "simulate.toml"
TIMES = PassTimes(projection_s=1.0, state_s=1.0, local_s=3.0, output_s=1.0, rest_s=4.0)
FABRIC = Fabric(0.0, 100.0, 0.0, float("inf"))
WORK = Work(Load(100.0, 0.0), heads=4, token_bytes=400.0, output_bytes=100.0)
CLUSTER = Cluster((3,), FABRIC)


def one_pass(method, cluster=CLUSTER, work=WORK, algorithm="chain"):
    schedule = schedule_of(method, cluster, algorithm, 1, reverse=False)
    return simulate_pass(cluster, TIMES, work, method=method, schedule=schedule)


def test_a_scan_hides_behind_local_work():
    # The state reaches the last rank after two messages of 1 s; local work takes 3 s.
    found = one_pass("zeco")
    assert found.exposed_s == [0.0] * 3
    assert found.stop_s == [TIMES.total_s] * 3


def test_what_local_work_cannot_hide_is_exposed():
    slow = Cluster((3,), replace(FABRIC, bandwidth_bytes_per_s=25.0))
    found = one_pass("zeco", slow)
    # Ready at 2 s, states arrive at 6 s and 10 s, local work is over at 5 s.
    assert found.exposed_s == pytest.approx([0.0, 1.0, 5.0])
    assert found.stop_s == pytest.approx([10.0, 11.0, 15.0])
    assert found.sent_inside_bytes == [100.0, 100.0, 0.0]


def test_lasp1_passes_are_serial():
    found = one_pass("lasp1")
    # A rank's pass of 5 s, then a message of 1 s.
    assert found.exposed_s == pytest.approx([0.0, 6.0, 12.0])
    assert found.stop_s == pytest.approx([10.0, 16.0, 22.0])


def test_lasp2_without_overlap_waits_before_its_local_work():
    assert one_pass("lasp2").exposed_s == [0.0] * 3
    assert one_pass("lasp2_exposed").exposed_s == pytest.approx([2.0] * 3)


def test_all_to_all_is_exposed_and_capped_by_the_heads():
    found = one_pass("all_to_all")
    assert found.exposed_s == pytest.approx([2 * 400 / 3 / 100 + 2 * 100 / 3 / 100] * 3)
    with pytest.raises(ArgumentError, match="4 heads"):
        one_pass("all_to_all", Cluster((5,), FABRIC))


def test_no_sequence_parallelism_exchanges_nothing():
    found = one_pass("none")
    assert found.stop_s == [TIMES.total_s] * 3
    assert sum(found.sent_inside_bytes) + sum(found.exposed_s) == 0


def test_a_slow_device_delays_those_after_it():
    cluster = Cluster((3,), FABRIC, slowness=(1.0, 4.0, 1.0))
    found = one_pass("zeco", cluster)
    assert found.exposed_s == pytest.approx([0.0, 0.0, 8 + 1 - 5])


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Cluster((), FABRIC), "at least one node"),
        (lambda: Cluster((2, 0), FABRIC), "at least 1 each"),
        (lambda: Cluster((2,), FABRIC, slowness=(1.0,)), "1 entries.*2 devices"),
        (lambda: Cluster((2,), replace(FABRIC, latency_s=-1.0)), "latency of -1"),
        (lambda: Cluster((2,), replace(FABRIC, bandwidth_bytes_per_s=0.0)), "bandwidth inside"),
        (lambda: replace(TIMES, rest_s=-1.0), "rest_s=-1"),
        (lambda: one_pass("zecco"), "did you mean 'zeco'"),
    ],
)
def test_what_does_not_add_up_is_refused(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.fixture(scope="module")
def outcomes():
    return simulate(load_config_of_example())


def load_config_of_example():
    from zeco.simulator.config import SimulationConfig

    return load_config(SimulationConfig, EXAMPLE)


def test_the_example_compares_all_methods(outcomes):
    assert {o.method for o in outcomes} == set(METHODS)
    by_method = {o.method: o for o in outcomes}
    assert by_method["none"].step_s <= by_method["zeco"].step_s < by_method["lasp1"].step_s
    assert by_method["lasp2"].scan_bytes > by_method["zeco"].scan_bytes
    assert by_method["zeco"].phases_s["forward: local work"] == pytest.approx(0.5e-3)


def test_charts_and_traces_are_written_and_say_that_they_are_simulated(outcomes, tmp_path):
    charts.draw_methods(tmp_path / "methods.png", outcomes)
    charts.draw_timeline(tmp_path / "zeco.png", outcomes[0])
    charts.write_trace(tmp_path / "zeco.json", outcomes[0].spans, title="zeco")
    trace = json.loads((tmp_path / "zeco.json").read_text())
    assert "simulated" in trace["otherData"]["title"]
    assert {e["ph"] for e in trace["traceEvents"]} == {"X"}
    assert all(e["dur"] >= 0 for e in trace["traceEvents"])
    assert (tmp_path / "methods.png").stat().st_size > 1000


def test_the_command_simulates_a_file_and_records_that_it_did(tmp_path, capsys):
    record = tmp_path / "record.json"
    assert run([str(EXAMPLE), "--record", str(record)]) == 0
    assert "Simulated, not measured." in capsys.readouterr().out
    assert json.loads(record.read_text())["figures"]["simulated"] is True


def test_the_command_says_what_it_can_simulate():
    with pytest.raises(ArgumentError, match=r"'papers' can't be simulated.*\.toml"):
        run(["papers"])
