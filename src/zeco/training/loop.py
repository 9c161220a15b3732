"""The training loop: what every rank of a run does from the first step to the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from zeco.core.errors import ConfigError
from zeco.models import CausalLM, count_parameters
from zeco.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from zeco.training.config import TrainConfig
from zeco.training.config_file import to_toml
from zeco.training.data import Batch, Source, make_source
from zeco.training.launch import World
from zeco.training.mesh import Mesh, make_mesh
from zeco.training.metrics import Reporter
from zeco.training.optimizer import FlatGradients, learning_rate, make_optimizer
from zeco.training.sharding import ShardedGradients, shard_model
from zeco.training.step import NUM_EXTRA, Evaluation, evaluate, train_step

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class RunOptions:
    """How much of a configured run to do.

    Attributes:
        resume: a run's folder or a checkpoint to go on from.
        stop_after: stop at this many steps; the schedule stays that of all steps.
        evaluates: whether to evaluate at all.
        quiet: whether nothing is shown.
    """

    resume: Path | None = None
    stop_after: int | None = None
    evaluates: bool = True
    quiet: bool = False


@dataclass(frozen=True)
class TrainReport:
    """What a run found.

    Attributes:
        losses: of each step done, in nats.
        before: evaluation before the first step, None when there was none.
        after: evaluation after the last.
        tokens_per_s: sequence tokens over all ranks, by the time of the steps.
        wait_share: time waiting for scans as a share of the steps' time, mean over ranks.
        num_parameters: of the model.
        num_ranks: ranks that shared each sequence.
        checkpoint: the last one's folder, None when nothing was written.
    """

    losses: tuple[float, ...]
    before: Evaluation | None
    after: Evaluation | None
    tokens_per_s: float
    wait_share: float
    num_parameters: int
    num_ranks: int
    checkpoint: Path | None


def check_vocabulary(config: TrainConfig, source: Source) -> None:
    """Refuse a model that has no embedding for some of the source's tokens."""
    if config.model.vocab_size < source.vocab_size:
        raise ConfigError(
            f"config key model.vocab_size = {config.model.vocab_size} must be at least "
            f"{source.vocab_size}, the tokens of data.source = {config.data.source!r}"
        )


def train(world: World, config: TrainConfig, options: RunOptions) -> TrainReport:
    """Run a configuration; called on every rank, see `zeco.training.launch`.

    The model starts from the same parameters on every rank, and they stay the same, since every
    rank applies the same sum of gradients.
    """
    mesh = make_mesh(config.parallel, world)
    source = make_source(config)
    check_vocabulary(config, source)
    model = CausalLM(config.model, seed=config.seed).to(world.device, _DTYPES[config.dtype])
    if config.parallel.shard_parameters:
        shard_model(model, compute_dtype=_DTYPES[config.compute_dtype or config.dtype])
    optimizer = make_optimizer(model, config.optimizer)
    first = 0
    if options.resume is not None:
        first = load_checkpoint(latest_checkpoint(options.resume), model, optimizer)
    last = config.steps if options.stop_after is None else min(options.stop_after, config.steps)
    reporter = Reporter(
        Console(quiet=options.quiet or world.rank != 0),
        out=config.out if world.rank == 0 else None,
        num_steps=config.steps,
        first_step=first,
        log_every=config.log_every,
    )
    with reporter:
        run = _Run(config, options, mesh, source, model, optimizer, reporter)
        return run.steps(first, last, writes=world.rank == 0)


@dataclass(eq=False)
class _Run:
    """The parts of a run that its loop needs at each step."""

    config: TrainConfig
    options: RunOptions
    mesh: Mesh
    source: Source
    model: CausalLM
    optimizer: torch.optim.AdamW
    reporter: Reporter

    def steps(self, first: int, last: int, *, writes: bool) -> TrainReport:
        """Do the steps after ``first`` up to ``last``; one rank writes."""
        config = self.config
        gradients = self._gradients()
        before = after = self._evaluate(first)
        checkpoint: Path | None = None
        losses: list[float] = []
        seconds = waited = 0.0
        sequence_tokens = config.batch_size * config.sequence_length
        for step in range(first, last):
            rate = learning_rate(
                step,
                peak=config.optimizer.learning_rate,
                num_steps=config.steps,
                schedule=config.schedule,
            )
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            result = train_step(
                self.model,
                self.optimizer,
                gradients,
                self._micro_batches(step),
                self.mesh.sp,
                clip_norm=config.optimizer.clip_norm,
            )
            losses.append(result.loss)
            seconds += result.seconds
            waited += result.wait_share * result.seconds
            done = step + 1
            self.reporter.step(done, result, rate=rate, sequence_tokens=sequence_tokens)
            if _is_due(config.eval_every, done) or done == last:
                after = self._evaluate(done)
            if _is_due(config.checkpoint_every, done) or done == last:
                checkpoint = self._save(done, writes=writes)
        return TrainReport(
            losses=tuple(losses),
            before=before,
            after=after,
            tokens_per_s=len(losses) * sequence_tokens / seconds if seconds else 0.0,
            wait_share=waited / seconds if seconds else 0.0,
            num_parameters=count_parameters(self.model),
            num_ranks=self.mesh.sp.size,
            checkpoint=checkpoint,
        )

    def _gradients(self) -> FlatGradients | ShardedGradients:
        parameters = self.model.parameters()
        if self.config.parallel.shard_parameters:
            return ShardedGradients(parameters)
        return FlatGradients(parameters, num_extra=NUM_EXTRA)

    def _micro_batches(self, step: int) -> list[Batch]:
        """Return this replica's rows of a step's batch, in micro-batches."""
        rows = self.config.micro_batch_size
        first = self.mesh.data_rank * self.config.accumulation * rows
        return [
            self.source.batch(step, range(first + m * rows, first + (m + 1) * rows))
            for m in range(self.config.accumulation)
        ]

    def _evaluate(self, step: int) -> Evaluation | None:
        if not self.options.evaluates:
            return None
        batches = self.source.evaluation(self.config.micro_batch_size)
        mine = islice(batches, self.mesh.data_rank, None, self.mesh.num_data)
        found = evaluate(self.model, mine, self.mesh.sp)
        self.reporter.evaluation(step, found)
        return found

    def _save(self, step: int, *, writes: bool) -> Path | None:
        if self.config.out is None:
            return None
        folder = save_checkpoint(
            self.config.out,
            self.model,
            self.optimizer,
            step=step,
            config_toml=to_toml(self.config),
            writes=writes,
        )
        if dist.is_initialized():
            # A rank that goes on and fails must not end the one that still writes.
            dist.barrier()
        return folder


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
