from __future__ import annotations

import numpy as np
import pytest
import torch

from zeco.core.errors import ArgumentError, ConfigError
from zeco.training.config import DataConfig
from zeco.training.corpus import Corpus
from zeco.training.data import TextSource
from zeco.training.recall import RecallSource

TEXT = np.random.default_rng(0).integers(1, 256, 5000).astype(np.uint8)


def text_source(*, seed: int = 0, eval_bytes: int = 10_000, length: int = 64) -> TextSource:
    corpus = Corpus(TEXT[:4000], TEXT[4000:], "test", (1, 1), 0)
    return TextSource(
        corpus, batch_size=6, sequence_length=length, eval_bytes=eval_bytes, seed=seed
    )


def test_batches_depend_on_seed_and_step_alone() -> None:
    whole = text_source().batch(3, range(6))["input_ids"]
    assert whole.shape == (6, 64)
    assert torch.equal(whole, text_source().batch(3, range(6))["input_ids"])
    assert not torch.equal(whole, text_source().batch(4, range(6))["input_ids"])
    assert not torch.equal(whole, text_source(seed=1).batch(3, range(6))["input_ids"])


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_replicas_and_micro_batches_cut_the_same_batch(parts: int) -> None:
    sources = [text_source(), RecallSource(DataConfig(), batch_size=6, sequence_length=128, seed=0)]
    for source in sources:
        rows = 6 // parts
        cut = [source.batch(5, range(i * rows, (i + 1) * rows)) for i in range(parts)]
        for name, whole in source.batch(5, range(6)).items():
            assert torch.equal(torch.cat([part[name] for part in cut]), whole)


def test_windows_lie_in_the_training_text() -> None:
    train = TEXT[:4000].tobytes()
    for row in text_source().batch(0, range(6))["input_ids"]:
        assert bytes(row.tolist()) in train


@pytest.mark.parametrize("eval_bytes", [64, 127, 128, 10_000])
def test_evaluation_predicts_each_byte_once_and_baselines_measure_the_same(eval_bytes: int) -> None:
    source = text_source(eval_bytes=eval_bytes)
    batches = list(source.evaluation(4))
    targets = torch.cat([batch["labels"][:, 1:].flatten() for batch in batches])
    assert np.array_equal(targets.numpy().astype(np.uint8), source.evaluated)
    assert np.array_equal(source.evaluated, TEXT[4001 : 4001 + len(source.evaluated)])
    assert source.baselines().own_frequencies > 0


def test_short_texts_are_refused() -> None:
    with pytest.raises(ArgumentError, match="held-out text has 1000 bytes, fewer than"):
        text_source(length=2000)
    with pytest.raises(ArgumentError, match=r"data\.eval_bytes = 63"):
        text_source(eval_bytes=63)


def test_recall_asks_in_the_last_part_for_pairs_of_the_first() -> None:
    source = RecallSource(DataConfig(), batch_size=50, sequence_length=128, seed=1)
    batch = source.batch(0, range(50))
    tokens, labels = batch["input_ids"], batch["labels"]
    assert int(tokens.max()) < source.vocab_size
    assert not tokens[:, 32:96].any()
    for row, wanted in zip(tokens.tolist(), labels.tolist(), strict=True):
        pairs = {row[i]: row[i + 1] for i in range(31) if 1 <= row[i] <= 32}
        asked = [i for i, label in enumerate(wanted) if label != -100]
        assert len(pairs) == len(asked) == 8
        assert min(asked) >= 96
        assert all(row[i] == wanted[i] == pairs[row[i - 1]] for i in asked)


def test_recall_evaluation_is_fixed_and_not_drawn_by_steps() -> None:
    source = RecallSource(DataConfig(), batch_size=4, sequence_length=128, seed=1)
    first, again = list(source.evaluation(4)), list(source.evaluation(4))
    assert all(
        torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, again, strict=True)
    )
    steps = torch.cat([source.batch(step, range(4))["input_ids"] for step in range(20)])
    for row in torch.cat([batch["input_ids"] for batch in first]):
        assert not (steps == row).all(1).any()


def test_recall_needs_room() -> None:
    with pytest.raises(ConfigError, match="parts of 15 tokens"):
        RecallSource(DataConfig(), batch_size=1, sequence_length=60, seed=0)
