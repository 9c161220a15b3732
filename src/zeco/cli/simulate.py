"""``zeco simulate``: schedules on clusters that aren't here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from rich.console import Console

from zeco.benchmarks.record import write_record
from zeco.core.errors import ArgumentError
from zeco.simulator import charts, tables
from zeco.simulator.beyond import (
    SIZES,
    Beyond,
    extra_by_paper_s,
    extra_by_prototype_s,
    limits,
    simulate_beyond,
)
from zeco.simulator.config import SimulationConfig
from zeco.simulator.paper import Row, fitted_parameters, predict_paper
from zeco.simulator.published import source
from zeco.simulator.simulation import Outcome, simulate
from zeco.training.config_file import load_config

SIMULATED = "Simulated, not measured."


@dataclass(frozen=True)
class Arguments:
    """Simulate layers and scans on a cluster, or the paper's own.

    Attributes:
        what: a TOML file; or "paper", to predict its large rows from its small ones; or "beyond",
            for larger clusters with the paper's links.
        out: folder for charts and timelines; none are written without it.
        record: write the figures, with machine and versions, to this JSON file.
    """

    what: tyro.conf.Positional[str]
    out: Path | None = None
    record: Path | None = None


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    given = tyro.cli(Arguments, args=list(arguments), prog="zeco simulate")
    console = Console()
    if given.what == "paper":
        figures = _paper(console, given.out)
    elif given.what == "beyond":
        figures = _beyond(console, given.out)
    elif Path(given.what).suffix == ".toml":
        figures = _config(console, Path(given.what), given.out)
    else:
        raise ArgumentError(
            f"{given.what!r} can't be simulated: give 'paper', 'beyond' or a .toml file"
        )
    console.print(SIMULATED)
    if given.record is not None:
        command = "zeco simulate " + " ".join(arguments)
        write_record(given.record, command=command, figures={"simulated": True, **figures})
    return 0


def _paper(console: Console, out: Path | None) -> dict[str, object]:
    rows = predict_paper()
    console.print(f"Published figures: {source()}", highlight=False)
    for name, value in fitted_parameters().items():
        console.print(f"  {name} = {value:.4g}", highlight=False)
    console.print(tables.paper_table(rows))
    held_out = [r for r in rows if not r.fitted]
    over = [r for r in held_out if abs(r.error) > tables.BOUND]
    console.print(
        f"{len(held_out) - len(over)} of {len(held_out)} rows that nothing was fitted to are "
        f"predicted within {tables.BOUND:.0%}."
    )
    for row in over:
        console.print(f"Not within it: {row.figure} at {row.gpus} GPUs, off by {row.error:+.1%}.")
    if out is not None:
        charts.draw_paper(out / "paper.png", rows)
    return {"fitted": fitted_parameters(), "rows": [_row(r) for r in rows]}


def _row(row: Row) -> dict[str, object]:
    return {**asdict(row), "error": row.error}


def _beyond(console: Console, out: Path | None) -> dict[str, object]:
    found = [simulate_beyond(gpus) for gpus in SIZES]
    console.print(tables.beyond_table(found))
    console.print(
        "Extra work of a step: "
        f"{extra_by_prototype_s() * 1e3:.2f} ms by this project's prototype of the operator, "
        f"{extra_by_paper_s() * 1e3:.2f} ms as the paper's own figures have it."
    )
    for each in found:
        console.print(limits(each), highlight=False)
    if out is not None:
        charts.draw_beyond(out / "beyond.png", found)
    return {"sizes": [_size(each) for each in found]}


def _size(each: Beyond) -> dict[str, object]:
    return {
        "gpus": each.gpus,
        "tokens": each.tokens,
        "best_scan": each.plan.algorithm,
        "num_blocks": each.plan.num_blocks,
        "scan_ms": each.scan_s * 1e3,
        "chain_ms": each.chain_s * 1e3,
        "all_gather_ms": each.gather_s * 1e3,
        "least_hidden_ms": each.hidden_s * 1e3,
        "relative_throughput": each.relative_throughput(extra_by_prototype_s()),
        "relative_throughput_with_the_papers_extra_work": each.relative_throughput(
            extra_by_paper_s()
        ),
    }


def _config(console: Console, path: Path, out: Path | None) -> dict[str, object]:
    outcomes = simulate(load_config(SimulationConfig, path))
    console.print(tables.methods_table(outcomes))
    for outcome in outcomes:
        console.print(tables.phases_table(outcome))
    if out is not None:
        charts.draw_methods(out / "methods.png", outcomes)
        for outcome in outcomes:
            charts.draw_timeline(out / f"{outcome.method}.png", outcome)
            charts.write_trace(
                out / f"{outcome.method}.trace.json", outcome.spans, title=outcome.method
            )
    return {"methods": [_outcome(o) for o in outcomes]}


def _outcome(outcome: Outcome) -> dict[str, object]:
    found = asdict(outcome)
    del found["spans"]
    return found
