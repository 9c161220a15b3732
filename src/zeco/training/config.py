"""The configuration of a training run: one dataclass a section of the TOML file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zeco.core.errors import ConfigError
from zeco.models import ModelConfig


def _need(condition: bool, key: str, value: Any, accepted: str) -> None:
    if not condition:
        raise ConfigError(f"config key {key} = {value!r} must be {accepted}")


@dataclass(frozen=True)
class DataConfig:
    """What is learned.

    Attributes:
        source: ``text``, or ``recall``: the synthetic task of `zeco.training.recall`.
        path: a file or folder of text; absent, the Python standard library's sources.
        suffixes: file name endings to take from a folder, such as [".txt"]; empty takes all.
        max_bytes: use at most this much of a corpus, whole files chosen by hash; absent, all.
        held_out: the share of files (of bytes, when there is only one file) to evaluate on.
        eval_bytes: evaluate on at most this much of the held-out text.
        num_pairs: recall only: pairs to remember.
        num_keys: recall only: different keys.
        num_values: recall only: different values; chance is one in so many.
        num_parts: recall only: pairs lie in the first of so many equal parts of the sequence,
            their questions in the last.
        eval_batches: recall only: fresh batches that the accuracy is measured on.
    """

    source: Literal["text", "recall"] = "text"
    path: Path | None = None
    suffixes: tuple[str, ...] = ()
    max_bytes: int | None = None
    held_out: float = 0.05
    eval_bytes: int = 1_000_000
    num_pairs: int = 8
    num_keys: int = 32
    num_values: int = 16
    num_parts: int = 4
    eval_batches: int = 16

    def __post_init__(self) -> None:
        _need(0 < self.held_out < 1, "data.held_out", self.held_out, "between 0 and 1")
        _need(self.eval_bytes > 1, "data.eval_bytes", self.eval_bytes, "over 1")
        if self.max_bytes is not None:
            _need(self.max_bytes > 1, "data.max_bytes", self.max_bytes, "over 1")
        for name in ("num_pairs", "num_values", "num_parts", "eval_batches"):
            _need(getattr(self, name) >= 1, f"data.{name}", getattr(self, name), "at least 1")
        _need(
            self.num_keys >= self.num_pairs,
            "data.num_keys",
            self.num_keys,
            f"at least data.num_pairs={self.num_pairs}: keys of a sequence are different",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW; weight decay acts on matrices only.

    Attributes:
        learning_rate: the peak.
        beta1: decay of the gradient's mean.
        beta2: decay of its square's mean.
        eps: added to the root of the square's mean.
        weight_decay: per unit of learning rate, on parameters of two or more dims.
        clip_norm: largest norm of the whole model's gradient; absent, no clipping.
    """

    learning_rate: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        _need(self.learning_rate > 0, "optimizer.learning_rate", self.learning_rate, "over 0")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _need(0 <= value < 1, f"optimizer.{name}", value, "in [0, 1)")
        _need(self.eps > 0, "optimizer.eps", self.eps, "over 0")
        _need(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "at least 0")
        if self.clip_norm is not None:
            _need(self.clip_norm > 0, "optimizer.clip_norm", self.clip_norm, "over 0, or none")


@dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up to the peak, then a half cosine down to a share of it.

    Attributes:
        warmup_steps: steps up to the peak.
        final_share: the last learning rate as a share of the peak.
    """

    warmup_steps: int = 20
    final_share: float = 0.1

    def __post_init__(self) -> None:
        _need(self.warmup_steps >= 0, "schedule.warmup_steps", self.warmup_steps, "at least 0")
        _need(0 <= self.final_share <= 1, "schedule.final_share", self.final_share, "in [0, 1]")


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks share the work.

    Attributes:
        sequence_ranks: ranks that share each sequence; absent, all that aren't used for data.
        data_ranks: replicas that each take their part of the batch.
        method: the sequence-parallel method.
        algorithm: the scan that passes states on.
        num_blocks: pipeline blocks of a state; absent, the method's choice.
        shard_parameters: whether parameters, gradients and optimizer states are cut over all ranks
            (FSDP2), so that each keeps its part only.
    """

    sequence_ranks: int | None = None
    data_ranks: int = 1
    method: str = "zeco"
    algorithm: str = "auto"
    num_blocks: int | None = None
    shard_parameters: bool = False

    def __post_init__(self) -> None:
        _need(self.data_ranks >= 1, "parallel.data_ranks", self.data_ranks, "at least 1")
        for name in ("sequence_ranks", "num_blocks"):
            value = getattr(self, name)
            _need(value is None or value >= 1, f"parallel.{name}", value, "at least 1, or none")


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Attributes:
        steps: optimizer steps of the whole run, which the schedule spans.
        batch_size: sequences a step, over all replicas and micro-batches.
        sequence_length: tokens of a sequence, over all ranks that share it.
        accumulation: micro-batches that a step is cut into.
        seed: of the initial parameters and of the data's order.
        dtype: of parameters, their gradients and the optimizer.
        compute_dtype: of the model's arithmetic; absent, that of the parameters. Another one needs
            ``parallel.shard_parameters``, which makes copies of parameters in it.
        device: ``auto`` takes CUDA where there is one.
        eval_every: evaluate every so many steps; absent, before and after only.
        log_every: steps between lines of progress where no progress bar can be shown.
        out: folder for metrics and checkpoints; absent, nothing is written.
        checkpoint_every: steps between checkpoints to resume from; absent, at the end only.
        model: the model.
        data: what it learns.
        optimizer: how.
        schedule: learning rates.
        parallel: ranks.
    """

    steps: int = 200
    batch_size: int = 4
    sequence_length: int = 2048
    accumulation: int = 1
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float32"
    compute_dtype: Literal["bfloat16", "float32", "float64"] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    eval_every: int | None = None
    log_every: int = 20
    out: Path | None = Path("runs/train")
    checkpoint_every: int | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulation", "log_every"):
            _need(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _need(self.seed >= 0, "seed", self.seed, "at least 0")
        _need(self.sequence_length >= 2, "sequence_length", self.sequence_length, "at least 2")
        for name in ("eval_every", "checkpoint_every"):
            value = getattr(self, name)
            _need(value is None or value >= 1, name, value, "at least 1, or none")
        _need(
            self.compute_dtype in (None, self.dtype) or self.parallel.shard_parameters,
            "compute_dtype",
            self.compute_dtype,
            f"absent or {self.dtype!r} (dtype) without parallel.shard_parameters = true",
        )
        parts = self.accumulation * self.parallel.data_ranks
        _need(
            self.batch_size % parts == 0,
            "batch_size",
            self.batch_size,
            f"a multiple of accumulation * parallel.data_ranks = {parts}",
        )

    @property
    def micro_batch_size(self) -> int:
        """Sequences that one replica takes at once."""
        return self.batch_size // (self.accumulation * self.parallel.data_ranks)
