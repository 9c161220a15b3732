from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeco.benchmarks import timeline
from zeco.benchmarks.timeline import (
    UNKNOWN,
    Kernel,
    Pause,
    Rows,
    ScanCover,
    Timeline,
    cover_of_scans,
    describe_timeline,
    draw_timeline,
    middle_timeline,
    name_rows,
    pauses,
    restream,
    trace_timelines,
)

KERNELS = [
    Kernel("nvjet_gemm", 7, 0.0, 10.0),
    Kernel("elementwise_scan_kernel", 13, 5.0, 4.0),
    Kernel("spin_kernel", 21, 5.0, 3.0),
    Kernel("output_walk_kernel", 7, 10.0, 5.0),
    Kernel("spin_kernel", 7, 600.0, 8.0),
    Kernel("gradient_walk_kernel", 7, 608.0, 4.0),
    Kernel("elementwise_scan_kernel", 13, 604.0, 16.0),
]


@pytest.mark.parametrize(
    ("scan", "inside_kernels", "rows"),
    [
        ("elementwise_scan_kernel", True, Rows(7, (13,), (21,))),
        ("ncclDevKernel_SendRecv", False, Rows(7, (13,), (21,))),
        ("ncclDevKernel_SendRecv", True, Rows(7, (), (13, 21))),
    ],
)
def test_streams_are_told_apart(scan: str, inside_kernels: bool, rows: Rows) -> None:
    kernels = [k._replace(name=scan) if k.stream == 13 else k for k in KERNELS]
    assert name_rows(kernels, inside_kernels=inside_kernels) == rows


def test_waiting_is_no_compute() -> None:
    """The layer's stream is busy from 600 to 612, but computes for 4 of the second scan's 16."""
    first, second = cover_of_scans(KERNELS, Rows(7, (13,), (21,)))
    assert first == ScanCover(5.0, 9.0, 4.0)
    assert first.share == 1
    assert second == ScanCover(604.0, 620.0, 4.0)
    assert second.share == 0.25


def test_pauses_are_those_of_the_layer() -> None:
    rows = Rows(7, (13,), (21,))
    assert pauses(KERNELS, rows) == [Pause(15.0, 593.0, "gradient_walk_kernel")]
    described = describe_timeline(Timeline(KERNELS, rows, cover_of_scans(KERNELS, rows)))
    assert described["pauses_beside_scans"] == [[], [(15.0, 593.0, "gradient_walk_kernel")]]
    assert described["median_pause_us"] == 593.0
    assert [scan["share"] for scan in described["scans"]] == [1.0, 0.25]
    json.dumps(described)


def test_a_replay_is_given_the_streams_of_the_eager_run() -> None:
    """Kernels of one name in their order, whichever streams the graph's branches have run on."""
    replay = [k._replace(stream=i % 2, start_us=2 * k.start_us) for i, k in enumerate(KERNELS)]
    replay.append(Kernel("Memcpy", 0, 1300.0, 1.0))
    found = restream(replay, KERNELS)
    assert [k.stream for k in found] == [*(k.stream for k in KERNELS), UNKNOWN]
    assert [k.start_us for k in found] == [k.start_us for k in replay]


@pytest.mark.parametrize("captured", [False, True])
def test_timelines_are_of_runs_or_of_replays(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "capture", lambda run: lambda: [*run(), "replayed"])
    monkeypatch.setattr(
        timeline,
        "trace",
        lambda run: [k._replace(stream=0) for k in KERNELS] if len(run()) > 1 else KERNELS,
    )
    found = trace_timelines(lambda: ["run"], 3, inside_kernels=True, captured=captured)
    rows = Rows(7, (13,), (21,))
    assert found == [Timeline(KERNELS, rows, cover_of_scans(KERNELS, rows))] * 3


def test_the_middle_one_is_shown() -> None:
    one, two, three, four = (
        Timeline([], Rows(7, (), ()), [ScanCover(0.0, 10.0, covered)])
        for covered in (9.0, 3.0, 7.0, 5.0)
    )
    assert middle_timeline([one, two, three]) is three
    assert middle_timeline([one, two, three, four]) is four


def test_a_timeline_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "new" / "timeline.png"
    draw_timeline(path, KERNELS, Rows(7, (13,), (21,)), title="a layer")
    assert path.read_bytes().startswith(b"\x89PNG")
