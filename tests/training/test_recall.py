"""The small form of examples/recall.toml: what carries the answers is the state that crosses."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeco.training.config import TrainConfig
from zeco.training.config_file import load_config
from zeco.training.launch import launch
from zeco.training.loop import RunOptions, TrainReport, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "recall.toml"
SMALL = [
    "steps=60",
    "sequence_length=32",
    "schedule.warmup_steps=10",
    "optimizer.learning_rate=1e-2",
    "data.num_pairs=2",
    "data.num_keys=2",
    "data.num_values=2",
    "data.eval_batches=8",
    "model.vocab_size=9",
    "eval_every=none",
    "out=none",
    "parallel.sequence_ranks=2",
]


def accuracy(method: str) -> float:
    config = load_config(TrainConfig, EXAMPLE, overrides=[*SMALL, f"parallel.method={method}"])
    report: TrainReport = launch(train, config, RunOptions(quiet=True), num_ranks=2, device="cpu")
    assert report.after is not None
    return report.after.accuracy


@pytest.mark.timeout(240)
def test_recall_is_learned_across_ranks() -> None:
    assert accuracy("zeco") >= 0.95


@pytest.mark.timeout(240)
def test_recall_stays_at_chance_with_the_exchange_cut_off() -> None:
    # 1024 answers of chance 1/2: five standard deviations are 0.078
    assert accuracy("local") <= 0.5 + 0.08
