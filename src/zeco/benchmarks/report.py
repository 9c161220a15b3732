"""Tables and charts of measurements on emulated hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table


def comm_table(point: dict[str, Any]) -> Table:
    """Return the table of one cluster's scans (see `comm.merge`)."""
    chosen = point["chosen"]
    table = Table(
        title=f"{point['ranks']} ranks; auto chose {chosen['algorithm']}, "
        f"{chosen['num_blocks']} blocks",
        title_justify="left",
    )
    columns = ("scan", "median ms", "quartiles ms", "predicted", "sent MiB, ledger", "links", "x")
    for column in columns:
        table.add_column(column, justify="left" if column == "scan" else "right")
    auto = next(row["median_ms"] for row in point["rows"] if row["name"] == "auto")
    for row in point["rows"]:
        table.add_row(
            row["name"],
            f"{row['median_ms']:.2f}",
            f"{row['quartile_1_ms']:.2f}-{row['quartile_3_ms']:.2f}",
            f"{row['predicted_ms']:.2f}" if "predicted_ms" in row else "",
            f"{row['most_ledger_bytes'] / 2**20:.3f}",
            f"{row['most_interface_bytes'] / 2**20:.3f}",
            f"{row['median_ms'] / auto:.2f}",
        )
    return table


def step_table(point: dict[str, Any]) -> Table:
    """Return the table of one cluster's steps (see `steps.run_steps`)."""
    table = Table(
        title=f"{point['ranks']} ranks; {point['compute_ms']:.0f} ms of sleep for computing",
        title_justify="left",
    )
    columns = ("method", "step ms", "quartiles ms", "exposed ms", "share", "waited ms", "sent MiB")
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in point["rows"]:
        table.add_row(
            row["method"],
            f"{row['median_ms']:.1f}",
            f"{row['quartile_1_ms']:.1f}-{row['quartile_3_ms']:.1f}",
            f"{row['exposed_ms']:.1f}",
            f"{row['exposed_share']:.1%}",
            f"{row['wait_ms']:.1f}",
            f"{row['sent_bytes'] / 2**20:.2f}",
        )
    return table


def draw_lines(
    path: Path,
    lines: dict[str, list[tuple[float, float]]],
    *,
    title: str,
    note: str,
    axes: tuple[str, str],
) -> None:
    """Write a chart of lines to a PNG file.

    Args:
        path: the file; its folder is made.
        lines: points by name.
        title: of the chart.
        note: what a reader must know beside it, in the chart itself.
        axes: what the horizontal (by powers of two) and the vertical axis (logarithmic) show.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, drawing = pyplot.subplots(figsize=(7.5, 5), layout="constrained")
    for name, points in lines.items():
        wide = 2.5 if name in ("auto", "zeco") else 1.5
        xs, ys = [x for x, _ in points], [y for _, y in points]
        drawing.plot(xs, ys, marker="o", label=name, linewidth=wide)
    places = sorted({x for points in lines.values() for x, _ in points})
    drawing.set_xscale("log", base=2)
    drawing.set_yscale("log")
    drawing.set_xticks(places, [f"{x:g}" for x in places])
    drawing.set_xlabel(axes[0])
    drawing.set_ylabel(axes[1])
    drawing.set_title(title)
    drawing.grid(visible=True, which="both", alpha=0.25)
    drawing.legend(fontsize=8)
    figure.supxlabel(note, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def lines_of(
    points: Sequence[dict[str, Any]], place: str, name: str, value: str
) -> dict[str, list[tuple[float, float]]]:
    """Return lines by name from points that hold rows.

    >>> lines_of([{"ranks": 2, "rows": [{"name": "auto", "ms": 3.0}]}], "ranks", "name", "ms")
    {'auto': [(2, 3.0)]}
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        for row in point["rows"]:
            lines.setdefault(row[name], []).append((point[place], row[value]))
    return lines
