from __future__ import annotations

from pathlib import Path

import pytest

from zeco.benchmarks.timeline import (
    Kernel,
    Rows,
    ScanCover,
    cover_of_scans,
    draw_timeline,
    name_rows,
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


def test_a_timeline_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "new" / "timeline.png"
    draw_timeline(path, KERNELS, Rows(7, (13,), (21,)), title="a layer")
    assert path.read_bytes().startswith(b"\x89PNG")
