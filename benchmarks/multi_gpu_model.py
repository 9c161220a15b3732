"""The model of `multi_gpu.py`: tokens a second, a trace, and the longest sequence it trains on."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeco.benchmarks.gpus.team import METHODS, Team, Told, new_group
from zeco.benchmarks.timeline import Kernel, cover_of_scans, draw_timeline, name_rows, trace
from zeco.benchmarks.timing import spread
from zeco.collectives.single import SingleTransport
from zeco.models import CausalLM, ModelConfig, count_parameters
from zeco.sequence_parallel import SequenceParallel
from zeco.training.config import OptimizerConfig
from zeco.training.optimizer import make_optimizer
from zeco.training.sharding import ShardedGradients, shard_model
from zeco.training.step import Batch, StepResult, train_step

ONE_BILLION = ModelConfig(width=2048, num_layers=24, num_heads=16)
ALONE = "data parallel"
SPLIT = ("zeco, device_chain", "zeco, chain")
KEEPS_BYTES = 120 * 2**30
"""A GPU of less memory recomputes activations at `ModelSizes.tokens`."""

FILL = 0.9
"""The part of a GPU's memory that the longest sequence may be predicted to take."""

GRAIN = 4096
"""Tokens of a rank are a multiple of this."""


@dataclass(frozen=True)
class ModelSizes:
    """What is trained.

    Attributes:
        config: the model, its embedding of bytes.
        tokens: on each rank.
        repetitions: of every step that is timed.
        dtype: of the arithmetic; parameters are fp32.
        longest: tokens on each rank at which the search ends all the same.
    """

    config: ModelConfig = ONE_BILLION
    tokens: int = 32 * 1024
    repetitions: int = 4
    dtype: torch.dtype = torch.bfloat16
    longest: int = 2**22


class Trainer:
    """A model whose parameters are cut over all ranks, and what a step of it needs.

    Args:
        team: all ranks.
        sizes: the model.
    """

    def __init__(self, team: Team, sizes: ModelSizes) -> None:
        self.team = team
        torch.manual_seed(0)
        with team.device:
            self.model = CausalLM(sizes.config)
        self.num_parameters = count_parameters(self.model)
        shard_model(self.model, compute_dtype=sizes.dtype)
        self.optimizer = make_optimizer(self.model, OptimizerConfig(learning_rate=1e-4))
        self.gradients = ShardedGradients(self.model.parameters())
        self.losses: list[float] = []

    def step(self, batch: Batch, sp: SequenceParallel) -> StepResult:
        """Train on a batch once."""
        result = train_step(self.model, self.optimizer, self.gradients, [batch], sp, clip_norm=1.0)
        self.losses.append(result.loss)
        return result


def make_batch(team: Team, tokens: int, seed: int) -> Batch:
    """Return a random sequence, whole."""
    draw = torch.Generator(team.device).manual_seed(seed)
    ids: Tensor = torch.randint(256, (1, tokens), device=team.device, generator=draw)
    return {"input_ids": ids, "labels": ids}


def alone() -> SequenceParallel:
    """Return the context of a sequence that lies whole on its rank."""
    return SequenceParallel(SingleTransport(), method="local")


def split_contexts(team: Team) -> dict[str, SequenceParallel]:
    """Return the contexts of a sequence that is split over the ranks; CPUs have no scan in kernels.

    Their messages go by a communicator of their own, not behind those of the parameters.
    """
    names = SPLIT if team.on_gpu and team.size > 1 else SPLIT[1:]
    group = new_group(team.size, team.device)
    return {name: SequenceParallel(group, **METHODS[name]) for name in names}


def prepare_model(team: Team, sizes: ModelSizes) -> None:
    """Compile a block's kernels, on one rank."""
    with team.device:
        model = CausalLM(replace(sizes.config, num_layers=1)).to(sizes.dtype)
    batch = make_batch(team, sizes.tokens, 0)
    for sp in (alone(), *split_contexts(team).values()):
        logits = model(batch["input_ids"], sp=sp)
        assert isinstance(logits, Tensor)
        logits.float().logsumexp(-1).sum().backward()


def measure_model(team: Team, told: Told, sizes: ModelSizes, picture: Path) -> dict[str, Any]:
    """Time steps on a sequence over all ranks against one sequence a rank, and trace one.

    Args:
        team: all ranks.
        told: called with the figures as they come.
        sizes: the model.
        picture: where the trace is drawn.
    """
    recomputes = team.on_gpu and _memory(team) < KEEPS_BYTES
    sizes = replace(sizes, config=replace(sizes.config, activation_checkpointing=recomputes))
    trainer = Trainer(team, sizes)
    figures = _describe(team, trainer, sizes)
    contexts = split_contexts(team)
    whole = make_batch(team, sizes.tokens * team.size, 0)
    own = make_batch(team, sizes.tokens, 1 + team.rank)
    runs: dict[str, Callable[[], object]] = {ALONE: lambda: trainer.step(own, alone())}
    for name, sp in contexts.items():
        runs[name] = lambda sp=sp: trainer.step(whole, sp)
    if team.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = team.times(runs, sizes.repetitions)
    found = {name: spread(seconds) for name, seconds in times.items()}
    for row in found.values():
        seconds = row["median_ms"] * 1e-3
        row["tokens_per_s_a_rank"] = round(sizes.tokens / seconds, 1)
        row["of_data_parallel"] = round(found[ALONE]["median_ms"] / row["median_ms"], 4)
        flops = 6 * trainer.num_parameters * sizes.tokens
        row["model_tflops_a_rank"] = round(flops / seconds * 1e-12, 2)
    figures |= {"methods": found, "losses": trainer.losses, "complete": True}
    if not all(map(math.isfinite, trainer.losses)):
        figures["wrong"] = {"losses": "not all are finite"}
    if team.on_gpu:
        figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    told(figures)
    if SPLIT[0] in contexts and team.has_time():
        figures["trace"] = _trace(team, lambda: trainer.step(whole, contexts[SPLIT[0]]), picture)
    return figures


def _describe(team: Team, trainer: Trainer, sizes: ModelSizes) -> dict[str, Any]:
    config = sizes.config
    return {
        "complete": False,
        "parameters": trainer.num_parameters,
        "model": {name: getattr(config, name) for name in ("width", "num_layers", "num_heads")}
        | {"layers": list(config.layers), "vocab_size": config.vocab_size},
        "activation_checkpointing": config.activation_checkpointing,
        "parameters_dtype": "float32",
        "compute_dtype": str(sizes.dtype).removeprefix("torch."),
        "sharding": f"FSDP2 over {team.size}",
        "tokens_a_rank": sizes.tokens,
        "memory_gib": round(_memory(team) / 2**30, 2) if team.on_gpu else None,
    }


def _trace(team: Team, step: Callable[[], object], picture: Path) -> dict[str, Any] | None:
    """Draw where the scans of a step lie, of the last two layers; return it of all, of a middle rank.

    All ranks trace, and begin together behind kernels that spin: a rank whose host is behind would keep
    the others' scans waiting.
    """

    def together() -> None:
        team.gather()
        step()

    middle = team.size // 2
    kernels = trace(together)
    found = None
    if team.rank == middle:
        try:
            found = _draw_trace(kernels, f"rank {middle} of {team.size}", picture)
        except Exception as error:  # the step's times are none the worse for it
            found = {"failed": f"{type(error).__name__}: {error}"}
    shared = [found]
    dist.broadcast_object_list(shared, src=middle, group=team.group)
    return shared[0]


def _draw_trace(kernels: list[Kernel], who: str, picture: Path) -> dict[str, Any]:
    rows = name_rows(kernels, inside_kernels=True)
    scans = cover_of_scans(kernels, rows)
    # The last two layers' forward scans and their reverse ones follow each other.
    shown = scans[len(scans) // 2 - 2 : len(scans) // 2 + 2]
    if shown:
        begin, end = shown[0].start_us - 1e3, shown[-1].stop_us + 1e3
        some = [k for k in kernels if begin <= k.start_us <= end]
        draw_timeline(picture, some, rows, title=f"The last two layers in a step, {who}")
    return {
        "who": who,
        "scans": len(scans),
        "scans_us": round(sum(s.stop_us - s.start_us for s in scans), 1),
        "under_compute_us": round(sum(s.covered_us for s in scans), 1),
        "each_us": [round(s.stop_us - s.start_us, 1) for s in scans],
        "shares": [round(s.share, 4) for s in scans],
    }


def measure_longest(team: Team, told: Told, sizes: ModelSizes) -> dict[str, Any]:
    """Double the sequence until the next one would not fit, then take the longest that should.

    Activations are recomputed. What a length needs is predicted from those before, since a rank that
    runs out of memory would leave the others waiting. The longest is trained on twice, and the second
    step timed; the others once.
    """
    sizes = replace(sizes, config=replace(sizes.config, activation_checkpointing=True))
    trainer = Trainer(team, sizes)
    figures = _describe(team, trainer, sizes) | {"rows": []}
    rows: list[dict[str, Any]] = figures["rows"]
    sp = next(iter(split_contexts(team).values()))
    ample = team.on_gpu and _memory(team) >= KEEPS_BYTES
    tokens: int | None = 4 * sizes.tokens if ample else sizes.tokens
    trainer.step(make_batch(team, min(GRAIN, sizes.tokens) * team.size, 0), sp)  # kernels are new
    doubled = True
    while tokens is not None:
        needs_s = 1.1 * rows[-1]["step_s"] * tokens / rows[-1]["tokens_a_rank"] if rows else 0.0
        if not team.has_time(needs_s):
            break
        rows.append(_time_length(team, trainer, sp, tokens, steps=1))
        told(figures)
        following = _next_length(team, rows, sizes) if doubled else None
        doubled = following == 2 * tokens
        if following is None and team.has_time(1.1 * rows[-1]["step_s"]):
            rows[-1] = _time_length(team, trainer, sp, tokens, steps=2)
        tokens = following
    figures["complete"] = tokens is None
    if rows:
        figures["longest"] = max(row["sequence"] for row in rows)
    return figures


def _time_length(
    team: Team, trainer: Trainer, sp: SequenceParallel, tokens: int, *, steps: int
) -> dict[str, Any]:
    """Train on a length; ``steps`` says how often that will have been."""
    batch = make_batch(team, tokens * team.size, 0)
    if steps == 1:
        _clear(team)
    seconds = team.worst([trainer.step(batch, sp).seconds])[0]
    row: dict[str, Any] = {
        "tokens_a_rank": tokens,
        "sequence": tokens * team.size,
        "steps": steps,
        "step_s": round(seconds, 4),
        "us_a_token": round(seconds / (tokens * team.size) * 1e6, 4),
        "tokens_per_s_a_rank": round(tokens / seconds, 1),
    }
    if team.on_gpu:
        peak = torch.cuda.max_memory_reserved() / 2**30
        row["peak_gib"] = round(team.worst([peak])[0], 3)
    return row


def _next_length(team: Team, rows: list[dict[str, Any]], sizes: ModelSizes) -> int | None:
    """Return the next number of tokens of a rank; None at the end.

    Two lengths give a line of memory over tokens.
    """
    last = rows[-1]["tokens_a_rank"]
    if last >= sizes.longest:
        return None
    if not team.on_gpu or len(rows) < 2:
        return min(2 * last, sizes.longest)
    before = rows[-2]
    slope = (rows[-1]["peak_gib"] - before["peak_gib"]) / (last - before["tokens_a_rank"])
    room = FILL * _memory(team) / 2**30 - rows[-1]["peak_gib"]
    fits = last + int(room / max(slope, 1e-12))
    fits = min(2 * last, sizes.longest, fits // GRAIN * GRAIN)
    return fits if fits >= 1.1 * last else None


def _memory(team: Team) -> int:
    """Return the memory of the GPU that has least."""
    return int(team.least([torch.cuda.get_device_properties(team.device).total_memory])[0])


def _clear(team: Team) -> None:
    gc.collect()
    if team.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
