"""Tables and the chart of `zeco bench op`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

PASSES = {"forward": "fwd", "forward_backward": "fwd+bwd"}


def error_table(figures: dict[str, Any]) -> Table:
    """Return the errors of everything that was checked (see `op.measure_op`)."""
    gate = figures["gate"]
    table = Table(
        title=f"{figures['op']}: errors against fp64 on {gate['tokens']} tokens, "
        f"bound {gate['bound']:.0e}",
        title_justify="left",
    )
    names = list(gate["errors"])
    table.add_column("result")
    for name in names:
        table.add_column(name, justify="right")
    for result in gate["errors"][names[0]]:
        row = [gate["errors"][name].get(result) for name in names]
        table.add_row(result, *("" if error is None else f"{error:.1e}" for error in row))
    return table


def time_table(figures: dict[str, Any]) -> Table:
    """Return the times, floors, launches and memory of everything that was timed."""
    B, T, H, K, V = figures["shape_BTHKV"]
    rows = figures["rows"]
    table = Table(
        title=f"{figures['op']}: B={B} T={T} H={H} K={K} V={V}, {figures['dtype']}, gates "
        f"{figures['gates_dtype']}, {figures['decay']} decay, backend {figures['backend_used']}",
        title_justify="left",
        caption="\n".join(_floor_line(work, figures["floors"][work]) for work in _passes(figures)),
        caption_justify="left",
    )
    columns = ["what", "pass", "how", "ms", "quartiles", "/ floor", f"/ {rows[0]['name']}"]
    on_gpu = "launches" in figures
    columns += ["launches", "peak MiB"] if on_gpu else []
    for column in columns:
        table.add_column(column, justify="left" if column in ("what", "pass", "how") else "right")
    for row in rows:
        name, work = row["name"], row["pass"]
        cells = [
            name,
            PASSES[work],
            row["how"],
            f"{row['median_ms']:.3f}",
            f"{row['quartile_1_ms']:.3f}-{row['quartile_3_ms']:.3f}",
            f"{row['over_floor']:.2f}",
            f"{row['over_ours']:.2f}",
        ]
        if on_gpu:
            launches = figures["launches"][name][work]["total"]
            cells += [str(launches), f"{figures['peak_mib'][name][work]:.0f}"]
        table.add_row(*cells)
    return table


def _passes(figures: dict[str, Any]) -> list[str]:
    """Return the passes that were timed."""
    timed = {row["pass"] for row in figures["rows"]}
    return [work for work in PASSES if work in timed]


def _floor_line(work: str, floor: dict[str, float]) -> str:
    return (
        f"floor {PASSES[work]}: {floor['floor_ms']:.3f} ms "
        f"(bytes {floor['bytes_ms']:.3f}, FLOPs {floor['flops_ms']:.3f})"
    )


def added_table(figures: dict[str, Any]) -> Table:
    """Return what a middle rank adds."""
    added = figures["added_by_a_middle_rank"]
    table = Table(
        title=f"A middle one of {added['ranks']} ranks, its scans arrived, against the plain "
        "operator",
        title_justify="left",
    )
    table.add_column("pass")
    table.add_column("added", justify="right")
    for name, share in added["added_share"].items():
        table.add_row(name, f"{share:+.2%}")
    return table


def tables(figures: dict[str, Any]) -> Iterable[Table]:
    """Return all tables that figures have rows for."""
    yield error_table(figures)
    if "rows" in figures:
        yield time_table(figures)
    if "added_by_a_middle_rank" in figures:
        yield added_table(figures)


def draw_times(path: Path, figures: dict[str, Any]) -> None:
    """Write the times as bars, the floors as lines across them, to a PNG file.

    Args:
        path: the file; its folder is made.
        figures: of `op.measure_op`, not refused.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    B, T, H, K, V = figures["shape_BTHKV"]
    passes = _passes(figures)
    width = 4.5 * len(passes)
    figure, (drawings,) = pyplot.subplots(
        1, len(passes), figsize=(width, 4), layout="constrained", squeeze=False
    )
    for drawing, work in zip(drawings, passes, strict=True):
        rows = [row for row in figures["rows"] if row["pass"] == work]
        names = [f"{row['name']}\n{row['how']}" for row in rows]
        colors = ["C0" if row["name"] == "zeco" else "C7" for row in rows]
        bars = drawing.bar(names, [row["median_ms"] for row in rows], color=colors)
        drawing.bar_label(bars, fmt="%.3g", fontsize=8)
        floor = figures["floors"][work]["floor_ms"]
        drawing.axhline(floor, color="C3", linestyle="--", label=f"floor {floor:.3g} ms")
        drawing.set_title(PASSES[work])
        drawing.set_ylabel("ms")
        drawing.legend(fontsize=8)
    figure.suptitle(
        f"{figures['op']}, B={B} T={T} H={H} K={K} V={V}, {figures['dtype']}, gates "
        f"{figures['gates_dtype']}, {figures['decay']} decay"
    )
    figure.supxlabel(f"{figures['device']}; medians of one run", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
