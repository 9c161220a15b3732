"""Kernels compiled for Hopper without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

SHARED_BYTES = 232_448  # that Hopper lets a program have

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def specialise(arguments):
    """Return (types, constants, attributes) of a kernel's arguments, by place, as Triton makes them.

    Memory counts as aligned to 16 bytes.
    """
    types, constants, attributes = [], {}, {}
    for place, x in enumerate(arguments):
        divisible = False
        if isinstance(x, tuple):
            x, tokens, width = x
            types.append(f"tensordesc<{TYPES[x.dtype]}[1, 1, {tokens}, {width}]>")
        elif isinstance(x, Tensor):
            types.append("*" + TYPES[x.dtype])
            divisible = True
        elif isinstance(x, float):
            types.append("fp32")
        elif x is None or x == 1:
            types.append("constexpr")
            constants[(place,)] = x
        else:
            types.append("i32")
            divisible = x % 16 == 0
        if divisible:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return types, constants, attributes


def _compile(kernel, arguments, named):
    """Return a kernel compiled; fail if a GPU couldn't hold its programs.

    Args:
        kernel: a function of `triton.jit`.
        arguments: as `zeco.kernels.launch.launch` takes them.
        named: the kernel's constants and Triton's options.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constants, attributes = specialise(arguments)
    signature = dict(zip(kernel.arg_names, types, strict=False))
    options = dict(named)
    for place, name in list(enumerate(kernel.arg_names))[len(arguments) :]:
        signature[name] = "constexpr"
        constants[(place,)] = options.pop(name)
    what = f"{kernel.__name__} with {named}"
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    try:
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    except Exception as error:
        error.add_note(f"while compiling {what}")
        raise
    shared = made.metadata.shared
    assert shared <= SHARED_BYTES, f"{what}: {shared} bytes of shared memory, of {SHARED_BYTES}"
    return made


@pytest.fixture
def compile_for_hopper():
    """Return what compiles a kernel, given its arguments and its named constants and options."""
    return _compile
