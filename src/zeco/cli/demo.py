"""``zeco demo``: a language model learns across ranks, and every loss equals one rank's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from zeco.training.baselines import Baselines, bits
from zeco.training.config import TrainConfig
from zeco.training.config_file import load_config
from zeco.training.data import make_text_source
from zeco.training.launch import launch
from zeco.training.loop import RunOptions, TrainReport, check_vocabulary, train

LOSS_BOUND = 1e-5


@dataclass(frozen=True)
class Arguments:
    """Train on several ranks and on one, and compare; fails when they differ or nothing is learned.

    Attributes:
        config: the run's TOML file, from the repository's root.
        ranks: ranks that share each sequence.
        compare_steps: first steps to repeat on one rank.
        override: SECTION.KEY=VALUE, any number of them.
    """

    config: Path = Path("examples/demo.toml")
    ranks: int = 4
    compare_steps: int = 20
    override: tyro.conf.UseAppendAction[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Outcome:
    """What the demo judges.

    Attributes:
        losses_one: the first losses on one rank.
        losses_many: the same steps' losses on several ranks.
        bits_after: held-out bits per byte after training.
        baselines: of the same bytes.
    """

    losses_one: Sequence[float]
    losses_many: Sequence[float]
    bits_after: float
    baselines: Baselines

    @property
    def largest_difference(self) -> float:
        """The largest relative difference between losses; infinite when one isn't a number."""
        pairs = zip(self.losses_one, self.losses_many, strict=True)
        differences = [abs(a - b) / abs(a) for a, b in pairs]
        return max(d if math.isfinite(d) else math.inf for d in differences)

    @property
    def failures(self) -> list[str]:
        """Return what isn't as it must be."""
        found: list[str] = []
        if self.largest_difference > LOSS_BOUND:
            found.append(
                f"losses on one rank and on several differ by {self.largest_difference:.1e}, "
                f"over {LOSS_BOUND:.0e}"
            )
        if not self.bits_after < self.baselines.own_frequencies:
            found.append(
                f"{self.bits_after:.3f} bits per byte don't beat the byte-frequency entropy "
                f"{self.baselines.own_frequencies:.3f}"
            )
        return found


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    given = tyro.cli(Arguments, args=list(arguments), prog="zeco demo")
    console = Console()
    config = load_config(
        TrainConfig,
        given.config,
        overrides=["parallel.sequence_ranks=none", "data.source=text", *given.override],
    )
    source = make_text_source(config)
    check_vocabulary(config, source)
    console.print(source.describe(), highlight=False)
    console.print(f"training on {given.ranks} ranks", highlight=False)
    many = launch(train, config, RunOptions(), num_ranks=given.ranks, device=config.device)
    steps = min(given.compare_steps, config.steps)
    console.print(f"the first {steps} steps again, on 1 rank", highlight=False)
    alone = replace(config, out=None)
    options = RunOptions(stop_after=steps, evaluates=False, quiet=True)
    one = launch(train, alone, options, num_ranks=1, device=config.device)
    if many.before is None or many.after is None:
        raise RuntimeError("a run with evaluations returned none")
    outcome = Outcome(one.losses, many.losses[:steps], bits(many.after.loss), source.baselines())
    console.print(_table(config, many, outcome, bits(many.before.loss)))
    for failure in outcome.failures:
        console.print(f"FAILED: {failure}", style="bold red", highlight=False)
    return 1 if outcome.failures else 0


def _table(config: TrainConfig, many: TrainReport, outcome: Outcome, before: float) -> Table:
    baselines = outcome.baselines
    table = Table("what", "figure", title="A language model trained across ranks")
    rows = [
        ("ranks that share each sequence", f"{many.num_ranks}"),
        (
            "sequence length, in all and on a rank",
            f"{config.sequence_length:,}, {config.sequence_length // many.num_ranks:,} tokens",
        ),
        (
            f"parameters of {config.model.num_layers} layers ({', '.join(config.model.layers)})",
            f"{many.num_parameters:,}",
        ),
        ("held-out bits per byte before", f"{before:.3f}"),
        (f"held-out bits per byte after {len(many.losses)} steps", f"{outcome.bits_after:.3f}"),
        ("  byte-frequency entropy of the same text", f"{baselines.own_frequencies:.3f}"),
        ("  gzip -9 of the same text", f"{baselines.gzip:.3f}"),
        ("tokens per second, all ranks", f"{many.tokens_per_s:,.0f}"),
        ("share of time waiting for the scan", f"{many.wait_share:.1%}"),
    ]
    for what, figure in rows:
        table.add_row(what, figure)
    table.add_section()
    table.add_row(f"loss (nats) at step, 1 rank | {many.num_ranks} ranks", "")
    pairs = zip(outcome.losses_one, outcome.losses_many, strict=True)
    for step, (one, several) in enumerate(pairs, start=1):
        table.add_row(f"  {step}", f"{one:.7f} | {several:.7f}")
    table.add_row(
        f"largest relative difference (bound {LOSS_BOUND:.0e})",
        f"{outcome.largest_difference:.1e}",
    )
    return table
