"""The recall task: pairs at the start of a sequence, asked for at its end.

Tokens of one sequence, here with two pairs and four parts::

    | . k3 v1 . k7 v0 . . | . . . . . . . . | . . . . . . . . | . . k7 [v0] . k3 [v1] . |
      pairs                 filler                             questions, answers in []

Only the answers count in the loss. Keys of a sequence are different and each is asked for once;
values are drawn independently, so whoever sees the last part alone can do no better than chance,
one in ``num_values``. With two ranks or more no rank holds a pair and its question: what carries the
answer is the state that crosses ranks. The filler between keeps pairs out of reach of the tokens that
short convolutions get from the rank before, in blocks * (conv_width - 1) tokens in all.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from zeco.core.errors import ConfigError
from zeco.training.config import DataConfig

_IGNORED = -100
_EVALUATION = 1  # keeps the draws of an evaluation apart from those of all steps


class RecallSource:
    """Random sequences of the task.

    Tokens are 0 for filler, then the keys, then the values.

    Args:
        config: sizes of the task.
        batch_size: rows of a step's batch, over all replicas.
        sequence_length: L; a part of it must have room for the pairs.
        seed: of the draws.
    """

    def __init__(
        self, config: DataConfig, *, batch_size: int, sequence_length: int, seed: int
    ) -> None:
        self.config = config
        self.batch_size, self.sequence_length, self.seed = batch_size, sequence_length, seed
        if self._part < 2 * config.num_pairs:
            raise ConfigError(
                f"sequence_length = {sequence_length} in data.num_parts = {config.num_parts} "
                f"leaves parts of {self._part} tokens, but data.num_pairs = {config.num_pairs} "
                f"needs {2 * config.num_pairs}; lengthen the sequence"
            )

    @property
    def _part(self) -> int:
        return self.sequence_length // self.config.num_parts

    @property
    def vocab_size(self) -> int:
        """Filler, keys and values."""
        return 1 + self.config.num_keys + self.config.num_values

    @property
    def chance(self) -> float:
        """The best accuracy without the pairs."""
        return 1 / self.config.num_values

    def describe(self) -> str:
        """Return the task's sizes."""
        c = self.config
        return (
            f"recall: {c.num_pairs} pairs in the first {self._part} of {self.sequence_length} "
            f"tokens, asked for in the last {self._part}; chance is {self.chance:.1%}"
        )

    def batch(self, step: int, rows: range) -> dict[str, Tensor]:
        """Return rows of fresh sequences."""
        whole = self._draw(np.random.default_rng([self.seed, step]), self.batch_size)
        return {name: tensor[rows.start : rows.stop] for name, tensor in whole.items()}

    def evaluation(self, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """Yield sequences that no step draws."""
        for index in range(self.config.eval_batches):
            yield self._draw(np.random.default_rng([self.seed, index, _EVALUATION]), batch_size)

    def _draw(self, generator: np.random.Generator, num_rows: int) -> dict[str, Tensor]:
        L, n = self.sequence_length, self.config.num_pairs
        tokens = np.zeros((num_rows, L), dtype=np.int64)
        labels = np.full((num_rows, L), _IGNORED, dtype=np.int64)
        for row in range(num_rows):
            keys = 1 + generator.permutation(self.config.num_keys)[:n]
            values = generator.integers(0, self.config.num_values, size=n)
            values = values + 1 + self.config.num_keys
            given = self._places(generator)
            tokens[row, given], tokens[row, given + 1] = keys, values
            order = generator.permutation(n)
            asked = L - self._part + self._places(generator)
            tokens[row, asked], tokens[row, asked + 1] = keys[order], values[order]
            labels[row, asked + 1] = values[order]
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    def _places(self, generator: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Draw where in a part its pairs start: in order, two tokens each, gaps at random."""
        n = self.config.num_pairs
        slots = self._part - n
        chosen = np.sort(generator.permutation(slots)[:n])
        return chosen + np.arange(n)
