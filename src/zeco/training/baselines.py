"""What a text costs without a language model: the figures that a trained one must beat."""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass

import numpy as np

from zeco.training.corpus import Bytes


@dataclass(frozen=True)
class Baselines:
    """Bits per byte of a held-out text.

    Attributes:
        own_frequencies: its entropy under its own byte frequencies, which nothing that knows
            frequencies only can beat.
        train_frequencies: under the training text's frequencies, each count raised by one.
        gzip: compressed by gzip at level 9.
    """

    own_frequencies: float
    train_frequencies: float
    gzip: float


def measure_baselines(train: Bytes, held_out: Bytes) -> Baselines:
    """Measure a held-out text.

    >>> text = np.frombuffer(b"abababab", dtype=np.uint8)
    >>> measure_baselines(text, text).own_frequencies
    1.0
    """
    counts = np.bincount(held_out, minlength=256).astype(np.float64)
    learned = np.bincount(train, minlength=256).astype(np.float64) + 1
    frequencies = counts / counts.sum()
    present = frequencies > 0
    own = -(frequencies[present] * np.log2(frequencies[present])).sum()
    crossed = -(frequencies * np.log2(learned / learned.sum())).sum()
    compressed = len(gzip.compress(held_out.tobytes(), compresslevel=9, mtime=0))
    return Baselines(float(own), float(crossed), compressed * 8 / len(held_out))


def bits(nats: float) -> float:
    """Convert a loss in nats to bits.

    >>> bits(math.log(4))
    2.0
    """
    return nats / math.log(2)
