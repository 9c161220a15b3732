"""Flash Linear Attention's own context parallelism, called with our arguments: a peer of methods."""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist
from torch import Tensor

from zeco.benchmarks.peers import PEERS
from zeco.operators.fla.check import why_not_installed

OPERATORS = ("gated_delta_rule", "kda")
"""The delta rules that take a context; FLA's plain delta rule and its other operators don't."""


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
