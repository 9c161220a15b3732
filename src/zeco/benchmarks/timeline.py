"""Kernels of a run by the GPU's clock and stream, and a picture of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from zeco.benchmarks.device import capture


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


UNKNOWN = -1
"""The stream of a kernel that only a graph's replay has."""


def restream(kernels: list[Kernel], eager: list[Kernel]) -> list[Kernel]:
    """Give a replay's kernels the streams that they ran on in an eager trace of the same run.

    A graph keeps no streams: its branches run on whichever are free. The kernels of one name begin in
    the same order both times; what the eager trace lacks is on the stream `UNKNOWN`.

    >>> eager = [Kernel("product", 7, 0.0, 5.0), Kernel("scan", 9, 1.0, 2.0)]
    >>> [k.stream for k in restream([k._replace(stream=3) for k in eager], eager)]
    [7, 9]
    """
    streams: dict[str, list[int]] = {}
    for kernel in reversed(eager):
        streams.setdefault(kernel.name, []).append(kernel.stream)
    found: list[Kernel] = []
    for kernel in kernels:
        left = streams.get(kernel.name)
        found.append(kernel._replace(stream=left.pop() if left else UNKNOWN))
    return found


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


class Rows(NamedTuple):
    """What a timeline's streams are.

    Attributes:
        layer: the stream of the layer's own kernels, the busiest.
        scans: those on which this rank's scans run.
        others: those of other ranks' kernels on the same GPU, and of messages that are no scan's.
    """

    layer: int
    scans: tuple[int, ...]
    others: tuple[int, ...]


def name_rows(kernels: list[Kernel], *, inside_kernels: bool) -> Rows:
    """Tell a timeline's streams apart.

    Args:
        kernels: of `trace`.
        inside_kernels: whether scans are single kernels (``algorithm="device_chain"``). Then streams
            with anything else are others'.
    """
    streams: dict[int, list[str]] = {}
    for kernel in kernels:
        streams.setdefault(kernel.stream, []).append(kernel.name)
    layer = max(streams, key=lambda stream: len(streams[stream]))
    beside = [stream for stream in streams if stream != layer]
    scans = [s for s in beside if _carries_scans(streams[s], inside_kernels=inside_kernels)]
    return Rows(layer, tuple(scans), tuple(s for s in beside if s not in scans))


def _carries_scans(names: list[str], *, inside_kernels: bool) -> bool:
    if inside_kernels:
        return all("elementwise_scan_kernel" in n or "dense_scan_kernel" in n for n in names)
    # A stream of nothing but a stand-in's messages is a halo's.
    return not all("spin" in n or "FillFunctor" in n for n in names)


class ScanCover(NamedTuple):
    """How a scan lies under compute.

    Attributes:
        start_us: when its first kernel begins.
        stop_us: when its last one ends.
        covered_us: how long of that the layer's own stream computes.
    """

    start_us: float
    stop_us: float
    covered_us: float

    @property
    def share(self) -> float:
        """The part of the scan's time that lies under compute."""
        return self.covered_us / (self.stop_us - self.start_us)


def cover_of_scans(kernels: list[Kernel], rows: Rows) -> list[ScanCover]:
    """Return how each scan of a timeline lies under compute, in the order of time."""
    compute = _spans(_computing(kernels, rows))
    windows = scan_windows(_spans(k for k in kernels if k.stream in rows.scans))
    return [ScanCover(*window, covered_us([window], compute)) for window in windows]


class Pause(NamedTuple):
    """A time in which the layer's own stream computes nothing.

    Attributes:
        start_us: when its last kernel has ended.
        length_us: until the next one begins.
        before: the next one's name.
    """

    start_us: float
    length_us: float
    before: str


def pauses(kernels: list[Kernel], rows: Rows) -> list[Pause]:
    """Return the pauses between a layer's kernels: launches take some time, scan or no scan."""
    return [
        Pause(start, after.start_us - start, after.name)
        for before, after in pairwise(_computing(kernels, rows))
        if (start := before.start_us + before.length_us) < after.start_us
    ]


def _computing(kernels: list[Kernel], rows: Rows) -> list[Kernel]:
    return [k for k in kernels if k.stream == rows.layer and kind_of(k.name) != MESSAGES]


def _spans(kernels: Iterable[Kernel]) -> list[tuple[float, float]]:
    return [(k.start_us, k.start_us + k.length_us) for k in kernels]


MESSAGES = "scans and messages"

# What a kernel's name tells of its work; the first that fits, fits.
KINDS = {
    MESSAGES: (
        "spin",
        "sleep",
        "nccl",
        "memcpy htod",
        "elementwise_scan_kernel",
        "dense_scan_kernel",
    ),
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


class Timeline(NamedTuple):
    """A trace and what is read from it.

    Attributes:
        kernels: of `trace`.
        rows: what their streams are.
        scans: how each scan lies under compute.
    """

    kernels: list[Kernel]
    rows: Rows
    scans: list[ScanCover]


def trace_timelines(
    run: Callable[[], object], count: int, *, inside_kernels: bool, captured: bool
) -> list[Timeline]:
    """Trace a layer's passes several times.

    Args:
        run: the passes, compiled.
        count: of traces.
        inside_kernels: see `name_rows`.
        captured: whether to trace replays of a CUDA graph, in place of launches one by one.
    """
    first = trace(run)
    if captured:
        replay = capture(run)
        replay()
        traces = [restream(trace(replay), first) for _ in range(count)]
    else:
        traces = [first, *(trace(run) for _ in range(count - 1))]
    rows = [name_rows(kernels, inside_kernels=inside_kernels) for kernels in traces]
    return [Timeline(k, r, cover_of_scans(k, r)) for k, r in zip(traces, rows, strict=True)]


def middle_timeline(timelines: list[Timeline]) -> Timeline:
    """Return the one whose scans lie under compute for the middle share of their time.

    Which of two kernels begins first isn't the same every time.
    """
    ordered = sorted(timelines, key=lambda timeline: sum(scan.share for scan in timeline.scans))
    return ordered[(len(ordered) - 1) // 2]


def describe_timeline(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline's figures as JSON takes them, with the pauses in which a scan was in flight."""
    kernels, rows, scans = timeline
    found = pauses(kernels, rows)
    return {
        "scans": [
            {**{n: round(x, 2) for n, x in scan._asdict().items()}, "share": round(scan.share, 4)}
            for scan in scans
        ],
        "median_pause_us": round(median(pause.length_us for pause in found), 2),
        "pauses_beside_scans": [
            [
                (round(pause.start_us, 2), round(pause.length_us, 2), pause.before[:60])
                for pause in found
                if pause.start_us < scan.stop_us
                and scan.start_us < pause.start_us + pause.length_us
            ]
            for scan in scans
        ],
        "rows": rows._asdict(),
        "kernels": [
            [k.name[:60], k.stream, round(k.start_us, 2), round(k.length_us, 2)] for k in kernels
        ],
    }


MARGIN_US = 300.0


def draw_timeline(path: Path, kernels: list[Kernel], rows: Rows, *, title: str) -> None:
    """Write a picture of kernels, a row for each sort of stream, and one around each scan, to a PNG.

    Args:
        path: the file; its folder is made.
        kernels: of `trace`.
        rows: what their streams are.
        title: of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scans = cover_of_scans(kernels, rows)
    figure, grid = pyplot.subplots(
        1 + len(scans),
        figsize=(12, 2.2 * (1 + len(scans))),
        layout="constrained",
        squeeze=False,
    )
    drawings = [row[0] for row in grid]
    for drawing in drawings:
        _draw_rows(drawing, kernels, rows)
    for drawing, scan in zip(drawings[1:], scans, strict=True):
        drawing.set_xlim(scan.start_us - MARGIN_US, scan.stop_us + MARGIN_US)
        drawing.axvspan(scan.start_us, scan.stop_us, color="0.9", zorder=0)
        drawing.set_title(
            f"a scan: {scan.stop_us - scan.start_us:.0f} µs, {scan.share:.0%} of it under compute",
            fontsize=9,
        )
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


def _draw_rows(drawing: Any, kernels: list[Kernel], rows: Rows) -> None:
    names = {"layer": (rows.layer,), "scan": rows.scans, "others": rows.others}
    names = {name: streams for name, streams in names.items() if streams}
    for i, kind in enumerate(KINDS):
        for place, streams in enumerate(names.values()):
            bars = [
                (k.start_us, k.length_us)
                for k in kernels
                if k.stream in streams and kind_of(k.name) == kind
            ]
            if bars:
                drawing.broken_barh(bars, (place - 0.35, 0.7), facecolors=f"C{i}")
        drawing.broken_barh([], (0, 0), facecolors=f"C{i}", label=kind)
    drawing.set_yticks(range(len(names)), list(names))
    drawing.invert_yaxis()
