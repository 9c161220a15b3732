"""Simulations as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from zeco.simulator.beyond import Beyond, extra_by_paper_s, extra_by_prototype_s
from zeco.simulator.paper import FIT_UPTO, Row
from zeco.simulator.simulation import Outcome

BOUND = 0.15
"""The error that predictions of the paper's larger rows are held to."""


def paper_table(rows: Sequence[Row]) -> Table:
    """Return published, predicted and error."""
    table = Table(title=f"The paper's rows (simulated; fitted up to {FIT_UPTO} GPUs)")
    for name in ("figure", "GPUs", "published", "predicted", "error", ""):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for row in rows:
        outside = abs(row.error) > BOUND
        verdict = "fitted" if row.fitted else f"over {BOUND:.0%}" if outside else "held out"
        table.add_row(
            row.figure,
            str(row.gpus),
            f"{row.published:,.6g} {row.unit}",
            f"{row.predicted:,.5g}",
            f"{row.error:+.1%}",
            verdict,
        )
    return table


def beyond_table(found: Sequence[Beyond]) -> Table:
    """Return the scans and steps of every size."""
    table = Table(title="Beyond the paper (simulated)")
    names = ("GPUs", "tokens", "best scan", "ms", "chain ms", "all-gather ms", "scan holds MiB")
    for name in (*names, "of no-SP throughput", "with the paper's extra work"):
        table.add_column(name, justify="right")
    for each in found:
        table.add_row(
            f"{each.gpus:,}",
            f"{each.tokens / 1e6:,.0f}M",
            each.plan.algorithm,
            f"{each.scan_s * 1e3:.3f}",
            f"{each.chain_s * 1e3:.3f}",
            f"{each.gather_s * 1e3:.2f}",
            f"{each.scan_bytes / 2**20:.1f}",
            f"{each.relative_throughput(extra_by_prototype_s()):.1%}",
            f"{each.relative_throughput(extra_by_paper_s()):.1%}",
        )
    return table


def methods_table(outcomes: Sequence[Outcome]) -> Table:
    """Return a line a method."""
    table = Table(title="A step of all layers (simulated)")
    names = ("method", "scan (blocks)", "step ms", "standing still ms", "%")
    for name in (*names, "sent inside MiB", "sent between MiB", "scan holds MiB", "kept MiB"):
        table.add_column(name, justify="left" if name in names[:2] else "right")
    for o in outcomes:
        scan = "-" if o.plan is None else f"{o.plan.algorithm} ({o.plan.num_blocks})"
        sizes = (o.sent_inside_bytes, o.sent_between_bytes, o.scan_bytes, o.kept_bytes)
        table.add_row(
            o.method,
            scan,
            f"{o.step_s * 1e3:.3f}",
            f"{o.exposed_s * 1e3:.3f}",
            f"{o.exposed_s / o.step_s:.1%}" if o.step_s else "-",
            *(f"{size / 2**20:.2f}" for size in sizes),
        )
    return table


def phases_table(outcome: Outcome) -> Table:
    """Return the longest of every phase of one layer."""
    table = Table("phase", "ms", title=f"{outcome.method}, one layer (simulated)")
    for name, seconds in outcome.phases_s.items():
        table.add_row(name, f"{seconds * 1e3:.3f}")
    return table
