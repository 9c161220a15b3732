"""Launches of kernels, and the blocks of tokens that they read and write through descriptors.

Triton's own call works out at every launch what the arguments specialise a kernel to; for short
sequences that takes longer than the kernel. It depends on little: dtypes, alignment, whether a number
is 1 or a multiple of 16. `launch` looks a compiled kernel up by these and starts it through the
launcher that Triton compiled for it, descriptors encoded here. Where a caller says what else stays
the same, the whole launch is kept and addresses are put in. What that launcher is called with
belongs to Triton's inside, so it is done for the versions in which it was read, and the first launch
of each kind, all launches under Triton's hooks and those in its interpreter go through its own call.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import inspect
import threading
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_KNOWN_VERSIONS = ("3.5", "3.6")
_IS_KNOWN = triton.__version__.rsplit(".", 1)[0] in _KNOWN_VERSIONS
_MOST_DESCRIPTORS = 64  # that are kept of an argument


# x [B, T, H, D] and the tokens and width of a block; a bare tuple, since there are many.
Blocks = tuple[Tensor, int, int]


class _Start(NamedTuple):
    """How a compiled kernel is started.

    Attributes:
        call: the launcher in C.
        head: its arguments between the stream and the kernel's.
        maps: for each descriptor, the arguments of its encoding between the address and the shape.
        tail: its arguments for the kernel's constants, which it doesn't read.
    """

    call: Any
    head: tuple[Any, ...]
    maps: tuple[tuple[Any, ...], ...]
    tail: tuple[None, ...]


_starts: dict[tuple[Any, ...], _Start] = {}


class Launch(NamedTuple):
    """A launch, whole but for what may change from one to the next.

    Attributes:
        call: the launcher in C.
        values: its arguments after the stream.
        places: those of addresses and fractions among them.
        maps: the place of each address that a descriptor is encoded from, what its encoding is told
            beside, and the descriptors made, by address: memory is mostly handed out as before.
    """

    call: Any
    values: tuple[Any, ...]
    places: tuple[int, ...]
    maps: tuple[tuple[int, tuple[Any, ...], dict[int, Any]], ...]


Launches = dict[tuple[Any, ...], Launch]


class _Thread(threading.local):
    """The devices on which this thread has worked."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_thread = _Thread()


def describe(x: Tensor, tokens: int, width: int) -> Blocks:
    """Return the blocks [tokens, width] of one head of x [B, T, H, D], as a kernel's argument.

    x has its channels side by side and rows on 16 bytes: callers see to it.
    """
    return x, tokens, width


def launch(
    kernel: Any,
    programs: int,
    *arguments: Any,
    num_warps: int,
    num_stages: int = 3,
    known: Launches | None = None,
    **constants: Any,
) -> None:
    """Start a kernel with a one-dimensional grid.

    Args:
        kernel: a function of `triton.jit`, its constants after all other parameters.
        programs: the number of programs.
        arguments: tensors, blocks, numbers and None, in the kernel's order.
        num_warps: warps a program.
        num_stages: stages of its pipelined loops, where the kernel doesn't say.
        known: launches of before, to which this one is added. Whoever gives it says that with the
            same kernel and constants the shapes of tensors and blocks are the same too.
        constants: the kernel's constants.
    """
    is_interpreted = type(kernel) is not JITFunction
    device = -1 if is_interpreted else torch.cuda.current_device()
    if not is_interpreted and device not in _thread.devices:
        _enter_context(device)
    if is_interpreted or not _IS_KNOWN or _are_hooks_set():
        _launch_through_triton(kernel, programs, arguments, constants, num_warps, num_stages)
        return
    key: list[Any] = [id(kernel), device, num_warps, num_stages, *constants.values()]
    given: list[Any] = []
    found = None
    if known is not None:
        note, put = key.append, given.append
        for x in arguments:
            if type(x) is tuple:
                x = x[0]
                note(x.stride())
            if isinstance(x, Tensor):
                address = x.data_ptr()
                note(x.dtype)
                note(address & 15 == 0)
                put(address)
            elif x is None or type(x) is int:
                note(x)
            else:
                note(type(x))
                put(x)
        found = known.get(tuple(key))
    if found is None:
        found = _prepare(kernel, programs, arguments, constants, num_warps, num_stages, device)
        if found is None:
            return
        if known is not None:
            known[tuple(key)] = found
    values = list(found.values)
    for at, x in zip(found.places, given, strict=False):
        values[at] = x
    active = driver.active
    encode = active.utils.fill_tma_descriptor
    for at, how, made in found.maps:
        address = values[at]
        descriptor = made.get(address)
        if descriptor is None:
            if len(made) >= _MOST_DESCRIPTORS:  # above, where threads came in between
                made.clear()
            descriptor = made[address] = encode(address, *how)
        values[at] = descriptor
    found.call(programs, 1, 1, active.get_current_stream(device), *values)


def _prepare(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int,
    device: int,
) -> Launch | None:
    """Return a launch with these arguments; None if Triton had to compile and start the kernel."""
    # Everything that Triton specialises for, or what is finer.
    key: list[Any] = [id(kernel), device, num_warps, num_stages, *constants.values()]
    values: list[Any] = []
    places: list[int] = []
    maps: list[tuple[int, tuple[Any, ...]]] = []
    for x in arguments:
        kind = type(x)
        if kind is tuple:
            x, tokens, width = x
            B, T, H, D = x.shape
            b, t, h, _ = x.stride()
            shape, strides = (B, H, T, D), (b, h, t, 1)
            key += (x.dtype, tokens, width)
            places.append(len(values))
            maps.append((len(values), (shape, strides, 0)))
            values += (x.data_ptr(), *shape, *strides)
        elif isinstance(x, Tensor):
            address = x.data_ptr()
            key += (x.dtype, x.get_device(), address & 15 == 0)
            places.append(len(values))
            values.append(address)
        elif kind is int:
            key += (x == 1 if x & 15 else 16, x >> 31)
            values.append(x)
        else:
            key.append(kind if x is None or kind is float else (kind, x))
            if x is not None:
                places.append(len(values))
            values.append(x)
    start = _starts.get(tuple(key))
    if start is None:
        compiled = _launch_through_triton(
            kernel, programs, arguments, constants, num_warps, num_stages
        )
        start = _find_start(kernel, compiled, len(arguments), len(maps))
        if start is not None:
            _starts[tuple(key)] = start
        return None
    before = len(start.head)
    return Launch(
        start.call,
        (*start.head, *values, *start.tail),
        tuple(before + at for at in places),
        tuple(
            (before + at, (*how, *rest), {})
            for how, (at, rest) in zip(start.maps, maps, strict=True)
        ),
    )


def _launch_through_triton(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int,
) -> Any:
    """Start a kernel as Triton documents it; return it compiled."""
    given = [_descriptor(*x) if isinstance(x, tuple) else x for x in arguments]
    return kernel[(programs,)](*given, **constants, num_warps=num_warps, num_stages=num_stages)


def _descriptor(x: Tensor, tokens: int, width: int) -> TensorDescriptor:
    B, T, H, D = x.shape
    b, t, h, _ = x.stride()
    # Without the checks that its constructor makes: they take longer than the rest.
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base = x
    descriptor.shape = [B, H, T, D]
    descriptor.strides = [b, h, t, 1]
    descriptor.block_shape = [1, 1, tokens, width]
    descriptor.padding = "zero"
    return descriptor


def _enter_context(device: int) -> None:
    """Make a device's context current in this thread, as the encoding of descriptors needs it.

    Torch leaves that to CUDA's runtime, which does it at a thread's first work on the device.
    """
    torch.zeros(1, device=torch.device("cuda", device))
    _thread.devices.add(device)


def _are_hooks_set() -> bool:
    """Return whether somebody, such as a profiler, wants to see every launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _find_start(
    kernel: Any, compiled: Any, num_arguments: int, num_descriptors: int
) -> _Start | None:
    """Return how a kernel that Triton has just started can be started; None if not directly."""
    run = getattr(compiled, "run", None)
    if type(run).__name__ != "CudaLauncher" or run.global_scratch_size or run.profile_scratch_size:
        return None
    call, maps = run.launch, []
    if num_descriptors:
        # The launcher that is given descriptors encodes them, and calls the one in C.
        inside = inspect.getclosurevars(call).nonlocals
        call, maps = inside["launcher"], inside["tensordesc_meta"]
    if len(maps) != num_descriptors or any(how is None or how["fp4_padded"] for how in maps):
        return None
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return _Start(
        call,
        (
            compiled.function,
            run.launch_cooperative_grid,
            run.launch_pdl,
            None,  # scratch of the kernel, and of a profiler
            None,
            compiled.packed_metadata,
            None,  # what hooks are told, and both hooks
            None,
            None,
        ),
        tuple(
            (
                how["swizzle"],
                how["elem_size"],
                TMA_DTYPE_DEVICE_TO_HOST[how["elem_type"]],
                how["block_size"],
            )
            for how in maps
        ),
        (None,) * (len(kernel.params) - num_arguments),
    )
