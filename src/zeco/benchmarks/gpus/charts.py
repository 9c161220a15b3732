"""Charts of what `benchmarks/multi_gpu.py` measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zeco.benchmarks.op_report import PASSES
from zeco.benchmarks.report import draw_lines


def draw_scans(path: Path, figures: dict[str, Any], machine: str) -> None:
    """Write the scans' times over the states' sizes, all ranks, to a PNG file."""
    rows = figures["rows"]
    most = max((row["ranks"] for row in rows), default=0)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row["state_mib"]):
        if row["ranks"] != most:
            continue
        for name, found in row["in_a_row"].items():
            lines.setdefault(name, []).append((row["state_mib"], found["us"]))
        for name in ("all-gather", "all-to-all"):
            found = row["alone_ms"][name]["forward"]
            lines.setdefault(name, []).append((row["state_mib"], found["median_ms"] * 1e3))
    if not lines:
        return
    draw_lines(
        path,
        lines,
        title=f"Scans over {most} ranks, {figures['kind']} transitions",
        note=f"{machine}; medians of one run; scans and messages in a row, collectives alone",
        axes=("MiB of a state", "µs"),
    )


def draw_layers(path: Path, figures: dict[str, Any], machine: str) -> None:
    """Write the operators' times, all ranks, as bars over no sequence parallelism to a PNG file.

    Where there are times of graphs, those.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    most = max((row["ranks"] for row in figures["rows"]), default=0)
    rows = [row for row in figures["rows"] if row["ranks"] == most]
    if not rows:
        return
    figure, grid = pyplot.subplots(
        len(rows), 2, figsize=(11, 2.6 * len(rows)), layout="constrained", squeeze=False
    )
    for drawings, row in zip(grid, rows, strict=True):
        for drawing, (work, title) in zip(drawings, PASSES.items(), strict=True):
            how = row["times"][-1]["how"]
            times = [t for t in row["times"] if t["pass"] == work and t["how"] == how]
            names = [t["method"].replace(", ", "\n") for t in times]
            colors = ["C0" if n.startswith("zeco") else "C7" for n in names]
            bars = drawing.bar(names, [t["median_ms"] for t in times], color=colors)
            labels = [f"{t['median_ms']:.3g}\n{t['over_none']:.2f} x" for t in times]
            drawing.bar_label(bars, labels=labels, fontsize=6)
            drawing.margins(y=0.25)
            drawing.tick_params(axis="x", labelsize=6)
            tokens = row["tokens_a_rank"]
            drawing.set_title(
                f"{row['op']}, H={row['heads']}, {tokens} tokens a rank, {title}, {how}"
            )
            drawing.title.set_fontsize(8)
            drawing.set_ylabel("ms")
    figure.suptitle(f"{most} ranks; x is over no sequence parallelism")
    figure.supxlabel(f"{machine}; medians of one run", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
