"""Activation checkpointing without a second exchange: what a scan brought is kept on a tape.

When a checkpointed region runs for the first time, every exchange in it writes its result on a tape;
when the region is recomputed in the backward pass, the same calls read it back, in the same order.
So recomputation never communicates: a layer sends one state forward and one backward, checkpointed or
not, and a rank that recomputes needs no other to do so at the same time.

`checkpoint` does this through the context functions that `torch.utils.checkpoint` takes. A region
that a model checkpoints by itself, with plain ``torch.utils.checkpoint.checkpoint(...,
use_reentrant=False)``, is recognised by the hooks that torch puts around it. Where that fails (the
reentrant form, regions nested in a recomputed one) exchanges run again: right, but twice as much.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

ResultT = TypeVar("ResultT")
Entry = tuple[Tensor, ...]


@dataclass(eq=False)
class Tape:
    """The results of a region's exchanges, in the order in which they were started."""

    entries: list[Entry | None] = field(default_factory=list)


@dataclass(eq=False)
class Run:
    """One run of a region: the first, which writes its tape, or a later one, which reads it."""

    tape: Tape
    replays: bool
    position: int = 0

    def take_slot(self) -> Slot:
        """Return the tape's next place."""
        slot = Slot(self.tape, self.position, self.replays)
        self.position += 1
        if not self.replays:
            self.tape.entries.append(None)
        return slot


@dataclass(frozen=True, eq=False)
class Slot:
    """One exchange's place on a tape."""

    tape: Tape
    position: int
    replays: bool

    def read(self) -> Entry | None:
        """Return what the exchange brought in the first run; None if this is the first run."""
        if not self.replays or self.position >= len(self.tape.entries):
            return None
        return self.tape.entries[self.position]

    def write(self, *results: Tensor) -> None:
        """Keep what the exchange brought."""
        if not self.replays:
            self.tape.entries[self.position] = tuple(r.detach() for r in results)


class _Current(threading.local):
    """The runs of regions that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.runs: list[Run] = []


_current = _Current()
_frames: weakref.WeakKeyDictionary[Any, Tape] = weakref.WeakKeyDictionary()
_replays: weakref.WeakKeyDictionary[Any, dict[Any, Run]] = weakref.WeakKeyDictionary()


def take_slot() -> Slot | None:
    """Return the place of an exchange that starts now; None outside of checkpointed regions."""
    run = _current.runs[-1] if _current.runs else _run_of_plain_checkpoint()
    return None if run is None else run.take_slot()


class _Running:
    """The context of a region's runs; it may be entered many times, each a run of its own."""

    def __init__(self, tape: Tape, *, replays: bool) -> None:
        self._tape = tape
        self._replays = replays

    def __enter__(self) -> None:
        _current.runs.append(Run(self._tape, self._replays))

    def __exit__(self, *exception: object) -> None:
        _current.runs.pop()


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a region's first run and of its recomputation.

    For the ``context_fn`` of `torch.utils.checkpoint.checkpoint` and of what passes it on, such as
    Transformers' ``gradient_checkpointing_kwargs``.
    """
    tape = Tape()
    return _Running(tape, replays=False), _Running(tape, replays=True)


def checkpoint(function: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
    """Run a function now, and again in the backward pass instead of keeping its activations.

    As `torch.utils.checkpoint.checkpoint` in its non-reentrant form; exchanges between ranks run
    once only.

    Args:
        function: what to run.
        args: passed to it.
        kwargs: passed to it.
    """
    return torch_checkpoint(
        function, *args, use_reentrant=False, context_fn=checkpoint_contexts, **kwargs
    )


def _run_of_plain_checkpoint() -> Run | None:
    """Return the run of the region that torch's own hooks say this is in."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore
    pack = None if hooks is None else inspect.unwrap(hooks[0])
    if not inspect.isfunction(pack):
        return None
    variables = inspect.getclosurevars(pack).nonlocals
    if "target_frame_ref" in variables:
        frame = variables["target_frame_ref"]()
        if frame not in _frames:
            return None
        runs = _replays.setdefault(frame, {})
        return runs.setdefault(variables.get("gid"), Run(_frames[frame], replays=True))
    frame = variables.get("frame")
    if type(frame).__name__ != "_CheckpointFrame":
        return None
    tape = _frames.setdefault(frame, Tape())
    return Run(tape, replays=False, position=len(tape.entries))
