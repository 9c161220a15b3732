"""The peers of `zeco bench op`: others' public operators, called with our arguments.

Flash Linear Attention's, and for Mamba-2 the one of its authors' package mamba-ssm.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from zeco.core.errors import ArgumentError

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Peer:
    """An operator of Flash Linear Attention.

    Attributes:
        module: under ``fla.ops``.
        function: in it.
        convert: turns our inputs into its own.
        options: passed on every call.
        has_gated_scalar_backward: whether its backward pass is the one that, on Hopper with Triton
            3.4 to 3.7.0, raises or autotunes without end.
    """

    name: ClassVar[str] = "fla"

    module: str
    function: str
    convert: Callable[[Inputs], Inputs] = dict[str, Tensor]
    options: tuple[tuple[str, Any], ...] = ()
    has_gated_scalar_backward: bool = False

    def __call__(
        self, *, cu_seqlens: Tensor | None = None, initial_state: Tensor | None = None, **given: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Call it with default settings: our inputs by name, and ``output_final_state``."""
        function = getattr(importlib.import_module(f"fla.ops.{self.module}"), self.function)
        wants_final = given.pop("output_final_state", False)
        return function(
            **self.convert(given),
            **dict(self.options),
            initial_state=initial_state,
            output_final_state=wants_final,
            cu_seqlens=cu_seqlens,
        )

    def why_forward_only(self) -> str | None:
        """Return why its backward pass isn't run here; None if it is."""
        if not self.has_gated_scalar_backward or torch.cuda.get_device_capability()[0] != 9:
            return None
        triton = importlib.import_module("triton")
        version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3])
        if (3, 4, 0) <= version < (3, 7, 1):
            return "its backward pass raises or never ends autotuning on Hopper with this Triton"
        return None


def _hgrn2(given: Inputs) -> Inputs:
    return {**given, "k": (1 - given["g"].exp()).to(given["q"].dtype)}


class MambaPeer:
    """Mamba-2's scan as mamba-ssm has it, with the chunks that its layer takes."""

    name = "mamba_ssm"
    chunk = 256

    def __call__(
        self,
        *,
        cu_seqlens: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        **given: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Call it with our inputs by name; its states are [V, K]."""
        if cu_seqlens is not None:
            raise ArgumentError("mamba_ssm isn't called with packed documents here: leave them out")
        scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
        found = scan.mamba_chunk_scan_combined(
            **given,
            chunk_size=self.chunk,
            initial_states=None if initial_state is None else initial_state.mT.contiguous(),
            return_final_states=output_final_state,
        )
        return (found[0], found[1].mT) if output_final_state else (found, None)

    def why_forward_only(self) -> str | None:
        """Return None: its backward pass is run too."""


PEERS = {
    "linear_attention": Peer("linear_attn", "chunk_linear_attn", options=(("normalize", False),)),
    "retention": Peer("retention", "chunk_retention", has_gated_scalar_backward=True),
    "simple_gla": Peer("simple_gla", "chunk_simple_gla", has_gated_scalar_backward=True),
    "gla": Peer("gla", "chunk_gla"),
    "hgrn2": Peer("gla", "chunk_gla", convert=_hgrn2),
    "rwkv6": Peer("rwkv6", "chunk_rwkv6"),
    "delta_rule": Peer("delta_rule", "chunk_delta_rule"),
    "gated_delta_rule": Peer(
        "gated_delta_rule", "chunk_gated_delta_rule", has_gated_scalar_backward=True
    ),
    "kda": Peer("kda", "chunk_kda"),
    "rwkv7": Peer("rwkv7", "chunk_rwkv7"),
}


OTHERS = {"ssd": MambaPeer()}
"""Peers of what Flash Linear Attention has no operator for."""


def find_peer(op: str) -> Peer | MambaPeer | None:
    """Return the peer of one of our public operators; None if it has none."""
    return PEERS.get(op) or OTHERS.get(op)


def why_no_peer(op: str, device: torch.device, *, grouped: bool) -> str | None:
    """Return why an operator isn't compared here; None if it is.

    Args:
        op: our public operator.
        device: of the inputs.
        grouped: whether several value heads share a key head.
    """
    peer = find_peer(op)
    if peer is None:
        return f"there is no peer that takes the inputs of {op}"
    if device.type != "cuda":
        return f"the operators of {peer.name} need a CUDA device"
    if grouped and isinstance(peer, Peer):
        return "grouped heads aren't compared: its operators don't all take them"
    if importlib.util.find_spec(peer.name) is None:
        package = "zeco-sp[gpu]" if isinstance(peer, Peer) else "mamba-ssm"
        return f"the package {peer.name} is missing; install {package}"
    return None
