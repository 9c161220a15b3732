"""``zeco train``: run a configuration on one or more ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from zeco.benchmarks.record import write_record
from zeco.training.baselines import bits
from zeco.training.config import TrainConfig
from zeco.training.config_file import load_config
from zeco.training.data import Source, TextSource, make_source
from zeco.training.launch import launch
from zeco.training.loop import RunOptions, TrainReport, check_vocabulary, train
from zeco.training.mesh import count_ranks
from zeco.training.recall import RecallSource


@dataclass(frozen=True)
class Arguments:
    """Train a language model whose sequences are split over ranks.

    Attributes:
        config: the run's TOML file.
        ranks: start this many ranks on this machine, all used for sequences unless
            parallel.data_ranks says otherwise. Under torchrun its ranks are used.
        data: a file or folder of text in place of data.path.
        steps: in place of steps.
        out: folder for metrics and checkpoints, in place of out.
        device: in place of device.
        override: SECTION.KEY=VALUE, any number of them.
        resume: a run's folder or one of its checkpoints, to go on from.
        record: write the final figures, with machine and versions, to this JSON file.
    """

    config: tyro.conf.Positional[Path]
    ranks: int | None = None
    data: Path | None = None
    steps: int | None = None
    out: Path | None = None
    device: Literal["auto", "cpu", "cuda"] | None = None
    override: Annotated[
        tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")
    ] = ()
    resume: Path | None = None
    record: Path | None = None

    def overrides(self) -> list[str]:
        """Return all changes to the configuration, those of the common flags first."""
        flags = {
            "data.path": self.data,
            "steps": self.steps,
            "out": self.out,
            "device": self.device,
        }
        changes = [f"{key}={value}" for key, value in flags.items() if value is not None]
        if self.ranks is not None:
            # The mesh takes what data_ranks leaves.
            changes.append("parallel.sequence_ranks=none")
        return [*changes, *(text for group in self.override for text in group)]


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    given = tyro.cli(Arguments, args=list(arguments), prog="zeco train")
    config = load_config(TrainConfig, given.config, overrides=given.overrides())
    source = make_source(config)
    check_vocabulary(config, source)
    console = Console(quiet=os.environ.get("RANK", "0") != "0")
    console.print(source.describe(), highlight=False)
    num_ranks = given.ranks if given.ranks is not None else _configured_ranks(config)
    options = RunOptions(resume=given.resume)
    report = launch(train, config, options, num_ranks=num_ranks, device=config.device)
    console.print(_summary(report, source))
    if report.checkpoint is not None:
        console.print(f"checkpoint: {report.checkpoint}", highlight=False, soft_wrap=True)
    if given.record is not None and not console.quiet:
        write_record(
            given.record,
            command="zeco train " + " ".join(arguments),
            figures=_figures(report, source),
        )
        console.print(f"figures: {given.record}", highlight=False)
    return 0


def _configured_ranks(config: TrainConfig) -> int | None:
    """Return how many ranks the configuration wants, None to take torchrun's."""
    if "WORLD_SIZE" in os.environ:
        return None
    replicas, shards = count_ranks(config.parallel, None)
    return replicas * shards


def _figures(report: TrainReport, source: Source) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "ranks_per_sequence": report.num_ranks,
        "parameters": report.num_parameters,
        "steps": len(report.losses),
        "tokens_per_s": report.tokens_per_s,
        "wait_share": report.wait_share,
    }
    for when, found in (("before", report.before), ("after", report.after)):
        if found is not None:
            figures[f"held_out_bits_per_token_{when}"] = bits(found.loss)
            figures[f"held_out_accuracy_{when}"] = found.accuracy
            figures["held_out_tokens"] = found.num_tokens
    if isinstance(source, RecallSource):
        figures["chance_accuracy"] = source.chance
    if isinstance(source, TextSource):
        baselines = source.baselines()
        figures["byte_frequency_entropy"] = baselines.own_frequencies
        figures["gzip_9_bits_per_byte"] = baselines.gzip
    return figures


def _summary(report: TrainReport, source: Source) -> Table:
    table = Table("figure", "value", title="Run")
    for name, value in _figures(report, source).items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
        table.add_row(name.replace("_", " "), text)
    return table
