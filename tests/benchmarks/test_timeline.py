from __future__ import annotations

from pathlib import Path

from zeco.benchmarks.timeline import Kernel, by_stream, draw_timeline

KERNELS = [
    Kernel("nvjet_gemm", 7, 0.0, 10.0),
    Kernel("spin_kernel", 13, 5.0, 4.0),
    Kernel("output_walk_kernel", 7, 10.0, 5.0),
]


def test_the_busiest_stream_is_the_layers() -> None:
    scans, compute = by_stream(KERNELS)
    assert scans == [(5.0, 9.0)]
    assert compute == [(0.0, 10.0), (10.0, 15.0)]


def test_a_timeline_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "new" / "timeline.png"
    draw_timeline(path, KERNELS, title="a layer")
    assert path.read_bytes().startswith(b"\x89PNG")
