"""Shape checks that report every mismatch of a call at once, by argument name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zeco.core.errors import ArgumentError

FLOATING_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_shapes(
    where: str, tensors: Mapping[str, tuple[Tensor | None, str]], **known: int
) -> dict[str, int]:
    """Bind the letters of each tensor's layout to sizes and refuse what does not fit.

    Args:
        where: the public function, for the message.
        tensors: argument name to (tensor, layout), a layout being letters such as ``"B T H K"``.
            A None tensor is passed over. The first tensor that names a letter binds it.
        known: letters bound beforehand.

    Returns:
        The size of every letter.

    Raises:
        ArgumentError: with one clause for every argument that does not fit.

    >>> check_shapes("f", {"q": (torch.zeros(1, 4, 2, 8), "B T H K")})["K"]
    8
    """
    sizes = dict(known)
    problems: list[str] = []
    for name, (tensor, layout) in tensors.items():
        if tensor is None:
            continue
        letters = layout.split()
        shape = tuple(tensor.shape)
        if len(shape) != len(letters):
            problems.append(
                f"{name} has {len(shape)} dims {list(shape)}, but must be [{', '.join(letters)}]"
            )
            continue
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                problems.append(
                    f"{name} has {letter}={size} in {list(shape)}, but {letter}={sizes[letter]} "
                    "elsewhere"
                )
    if problems:
        raise ArgumentError(f"{where}: " + "; ".join(problems))
    return sizes


def check_same_device(where: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Refuse tensors that lie on different devices."""
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ArgumentError(f"{where}: tensors lie on different devices ({listed}); move them")


def check_floating(where: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Refuse tensors that are not floating point."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATING_DTYPES:
            raise ArgumentError(
                f"{where}: {name} has dtype {tensor.dtype}, but must be floating point; "
                f"cast it with .to(torch.float32)"
            )


def state_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return the dtype that states and gate arithmetic use: fp64 if any input is, else fp32.

    >>> state_dtype(torch.zeros(1, dtype=torch.bfloat16))
    torch.float32
    """
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32
