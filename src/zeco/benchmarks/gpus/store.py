"""What ranks have measured so far, kept where the process that started them sees it; and its watch."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRACE_S = 20.0
"""Given to a part past its time, before it is ended."""

HELPER = "prepare"
"""How the names of child processes begin that aren't ranks."""


@dataclass(frozen=True)
class Store:
    """Figures by name, and the part that runs, between rank 0 and the process that started it.

    Attributes:
        folder: where both see it.
    """

    folder: Path

    def put(self, name: str, value: Any) -> None:
        """Write something, whole or not at all."""
        unfinished = self.folder / f"{name}.unfinished"
        unfinished.write_text(json.dumps(value))
        unfinished.rename(self.folder / f"{name}.json")

    def get(self, name: str) -> Any:
        """Return what was written, or None."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def begin(self, part: str) -> None:
        """Say that a part runs from now on."""
        self.put("running", {"part": part, "since": time.time()})

    def end(self) -> None:
        """Say that none runs."""
        self.put("running", None)

    def fail(self, part: str, reason: str) -> None:
        """Say why a part ended early, beside what it has found."""
        self.put(part, {**(self.get(part) or {}), "failed": reason})

    def figures(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the figures so far."""
        return {name: found for name in names if (found := self.get(name)) is not None}


def has_ended(figures: dict[str, Any] | None) -> bool:
    """Whether a part has run, to its end or not."""
    return figures is not None and ("seconds" in figures or "failed" in figures)


class Watch:
    """Has the record written as figures come, and ends ranks that are past a part's time.

    Args:
        store: of the ranks, which are child processes of this one.
        names: of the figures.
        limits: seconds of each part.
        write: writes the record.
    """

    def __init__(
        self,
        store: Store,
        names: Iterable[str],
        limits: Mapping[str, float],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self._store, self._names, self._limits, self._write = store, tuple(names), limits, write
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._written: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._update()

    def _update(self) -> None:
        figures = self._store.figures(self._names)
        if figures != self._written:
            self._written = figures
            self._write(figures)

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            self._update()
            running = self._store.get("running")
            if running is None:
                continue
            limit = self._limits[running["part"]]
            if time.time() - running["since"] > limit + GRACE_S:
                reason = f"still ran {GRACE_S:g} s past its {limit:g} s"
                self._store.end()
                self._store.fail(running["part"], reason)
                self._end_ranks()

    def _end_ranks(self) -> None:
        children = multiprocessing.active_children()
        ranks = [child for child in children if not child.name.startswith(HELPER)]
        for rank in ranks:
            rank.kill()
        if not ranks:  # a single rank is this process
            self._update()
            os._exit(1)
