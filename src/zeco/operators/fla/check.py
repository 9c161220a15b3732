"""Whether Flash Linear Attention may be used: its version, and its numbers at first use.

FLA's inner functions change meaning between releases, so a release is taken only if it is known
here. Even so a compiler may get a kernel wrong: after a part of a call has run for the first time
in this process, at an operator, dtype, device and sizes, it is run once more on a tiny problem (with the
same settings of its kernels, which FLA tunes for these sizes) and compared with the torch backend.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from zeco.core.documents import whole
from zeco.core.errors import BackendError
from zeco.operators.fla.runs import make_runs
from zeco.operators.segment import Inputs

if TYPE_CHECKING:
    from zeco.operators.delta.segment import DeltaFamilyOperator
    from zeco.operators.fla.passes import Passes
    from zeco.operators.segment import Segment

KNOWN = ("0.6.0",)
"""Releases of fla-core whose inner functions are those that `fla_passes` calls."""

ROWS = frozenset({"q", "k", "v", "r", "a", "b"})
"""The inputs that share one dtype of 16 bits; decays and betas have their own."""

_GATES = frozenset({"g", "w"})
_MAX_DIM = 256
_DTYPES = (torch.bfloat16, torch.float16)

# Wrong kernels are wrong by a tenth and more; 16-bit products leave up to 1e-2, in a gate's gradient
# more, since large terms cancel there.
_BOUND = 0.03
_GATE_BOUND = 0.1
_TOKENS = 150

_confirmed: set[tuple[object, ...]] = set()


@lru_cache(maxsize=8)
def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


@lru_cache(maxsize=1)
def _installed() -> str | None:
    """Return the version of fla-core, or None."""
    try:
        return version("fla-core")
    except PackageNotFoundError:
        return None


def why_not_installed(device: torch.device) -> str | None:
    """Return why FLA's kernels can't run on a CUDA device, with the remedy; None if they can."""
    remedy = "install zeco-sp[gpu] or use backend='torch'"
    if _installed() is None or not is_installed("fla"):
        return f"the package fla-core is missing; {remedy}"
    if not is_installed("triton"):
        return f"the package triton is missing; {remedy}"
    if _installed() not in KNOWN:
        return f"fla-core {_installed()} isn't a release known here ({', '.join(KNOWN)}); {remedy}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"{device} has compute capability {major}.{minor}, the kernels need 8.0; use 'torch'"
    return None


def why_not_fla(K: int, V: int, **dtypes: torch.dtype | None) -> str | None:
    """Return why FLA's kernels don't take a call of the delta family; None if they do.

    Args:
        K: key dim.
        V: value dim.
        dtypes: of the inputs by name; None for one that isn't given.

    >>> half, full = torch.bfloat16, torch.float32
    >>> why_not_fla(128, 128, q=half, k=half, v=half, g=None, beta=full)
    >>> why_not_fla(20, 128, q=half, k=half, v=half, g=None, beta=full)
    "K=20 and V=128 must both be multiples of 16 up to 256; use backend='torch'"
    """
    rows = {name: dtype for name, dtype in dtypes.items() if name in ROWS}
    if any(dtype not in _DTYPES for dtype in rows.values()) or len(set(rows.values())) > 1:
        found = ", ".join(f"{name} {str(x).removeprefix('torch.')}" for name, x in rows.items())
        reason = f"the dtypes are {found}, but must all be bfloat16 or all float16"
    elif torch.float64 in dtypes.values():
        reason = "the kernels don't compute in float64"
    elif K % 16 or V % 16 or not 0 < K <= _MAX_DIM or not 0 < V <= _MAX_DIM:
        reason = f"K={K} and V={V} must both be multiples of 16 up to {_MAX_DIM}"
    else:
        return None
    return f"{reason}; use backend='torch'"


def confirm(operator: DeltaFamilyOperator, part: str, passes: Passes) -> None:
    """Compare a part with the torch backend, unless that was done for calls like this one.

    Args:
        operator: that of the call.
        part: "maps", "outputs", "adjoints" or "gradients".
        passes: the call that has just run this part.

    Raises:
        BackendError: the results differ.
    """
    _, _, H, K, V = _sizes(operator, passes.inputs)
    of_inputs = tuple(None if x is None else (x.dtype, x.ndim) for x in passes.inputs)
    key = (operator.name, part, type(passes), of_inputs, _device(passes), H, K, V)
    if key in _confirmed:
        return
    for quantity, (found, expected) in _compare(part, operator, passes).items():
        scale = torch.linalg.vector_norm(expected.double())
        error = torch.linalg.vector_norm(found.double() - expected.double()) / (scale + 1e-30)
        bound = _GATE_BOUND if quantity.removeprefix("gradient of ") in _GATES else _BOUND
        if not error <= bound:
            raise BackendError(_message(operator, quantity, float(error), bound, passes))
    _confirmed.add(key)


def _device(passes: Passes) -> torch.device:
    return cast("Tensor", passes.inputs[0]).device


def _sizes(operator: DeltaFamilyOperator, inputs: Inputs) -> tuple[int, int, int, int, int]:
    """Return B, T, H, K, V."""
    B, H, K, V = operator.state_shape(inputs)
    return B, cast("Tensor", inputs[0]).shape[1], H, K, V


def _message(
    operator: DeltaFamilyOperator, quantity: str, error: float, bound: float, passes: Passes
) -> str:
    import triton

    _, _, H, K, V = _sizes(operator, passes.inputs)
    device, dtype = _device(passes), cast("Tensor", passes.inputs[0]).dtype
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return (
        f"{operator.name}: backend 'fla' gives a wrong {quantity}: relative error {error:.2g} (at "
        f"most {bound:g}) against the torch backend, at H={H}, K={K}, V={V}, {dtype} on {where}, "
        f"with fla-core {_installed()}, triton {triton.__version__}, torch {torch.__version__}; "
        "use backend='torch', or versions of these that agree with it"
    )


def _compare(
    part: str, operator: DeltaFamilyOperator, like: Passes
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what a part gives on a tiny problem like a call's, and what the torch backend gives."""
    inputs, entering, d_o, d_final = _problem(operator, like)
    tiny: Any = replace(cast("Any", operator), scale=_sizes(operator, inputs)[3] ** -0.5)
    runs = make_runs((0, _TOKENS), _TOKENS, like.CHUNK, _device(like))
    passes = type(like)(inputs, scale=tiny.scale, runs=runs)
    wide = tuple(None if x is None else x.float() for x in inputs)
    segment: Segment = replace(tiny, backend="torch").segment(wide, whole(_TOKENS))
    compared: Callable[..., dict[str, tuple[Tensor, Tensor]]] = _PARTS[part]
    pairs = compared(passes, segment, entering, d_o, d_final)
    return {quantity.format(*operator.input_names): pair for quantity, pair in pairs.items()}


def _problem(operator: DeltaFamilyOperator, like: Passes) -> tuple[Inputs, Tensor, Tensor, Tensor]:
    """Return inputs and an entering state, and gradients of the outputs and of the leaving state."""
    generator = torch.Generator().manual_seed(0)
    _, _, H, K, V = _sizes(operator, like.inputs)
    named = dict(zip(operator.input_names, like.inputs, strict=True))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def values(name: str, like: Tensor) -> Tensor:
        x = random(1, _TOKENS, *like.shape[2:])
        if name in _GATES:
            return -0.2 * x.sigmoid()
        if name == "beta":
            return x.sigmoid()
        return F.normalize(x, dim=-1) if name in "ka" else x

    found = {n: None if x is None else values(n, x) for n, x in named.items()}
    if found.get("a") is not None:  # what a reads is taken away along b, in part
        found["b"] = -0.5 * cast("Tensor", found["a"])
    inputs = tuple(
        None if x is None or y is None else x.to(y.device, y.dtype)
        for x, y in zip(found.values(), like.inputs, strict=True)
    )
    device, dtype = _device(like), cast("Tensor", like.inputs[0]).dtype
    states = random(2, 1, H, K, V).to(device)
    return inputs, states[0], random(1, _TOKENS, H, V).to(device, dtype), states[1]


def _compare_maps(
    passes: Passes, segment: Segment, entering: Tensor, d_o: Tensor, d_final: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    expected = segment.summarize()
    V = entering.shape[3]
    found = passes.maps(0, 1)
    return {
        "update": (found[..., :V], expected.update),
        "transition": (found[..., V:], expected.transition.parameters[0]),
    }


def _compare_outputs(
    passes: Passes, segment: Segment, entering: Tensor, d_o: Tensor, d_final: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    o, final = passes.outputs(entering)
    expected_o, expected_finals = segment.output(entering, None)
    return {"output": (o, expected_o), "final state": (final, expected_finals[0])}


def _compare_adjoints(
    passes: Passes, segment: Segment, entering: Tensor, d_o: Tensor, d_final: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    found = passes.adjoints(d_o)
    return {"adjoint of the entering state": (found, segment.adjoint(d_o.float(), None))}


def _compare_gradients(
    passes: Passes, segment: Segment, entering: Tensor, d_o: Tensor, d_final: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    passes.replay(entering)
    found = passes.gradients(d_o, d_final)
    segment.replay(entering, None)
    expected = segment.backward(d_o.float(), d_final.unsqueeze(0))
    pairs = {"gradient of the entering state": (found.starts, expected.entering)}
    for place, (x, y) in enumerate(zip(found.inputs, expected.inputs, strict=True)):
        if x is not None and y is not None:
            pairs[f"gradient of {{{place}}}"] = (x, y)
    return pairs


_PARTS = {
    "maps": _compare_maps,
    "outputs": _compare_outputs,
    "adjoints": _compare_adjoints,
    "gradients": _compare_gradients,
}
