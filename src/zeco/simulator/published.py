"""The paper's own figures, which come with the package as data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Series:
    """One published row of figures.

    Attributes:
        name: of what was measured.
        gpus: the numbers of GPUs, ascending.
        values: a figure for each.
    """

    name: str
    gpus: tuple[int, ...]
    values: tuple[float, ...]

    def at(self, gpus: int) -> float:
        """Return the figure for a number of GPUs."""
        return self.values[self.gpus.index(gpus)]

    def upto(self, gpus: int) -> Series:
        """Return the part up to a number of GPUs."""
        kept = [(g, v) for g, v in zip(self.gpus, self.values, strict=True) if g <= gpus]
        return Series(self.name, tuple(g for g, _ in kept), tuple(v for _, v in kept))


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    return json.loads(files("zeco.simulator").joinpath("published.json").read_text("utf-8"))


def source() -> str:
    """Return where the figures come from."""
    return str(_document()["source"])


def own_prototype() -> dict[str, float]:
    """Return this project's own measurement of what sharding adds to an operator."""
    found = _document()["own_prototype"]
    return {name: float(value) for name, value in found.items() if name != "source"}


def series(table: str, name: str) -> Series:
    """Return one row; missing figures are left out.

    Args:
        table: ``"collective_ms"``, ``"operator_ms"`` or ``"throughput_tokens_per_s_per_gpu"``.
        name: of the row.

    >>> series("collective_ms", "all_scan").at(256)
    2.165
    """
    found = _document()[table]
    pairs = [(g, v) for g, v in zip(found["gpus"], found[name], strict=True) if v is not None]
    return Series(name, tuple(g for g, _ in pairs), tuple(float(v) for _, v in pairs))
