"""Parameters cut over the ranks: the same training, by FSDP2."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zeco.core.errors import ConfigError
from zeco.training.config import TrainConfig
from zeco.training.config_file import load_config
from zeco.training.launch import World, launch
from zeco.training.loop import RunOptions, TrainReport, train

SHARDED = "parallel.shard_parameters=true"


def tiny(folder: Path, *overrides: str) -> TrainConfig:
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 60)
    base = [
        f"data.path={text}",
        "data.eval_bytes=128",
        "dtype=float64",
        "steps=3",
        "batch_size=4",
        "sequence_length=40",
        "schedule.warmup_steps=1",
        "out=none",
        "model.width=16",
        "model.num_layers=2",
        "model.num_heads=2",
    ]
    return load_config(TrainConfig, None, overrides=[*base, *overrides])


def run(config: TrainConfig, num_ranks: int = 2, **options: object) -> TrainReport:
    settings = RunOptions(quiet=True, **options)  # pyright: ignore[reportArgumentType]
    return launch(train, config, settings, num_ranks=num_ranks, device="cpu")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "overrides",
    [
        ["model.activation_checkpointing=true", "accumulation=2"],
        ["parallel.data_ranks=2", "optimizer.clip_norm=0.1"],
    ],
    ids=["one sequence", "replicas"],
)
def test_training_is_the_same(tmp_path: Path, overrides: list[str]) -> None:
    whole = run(tiny(tmp_path, *overrides))
    parts = run(tiny(tmp_path, *overrides, SHARDED))
    assert parts.losses == pytest.approx(whole.losses, rel=1e-12)
    assert parts.num_parameters == whole.num_parameters
    assert whole.after is not None
    assert parts.after is not None
    assert parts.after.loss == pytest.approx(whole.after.loss, rel=1e-12)


@pytest.mark.timeout(120)
def test_a_sharded_run_goes_on_unsharded_and_back(tmp_path: Path) -> None:
    whole = run(tiny(tmp_path))
    folder = tmp_path / "parts"
    config = tiny(tmp_path, f"out={folder}", SHARDED)
    losses = run(config, stop_after=1).losses
    unsharded = replace(config, parallel=replace(config.parallel, shard_parameters=False))
    losses += run(unsharded, num_ranks=1, stop_after=2, resume=folder).losses
    losses += run(config, resume=folder).losses
    assert losses == pytest.approx(whole.losses, rel=1e-12)


@pytest.mark.timeout(120)
def test_arithmetic_in_16_bits_keeps_parameters_wide(tmp_path: Path) -> None:
    options = ["dtype=float32", SHARDED]
    wide = run(tiny(tmp_path, *options), evaluates=False)
    narrow = run(tiny(tmp_path, *options, "compute_dtype=bfloat16"), evaluates=False)
    assert narrow.losses != wide.losses
    assert narrow.losses == pytest.approx(wide.losses, rel=5e-3)


def test_what_needs_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"compute_dtype = 'bfloat16' must be absent or 'float64'"
    ):
        tiny(tmp_path, "compute_dtype=bfloat16")
    with pytest.raises(ConfigError, match="start at least 2, or leave it out"):
        train(World(0, 1, torch.device("cpu")), tiny(tmp_path, SHARDED), RunOptions(quiet=True))
