"""Launches of the decay kernels, and the descriptors they read and write blocks of tokens through."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def describe(x: Tensor, tokens: int, width: int) -> TensorDescriptor:
    """Return the descriptor of blocks [tokens, width] of one head of x [B, T, H, D].

    x has its channels side by side and rows on 16 bytes: callers see to it, so that the descriptor's
    own checks, which cost more than its making, are left out.
    """
    B, T, H, D = x.shape
    b, t, h, _ = x.stride()
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base = x
    descriptor.shape = [B, H, T, D]
    descriptor.strides = [b, h, t, 1]
    descriptor.block_shape = [1, 1, tokens, width]
    descriptor.padding = "zero"
    return descriptor


def launch(
    kernel: Any,
    programs: int,
    *arguments: Any,
    num_warps: int,
    num_stages: int = 3,
    **constants: Any,
) -> None:
    """Start a kernel with a one-dimensional grid.

    Args:
        kernel: a function of `triton.jit`, its constants after all other parameters.
        programs: the number of programs.
        arguments: tensors, descriptors, numbers and None, in the kernel's order.
        num_warps: warps a program.
        num_stages: stages of its pipelined loops, where the kernel doesn't say.
        constants: the kernel's constants.
    """
    kernel[(programs,)](*arguments, **constants, num_warps=num_warps, num_stages=num_stages)
