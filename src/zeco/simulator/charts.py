"""Charts of simulations as PNG, and timelines as Chrome traces; everything says that it is simulated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from zeco.core.engine import Span
from zeco.simulator.beyond import Beyond
from zeco.simulator.paper import Row
from zeco.simulator.simulation import Outcome

MAX_DRAWN = 32
"""Devices of a timeline that are drawn."""


def write_trace(path: Path, spans: Sequence[Span], *, title: str) -> None:
    """Write a timeline that chrome://tracing and Perfetto open.

    Args:
        path: of the JSON file.
        spans: what took place; messages get a row of their own beside their sender's phases.
        title: shown as metadata.
    """
    events = [
        {
            "name": span.name if span.peer is None else f"to rank {span.peer}",
            "ph": "X",
            "ts": span.start_s * 1e6,
            "dur": (span.stop_s - span.start_s) * 1e6,
            "pid": f"rank {span.rank}",
            "tid": "messages" if _is_message(span) else "compute",
            "args": {"bytes": span.num_bytes},
        }
        for span in spans
    ]
    document = {"traceEvents": events, "otherData": {"title": f"{title} (simulated)"}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def _is_message(span: Span) -> bool:
    return span.peer is not None or span.name == "all-gather"


def draw_timeline(path: Path, outcome: Outcome) -> None:
    """Draw the first devices' phases and messages."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots()
    spans = [s for s in outcome.spans if s.rank < MAX_DRAWN]
    names = list(dict.fromkeys("messages" if _is_message(s) else s.name for s in spans))
    for number, name in enumerate(names):
        chosen = [s for s in spans if ("messages" if _is_message(s) else s.name) == name]
        shift, height = (0.25, 0.2) if name == "messages" else (-0.1, 0.5)
        axes.barh(
            [s.rank + shift for s in chosen],
            [(s.stop_s - s.start_s) * 1e3 for s in chosen],
            left=[s.start_s * 1e3 for s in chosen],
            height=height,
            color=f"C{number}",
            label=name,
        )
    axes.invert_yaxis()
    axes.set(xlabel="ms", ylabel="rank", title=f"{outcome.method}, one layer (simulated)")
    figure.legend(loc="outside lower center", ncols=len(names), fontsize="small")
    _save(figure, path)


def draw_methods(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Draw each method's step, the time that it stands still marked."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    names = [o.method for o in outcomes]
    axes.bar(names, [(o.step_s - o.exposed_s) * 1e3 for o in outcomes], label="computing")
    axes.bar(
        names,
        [o.exposed_s * 1e3 for o in outcomes],
        bottom=[(o.step_s - o.exposed_s) * 1e3 for o in outcomes],
        label="standing still",
    )
    axes.set(ylabel="ms", title="A step of all layers (simulated)")
    axes.legend()
    _save(figure, path)


def draw_paper(path: Path, rows: Sequence[Row]) -> None:
    """Draw predictions against published figures."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    all_axes = figure.subplots(1, 3)
    for axes, start in zip(all_axes, ("All-", "operator", "throughput"), strict=True):
        names = dict.fromkeys(r.figure for r in rows if r.figure.lower().startswith(start.lower()))
        for number, name in enumerate(names):
            chosen = [r for r in rows if r.figure == name]
            gpus = [r.gpus for r in chosen]
            axes.plot(gpus, [r.published for r in chosen], "o", color=f"C{number}", label=name)
            axes.plot(gpus, [r.predicted for r in chosen], "--", color=f"C{number}")
        axes.axvline(90, color="grey", linewidth=0.5)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="GPUs", ylabel=next(r.unit for r in rows if r.figure in names))
        axes.legend(fontsize="small")
    figure.suptitle("Dots published, lines simulated; fitted left of the grey line only")
    _save(figure, path)


def draw_beyond(path: Path, found: Sequence[Beyond]) -> None:
    """Draw the scans' times over the number of GPUs."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    gpus = [b.gpus for b in found]
    axes.plot(gpus, [b.gather_s * 1e3 for b in found], "o-", label="all-gather")
    axes.plot(gpus, [b.chain_s * 1e3 for b in found], "o-", label="chain")
    axes.plot(gpus, [b.scan_s * 1e3 for b in found], "o-", label="best scan")
    axes.axhline(found[0].hidden_s * 1e3, color="grey", label="least time to hide in")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="GPUs", ylabel="ms", title="One scan of a 2 MiB state (simulated)")
    axes.legend()
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
