"""Batches of a run: a function of (seed, step), whatever the number of ranks.

A batch has the whole sequences, with labels in the place of their tokens (not shifted):
`zeco.shard_batch` shifts them over the whole sequence and then cuts. All ranks that share a
sequence draw the same batch, replicas take their rows of it, so a run resumes on other ranks where
it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from zeco.core.errors import ArgumentError
from zeco.training.baselines import Baselines, measure_baselines
from zeco.training.config import DataConfig, TrainConfig
from zeco.training.corpus import VOCAB_SIZE, Bytes, Corpus, load_corpus
from zeco.training.recall import RecallSource

Batch = dict[str, Tensor]


class Source(Protocol):
    """Where batches come from."""

    @property
    def vocab_size(self) -> int:
        """Tokens are 0 to vocab_size - 1."""
        ...

    def describe(self) -> str:
        """Return one line for the user."""
        ...

    def batch(self, step: int, rows: range) -> Batch:
        """Return some rows of a step's batch: input_ids and labels [rows, L], -100 not counted."""
        ...

    def evaluation(self, batch_size: int) -> Iterator[Batch]:
        """Yield the held-out batches, the same ones each time."""
        ...


def make_source(config: TrainConfig) -> Source:
    """Return the source that a configuration names."""
    if config.data.source == "recall":
        return RecallSource(
            config.data,
            batch_size=config.batch_size,
            sequence_length=config.sequence_length,
            seed=config.seed,
        )
    return make_text_source(config)


def make_text_source(config: TrainConfig) -> TextSource:
    """Return the text source of a configuration."""
    return TextSource(
        _load(config.data),
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        eval_bytes=config.data.eval_bytes,
        seed=config.seed,
    )


def _load(data: DataConfig) -> Corpus:
    return load_corpus(
        data.path, suffixes=data.suffixes, held_out=data.held_out, max_bytes=data.max_bytes
    )


class TextSource:
    """Windows of a text, drawn at random to train on and in order to evaluate.

    A window of L tokens has L - 1 to predict, so windows to evaluate on overlap by one token, and
    every held-out byte but the first is predicted exactly once. The tail that fills no window is
    left out, of the evaluation and of `evaluated` alike.

    Args:
        corpus: the text.
        batch_size: rows of a step's batch, over all replicas.
        sequence_length: L.
        eval_bytes: evaluate on at most this much.
        seed: of the draws.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        batch_size: int,
        sequence_length: int,
        eval_bytes: int,
        seed: int,
    ) -> None:
        self.corpus = corpus
        self.batch_size, self.sequence_length, self.seed = batch_size, sequence_length, seed
        for part, text in (("training", corpus.train), ("held-out", corpus.held_out)):
            if len(text) < sequence_length:
                raise ArgumentError(
                    f"data {corpus.name}: the {part} text has {len(text)} bytes, fewer than "
                    f"sequence_length = {sequence_length}; give more text, a larger "
                    "data.held_out, or shorter sequences"
                )
        if eval_bytes < sequence_length:
            raise ArgumentError(
                f"data.eval_bytes = {eval_bytes} is less than sequence_length = "
                f"{sequence_length}; raise it"
            )
        usable = min(len(corpus.held_out), eval_bytes)
        self._num_windows = (usable - 1) // (sequence_length - 1)

    @property
    def vocab_size(self) -> int:
        """Bytes."""
        return VOCAB_SIZE

    @property
    def evaluated(self) -> Bytes:
        """The held-out bytes that an evaluation predicts."""
        return self.corpus.held_out[1 : self._num_windows * (self.sequence_length - 1) + 1]

    def baselines(self) -> Baselines:
        """Return what the bytes that an evaluation predicts cost without a model."""
        return measure_baselines(self.corpus.train, self.evaluated)

    def describe(self) -> str:
        """Return the sizes of both parts."""
        corpus = self.corpus
        skipped = f", {corpus.num_skipped} binary files skipped" if corpus.num_skipped else ""
        return (
            f"{corpus.name}: {len(corpus.train):,} bytes to train on, "
            f"{len(corpus.held_out):,} held out, {len(self.evaluated):,} of them evaluated"
            f"{skipped}"
        )

    def batch(self, step: int, rows: range) -> Batch:
        """Return windows that start anywhere."""
        generator = np.random.default_rng([self.seed, step])
        last = len(self.corpus.train) - self.sequence_length
        starts = generator.integers(0, last, size=self.batch_size, endpoint=True)
        return self._windows(self.corpus.train, [int(starts[row]) for row in rows])

    def evaluation(self, batch_size: int) -> Iterator[Batch]:
        """Yield the held-out text's windows in order; the last batch may be smaller."""
        stride = self.sequence_length - 1
        starts = [window * stride for window in range(self._num_windows)]
        for first in range(0, len(starts), batch_size):
            yield self._windows(self.corpus.held_out, starts[first : first + batch_size])

    def _windows(self, text: Bytes, starts: list[int]) -> Batch:
        rows = [text[start : start + self.sequence_length] for start in starts]
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}
