"""Flash Linear Attention's own context parallelism, called with our arguments: a peer of methods."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeco.benchmarks.peers import PEERS
from zeco.operators.fla_check import why_not_installed

OPERATORS = ("gated_delta_rule", "kda")
"""The delta rules that take a context; FLA's plain delta rule and its other operators don't."""

_MODULES = (
    "fla.ops.cp",
    "fla.ops.delta_rule.chunk",
    "fla.ops.gated_delta_rule.chunk",
    "fla.ops.gla.chunk",
    "fla.ops.kda.chunk",
)


def why_not(op: str, device: torch.device) -> str | None:
    """Return why an operator isn't compared; None if it is."""
    if op not in OPERATORS:
        return f"Flash Linear Attention's {op} has no context parallelism"
    if device.type != "cuda":
        return f"its kernels need CUDA tensors, these are on {device}"
    return why_not_installed(device)


class FlaContextParallel:
    """An operator of FLA on a sequence whose tokens are split evenly over the ranks.

    Args:
        op: one of `OPERATORS`.
        group: the ranks.
        tokens: on each.
        device: of the inputs.
    """

    def __init__(
        self, op: str, group: dist.ProcessGroup, tokens: int, device: torch.device
    ) -> None:
        self._operator = getattr(
            importlib.import_module(f"fla.ops.{PEERS[op].module}"), PEERS[op].function
        )
        bounds = torch.tensor([0, tokens * dist.get_world_size(group)])
        self._context = importlib.import_module("fla.ops.cp").build_cp_context(
            bounds.to(device), group=group, cu_seqlens_cpu=bounds
        )
        self.forward_only = PEERS[op].why_forward_only()

    def __call__(self, **inputs: Tensor) -> tuple[Tensor, None]:
        """Return the outputs of this rank's tokens."""
        o, _ = self._operator(**inputs, cp_context=self._context)
        return o, None


def hold_settings() -> int:
    """Hold every kernel of FLA's delta rules to one setting in this process; return their number.

    FLA times dozens of settings of each kernel, minutes in all, before it first runs. What is compared
    with it here calls the same kernels, so both get the same settings: those next to 4 warps and 2
    stages, of the smallest tiles.
    """
    tuners = {id(tuner): tuner for tuner in _autotuners()}.values()
    for tuner in tuners:
        tuner.configs = [min(tuner.configs, key=_oddness)]
    return len(tuners)


def _autotuners() -> Iterator[Any]:
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    for name in _MODULES:
        importlib.import_module(name)
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("fla.")]
    for module in modules:
        for x in list(vars(module).values()):
            while x is not None and not isinstance(x, autotuner):
                x = getattr(x, "fn", None) if hasattr(x, "run") else None
            if x is not None:
                yield x


def _oddness(config: Any) -> tuple[int, int, int]:
    tiles = sum(x for x in config.kwargs.values() if isinstance(x, int))
    return abs(config.num_warps - 4), abs(config.num_stages - 2), tiles
