"""A layer whose computing is a sleep: the real methods and scans, on ranks without processors.

Two cores can't compute for 16 ranks. Where a layer's passes would run, `SleepSegment` sleeps for their
measured GPU time, stretched so that one state on the emulated link is to the passes as one state on a
GPU's link is to them. States are real, and so is everything that moves them.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeco.core.documents import whole
from zeco.core.errors import ArgumentError
from zeco.core.maps import AffineMap
from zeco.core.transitions import Transition
from zeco.operators.segment import Gradients, Inputs, Segment

GPU_LINK_BYTES_PER_S = 50e9
STATE_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a layer's passes on one rank.

    Attributes:
        state: the state pass, before the scan.
        prepare: what needs no entering state.
        output: the output pass, after the scan.
        adjoint: the adjoint state pass, before the reverse scan.
        replay: recomputation, which needs nothing of the reverse scan.
        backward: the gradient pass, after the reverse scan.
    """

    state: float
    prepare: float
    output: float
    adjoint: float
    replay: float
    backward: float

    @property
    def forward_s(self) -> float:
        """The whole forward pass."""
        return self.state + self.prepare + self.output

    @property
    def backward_s(self) -> float:
        """The whole backward pass."""
        return self.adjoint + self.replay + self.backward


def read_layer(path: Path | None = None) -> dict[str, Any]:
    """Return a layer's measured times; None means those that come with the package.

    Raises:
        ArgumentError: no such file, or one without the fields of the package's.
    """
    if path is None:
        text = files("zeco.benchmarks").joinpath("layer_times.json").read_text("utf-8")
        return json.loads(text)
    try:
        layer = json.loads(path.read_text(encoding="utf-8"))
        stretched_times(layer, layer["shape"], 1e9)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"--layer {path}: no layer's times ({type(error).__name__}: {error}); write it like "
            "zeco/benchmarks/layer_times.json"
        ) from error
    return layer


def stretch(
    layer: dict[str, Any],
    shape: tuple[int, int, int],
    rate_bits_per_s: float,
    gpu_link_bytes_per_s: float = GPU_LINK_BYTES_PER_S,
) -> float:
    """Return by how much sleeps are longer than the layer's GPU times.

    Args:
        layer: measured times and the shape they belong to.
        shape: heads, key dim and value dim of the emulated state (fp32).
        rate_bits_per_s: of the emulated link.
        gpu_link_bytes_per_s: of the link that is stood for.

    >>> layer = {"shape": (16, 128, 128)}
    >>> round(stretch(layer, (16, 128, 128), 200e6))  # 50 GB/s against 25 MB/s
    2000
    """
    emulated_s = _state_bytes(shape) * 8 / rate_bits_per_s
    real_s = _state_bytes(tuple(layer["shape"])) / gpu_link_bytes_per_s
    return emulated_s / real_s


def stretched_times(
    layer: dict[str, Any],
    shape: tuple[int, int, int],
    rate_bits_per_s: float,
    *,
    share: float = 1.0,
    gpu_link_bytes_per_s: float = GPU_LINK_BYTES_PER_S,
) -> LayerTimes:
    """Return the sleeps for a layer's passes.

    Args:
        layer: see `read_layer`.
        shape: of the emulated state.
        rate_bits_per_s: of the emulated link.
        share: of the layer's tokens, and so of its times.
        gpu_link_bytes_per_s: of the link that is stood for.
    """
    forward = {n: sum(k.values()) for n, k in layer["forward_kernels_ms"].items()}
    backward = {n: sum(k.values()) for n, k in layer["backward_kernels_ms"].items()}
    backward_ms = layer["forward_backward_ms"] - layer["forward_ms"]
    scale = 1e-3 * share * stretch(layer, shape, rate_bits_per_s, gpu_link_bytes_per_s)
    passes = {n: ms * layer["forward_ms"] / sum(forward.values()) for n, ms in forward.items()}
    passes |= {n: ms * backward_ms / sum(backward.values()) for n, ms in backward.items()}
    return LayerTimes(**{name: ms * scale for name, ms in passes.items()})


def _state_bytes(shape: tuple[int, int, int]) -> int:
    H, K, V = shape
    return H * K * V * STATE_ELEMENT_BYTES


class SleepSegment(Segment):
    """A rank's call of a layer that sleeps for its passes; outputs are a token wide.

    Args:
        times: of the passes.
        own: the map that the state pass finds, and whose transition the adjoint uses.
    """

    def __init__(self, times: LayerTimes, own: AffineMap) -> None:
        super().__init__((), whole(1))
        self.times = times
        self.own = own
        self._done: set[str] = set()

    def _run(self, *passes: str) -> None:
        """Sleep for those passes that haven't run."""
        left = [name for name in passes if name not in self._done]
        self._done.update(left)
        time.sleep(sum(getattr(self.times, name) for name in left))

    def summarize(self, initials: Tensor | None = None) -> AffineMap:
        self._run("state")
        return self.own

    def prepare(self) -> None:
        self._run("prepare")

    def output(self, entering: Tensor, initials: Tensor | None) -> tuple[Tensor, Tensor]:
        self._run("state", "prepare", "output")
        return entering.new_zeros(1, 1, 1, 1), self.own(entering)[None]

    def transition(self) -> Transition:
        return self.own.transition

    def adjoint(self, d_o: Tensor, d_finals: Tensor | None) -> Tensor:
        self._run("adjoint")
        return torch.ones_like(self.own.update)

    def fresh(self, inputs: Inputs | None = None) -> SleepSegment:
        return SleepSegment(self.times, self.own)

    def replay(self, entering: Tensor, initials: Tensor | None) -> None:
        self._run("replay")

    def backward(self, d_o: Tensor, d_finals: Tensor) -> Gradients:
        self._run("adjoint", "replay", "backward")
        entering = self.own.transition.transpose()(d_finals[-1]) + 1
        return Gradients((), entering, None)
