"""Kernels of a run by the GPU's clock and stream, and a picture of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Kernel(NamedTuple):
    """A kernel's place in a timeline.

    Attributes:
        name: of the kernel.
        stream: it ran on.
        start_us: since the run's start.
        length_us: it took.
    """

    name: str
    stream: int
    start_us: float
    length_us: float


HEAD_START_CYCLES = 60_000_000
"""About 30 ms of a GPU's clock: what the host needs to put a layer's kernels into the queue."""


def trace(run: Callable[[], object]) -> list[Kernel]:
    """Return the kernels of a run by the GPU's clock.

    They start behind a kernel that spins, so that the host is through with its launches and what is
    seen is the GPU's own time.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda._sleep(HEAD_START_CYCLES)  # pyright: ignore[reportPrivateUsage]
        run()
        torch.cuda.synchronize()
    results = None if profile.profiler is None else profile.profiler.kineto_results
    if results is None:
        raise RuntimeError("torch.profiler kept no events")
    found = [
        event
        for event in results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0
    ]
    found.sort(key=lambda event: event.start_ns())
    begin, *kernels = found
    start = begin.start_ns() + begin.duration_ns()
    return [
        Kernel(
            e.name(), e.device_resource_id(), (e.start_ns() - start) / 1e3, e.duration_ns() / 1e3
        )
        for e in kernels
    ]


def covered_us(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Return how long spans (start, end) lie under other spans, which don't overlap each other.

    >>> covered_us([(0.0, 4.0)], [(1.0, 2.0), (3.0, 9.0)])
    2.0
    """
    return sum(
        max(0.0, min(stop, end) - max(start, begin))
        for start, stop in spans
        for begin, end in others
    )


def by_stream(kernels: list[Kernel]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the spans of the scans' stream and those of the busiest one, the layer's own."""
    streams: dict[int, list[tuple[float, float]]] = {}
    for kernel in kernels:
        span = kernel.start_us, kernel.start_us + kernel.length_us
        streams.setdefault(kernel.stream, []).append(span)
    order = sorted(streams.values(), key=len)
    return [span for spans in order[:-1] for span in spans], order[-1]


# What a kernel's name tells of its work; the first that fits, fits.
KINDS = {
    "scan": ("spin", "sleep", "nccl", "elementwise_scan_kernel", "dense_scan_kernel"),
    "state passes": ("state_fwd", "segment_scan"),
    "output and gradient passes": ("walk", "pairs", "gate_gradient"),
    "matrix products": ("gemm", "nvjet", "cutlass", "matmul", "splitK"),
    "convolution, norm and gates": ("conv", "norm_", "log_gate"),
    "elementwise": ("",),
}


def kind_of(name: str) -> str:
    """Return the kind of a kernel.

    >>> kind_of("state_fwd_kernel")
    'state passes'
    """
    lower = name.lower()
    return next(kind for kind, parts in KINDS.items() if any(p.lower() in lower for p in parts))


MARGIN_US = 300.0


def draw_timeline(path: Path, kernels: list[Kernel], *, title: str) -> None:
    """Write a picture of kernels, a row for each stream, and one around each scan, to a PNG file.

    Args:
        path: the file; its folder is made.
        kernels: of `trace`.
        title: of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    windows = scan_windows(by_stream(kernels)[0])
    figure, grid = pyplot.subplots(
        1 + len(windows),
        figsize=(12, 2.2 * (1 + len(windows))),
        layout="constrained",
        squeeze=False,
    )
    drawings = [row[0] for row in grid]
    for drawing in drawings:
        _draw_rows(drawing, kernels)
    for drawing, (start, stop) in zip(drawings[1:], windows, strict=True):
        drawing.set_xlim(start - MARGIN_US, stop + MARGIN_US)
        drawing.set_title("around a scan", fontsize=9)
    drawings[0].set_title(title, fontsize=10)
    drawings[-1].set_xlabel("µs")
    drawings[-1].legend(
        fontsize=7, ncols=len(KINDS), loc="upper center", bbox_to_anchor=(0.5, -0.3)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def scan_windows(scans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return where scans lie, their kernels taken together when less than the margin apart.

    >>> scan_windows([(0.0, 4.0), (5.0, 9.0), (900.0, 910.0)])
    [(0.0, 9.0), (900.0, 910.0)]
    """
    found: list[tuple[float, float]] = []
    for start, stop in sorted(scans):
        if found and start - found[-1][1] < MARGIN_US:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def _draw_rows(drawing: Any, kernels: list[Kernel]) -> None:
    streams = {s: i for i, s in enumerate(dict.fromkeys(k.stream for k in kernels))}
    for i, kind in enumerate(KINDS):
        for stream, row in streams.items():
            bars = [
                (k.start_us, k.length_us)
                for k in kernels
                if k.stream == stream and kind_of(k.name) == kind
            ]
            if bars:
                drawing.broken_barh(bars, (row - 0.35, 0.7), facecolors=f"C{i}")
        drawing.broken_barh([], (0, 0), facecolors=f"C{i}", label=kind)
    own = max(streams, key=lambda stream: sum(k.stream == stream for k in kernels))
    names = ["layer" if stream == own else "scan" for stream in streams]
    drawing.set_yticks(list(streams.values()), names)
    drawing.invert_yaxis()
