"""What the public operators have in common: argument checks, head counts, keyword texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from zeco.core.errors import ArgumentError
from zeco.core.shapes import check_floating, check_same_device, check_shapes
from zeco.operators.segment import Exchange

F = TypeVar("F", bound=Callable[..., object])

_SCALE = """scale: factor of the queries; K**-0.5 by default.
        """
_COMMON = """initial_state: state [B, H, K, V] before the first token, or with ``cu_seqlens`` one
            for each document [N, H, K, V]; zeros by default. Differentiable.
        output_final_state: whether to return the state after the last token; differentiable.
        cu_seqlens: boundaries [N+1] of packed documents, int32 or int64, 0 first, the total
            length last, counted over all ranks; needs B = 1.
        bidirectional: whether to read the sequence from both ends, for encoders, which goes without
            states; `zeco.operators.bidirectional` has the formula, token by token.
        sp: the sequence-parallel context, when the sequence is split over ranks; the tensors are
            then this rank's part. None: the sequence lies whole on this device.
        backend: ``"torch"``; ``"triton"`` for decays and ``"fla"`` for delta rules in 16 bits, both
            on CUDA; or ``"auto"``, the fastest that takes the call, which the log
            ``zeco.backends`` names with the reasons. Kernels of ``"fla"`` are tuned for each shape,
            a minute or more when it is first seen.

    Returns:
        The outputs [B, T, H, V] in the dtype of the first input, and the final state shaped as
        ``initial_state`` (fp32; fp64 for fp64 inputs), or None.

    Raises:
        ArgumentError: a shape, dtype, device or value does not fit; the message names it.
        UnsupportedError: the backend is not offered for this operator, device or installation.
        BackendError: kernels of ``"fla"`` give wrong numbers here."""


class Signature(NamedTuple):
    """What checks that look at no values read of a tensor; it may stand for the tensor in them."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)


def signature_of(x: Tensor | None) -> Signature | None:
    """Return a tensor's signature, None for none."""
    return None if x is None else Signature(x.shape, x.dtype, x.device)


def documented(function: F) -> F:
    """Put the text of the common keywords and of the results in place of ``<common>``.

    ``<common without scale>`` is for operators that have none.
    """
    if function.__doc__ is not None:
        text = function.__doc__.replace("<common>", _SCALE + _COMMON)
        function.__doc__ = text.replace("<common without scale>", _COMMON)
    return function


def check_inputs(
    name: str,
    tensors: Mapping[str, tuple[Tensor | None, str]],
    *,
    initial_state: Tensor | None,
    sp: Exchange | None,
    **known: int,
) -> dict[str, int]:
    """Check shapes, dtypes and devices of an operator's tensors; return the sizes by letter.

    With an ``sp`` whose ``check`` is true, NaN is looked for too.

    Args:
        name: the public operator, for messages.
        tensors: argument name to (tensor, layout).
        initial_state: only dtype and device are checked here.
        sp: the exchange of the call.
        known: sizes known beforehand.
    """
    sizes = check_shapes(name, tensors, **known)
    given = {argument: tensor for argument, (tensor, _) in tensors.items()}
    given["initial_state"] = initial_state
    check_floating(name, given)
    check_same_device(name, given)
    if sizes.get("K") == 0:
        raise ArgumentError(f"{name}: the key dim K is 0, but must be at least 1")
    if sp is not None and sp.check:
        check_no_nan(name, given)
    return sizes


def check_no_nan(name: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Refuse NaN."""
    for argument, tensor in tensors.items():
        if tensor is not None and tensor.isnan().any():
            raise ArgumentError(
                f"{name}: {argument} contains NaN; look for its source in the layer before, "
                "or pass check=False to the context to let it through"
            )


def check_log_decay(name: str, argument: str, g: Tensor, sp: Exchange | None) -> None:
    """Refuse positive log decays, where `check_not_positive` looks at values."""
    remedy = "pass the natural logarithm of the decay, such as F.logsigmoid(x)"
    check_not_positive(name, argument, g, sp, remedy=remedy)


def check_not_positive(
    name: str, argument: str, x: Tensor, sp: Exchange | None, *, remedy: str
) -> None:
    """Refuse values above zero, where they are looked at."""
    if not are_looked_at(x, sp):
        return
    high = float(x.detach().amax())
    if high > 0:
        raise ArgumentError(
            f"{name}: {argument} has values up to {high:.4g}, but must be <= 0; {remedy}"
        )


def are_looked_at(x: Tensor, sp: Exchange | None) -> bool:
    """Return whether an argument's values are looked at.

    On a GPU that would stall it, so there they are only for an ``sp`` whose ``check`` is true.
    """
    if x.numel() == 0:
        return False
    return x.device.type != "cuda" or (sp is not None and sp.check)


def check_heads(name: str, num_value_heads: int, **others: int) -> None:
    """Refuse head counts that do not divide the number of value heads."""
    for argument, count in others.items():
        if count == 0 or num_value_heads % count:
            raise ArgumentError(
                f"{name}: {argument} has {count} heads, which does not divide the "
                f"{num_value_heads} value heads; use a divisor of it"
            )


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype that holds the values of all tensors.

    >>> common_dtype(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1))
    torch.float32
    """
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def repeat_heads(x: Tensor, num_heads: int, *, dim: int = 2) -> Tensor:
    """Repeat every head, next to its copies, until there are ``num_heads``."""
    count = x.shape[dim]
    return x if count == num_heads else x.repeat_interleave(num_heads // count, dim)
