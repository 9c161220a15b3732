from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zeco.core.errors import ArgumentError, ConfigError
from zeco.models import CausalLM
from zeco.sequence_parallel import SequenceParallel
from zeco.training.checkpoint import latest_checkpoint
from zeco.training.config import TrainConfig
from zeco.training.config_file import load_config
from zeco.training.data import make_source
from zeco.training.launch import World, launch
from zeco.training.loop import RunOptions, TrainReport, train
from zeco.training.mesh import count_ranks
from zeco.training.optimizer import FlatGradients
from zeco.training.step import NUM_EXTRA, evaluate, train_step

LOCAL = World(0, 1, torch.device("cpu"))
TINY_MODEL = ["model.width=16", "model.num_layers=2", "model.num_heads=2"]


def tiny(folder: Path, *overrides: str) -> TrainConfig:
    text = folder / "text.txt"
    if not text.exists():
        words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog;", ""]
        text.write_text(" ".join(words[(i * i) % len(words)] for i in range(1200)))
    base = [
        f"data.path={text}",
        "data.eval_bytes=256",
        "dtype=float64",
        "device=cpu",
        "steps=4",
        "batch_size=4",
        "sequence_length=48",
        "schedule.warmup_steps=2",
        "out=none",
    ]
    return load_config(TrainConfig, None, overrides=[*base, *TINY_MODEL, *overrides])


def run(config: TrainConfig, num_ranks: int = 1, **options: object) -> TrainReport:
    settings = RunOptions(quiet=True, **options)  # pyright: ignore[reportArgumentType]
    return launch(train, config, settings, num_ranks=num_ranks, device="cpu")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_ranks, overrides", [(2, []), (4, ["parallel.data_ranks=2"])])
def test_losses_do_not_depend_on_the_ranks(
    tmp_path: Path, num_ranks: int, overrides: list[str]
) -> None:
    one = run(tiny(tmp_path))
    many = run(tiny(tmp_path, *overrides), num_ranks)
    assert many.losses == pytest.approx(one.losses, rel=1e-10)
    assert one.before is not None
    assert one.after is not None
    assert many.after is not None
    assert many.after.loss == pytest.approx(one.after.loss, rel=1e-10)
    assert many.after.num_tokens == one.after.num_tokens
    assert one.after.loss < one.before.loss
    assert many.num_ranks == 2


@pytest.mark.parametrize("source", ["text", "recall"])
def test_accumulation_equals_one_batch(tmp_path: Path, source: str) -> None:
    common = [f"data.source={source}", "data.eval_batches=1", "data.num_pairs=4"]
    whole = run(tiny(tmp_path, *common), evaluates=False)
    parts = run(tiny(tmp_path, *common, "accumulation=4"), evaluates=False)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-10)


def test_resume_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    whole = run(tiny(tmp_path, f"out={tmp_path / 'whole'}"))
    config = tiny(tmp_path, f"out={tmp_path / 'parts'}", "checkpoint_every=1")
    first = run(config, stop_after=2)
    assert first.checkpoint == latest_checkpoint(tmp_path / "parts")
    second = run(config, resume=tmp_path / "parts")
    assert first.losses + second.losses == whole.losses
    assert second.after == whole.after
    steps = [
        [record for record in map(json.loads, path.read_text().splitlines()) if "loss" in record]
        for path in (tmp_path / "whole/metrics.jsonl", tmp_path / "parts/metrics.jsonl")
    ]
    assert [record["loss"] for record in steps[0]] == list(whole.losses)
    assert [record["loss"] for record in steps[1]] == list(whole.losses)


def test_resume_of_nothing_and_of_another_model(tmp_path: Path) -> None:
    config = tiny(tmp_path, f"out={tmp_path / 'run'}")
    with pytest.raises(ArgumentError, match="holds no checkpoint"):
        run(config, resume=tmp_path)


def test_masked_micro_batches_weigh_by_their_tokens(tmp_path: Path) -> None:
    """A mean of the micro-batches' means would weigh a nearly masked one as much as a full one."""
    config = tiny(tmp_path)
    batch = make_source(config).batch(0, range(4))
    labels = batch["labels"].clone()
    labels[0, 3:] = -100
    labels[1] = -100
    batch = {"input_ids": batch["input_ids"], "labels": labels}
    parts = [{name: x[i : i + 1] for name, x in batch.items()} for i in range(4)]
    found: list[tuple[float, torch.Tensor, int]] = []
    for micro_batches in ([batch], parts):
        torch.manual_seed(0)
        model = CausalLM(config.model).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        gradients = FlatGradients(model.parameters(), num_extra=NUM_EXTRA)
        result = train_step(
            model, optimizer, gradients, micro_batches, SequenceParallel(None), clip_norm=None
        )
        found.append((result.loss, gradients.gradients.clone(), result.num_tokens))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-9, atol=1e-12)
    assert found[0][2] == found[1][2] == 2 + 2 * 47


def test_nothing_to_learn_from_is_refused(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    batch = make_source(config).batch(0, range(1))
    masked = {"input_ids": batch["input_ids"], "labels": torch.full_like(batch["labels"], -100)}
    model = CausalLM(config.model).double()
    with pytest.raises(ArgumentError, match="no held-out label is counted"):
        evaluate(model, [masked], SequenceParallel(None))


def test_small_vocabulary_is_refused(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    config = replace(config, model=replace(config.model, vocab_size=100))
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 100 must be at least 256"):
        train(LOCAL, config, RunOptions(quiet=True))


def test_ranks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = tiny(tmp_path, "parallel.data_ranks=2").parallel
    assert count_ranks(config, None) == (2, 1)
    with pytest.raises(ConfigError, match="doesn't divide 3 ranks"):
        count_ranks(config, 3)
    with pytest.raises(ConfigError, match="is 6, but there are 4 ranks"):
        count_ranks(replace(config, sequence_ranks=3), 4)
