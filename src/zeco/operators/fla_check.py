"""Whether Flash Linear Attention may be used: its version, and its numbers at first use.

FLA's inner functions change meaning between releases, so a release is taken only if it is known
here. Even so a compiler may get a kernel wrong: after a part of a call has run for the first time
in this process, at an operator, dtype, device and sizes, it is run once more on a tiny problem (with the
same settings of its kernels, which FLA tunes for these sizes) and compared with the torch backend.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from zeco.core.documents import whole
from zeco.core.errors import BackendError
from zeco.operators.fla_runs import make_runs
from zeco.operators.segment import Inputs

if TYPE_CHECKING:
    from zeco.operators.delta_call import DeltaRuleSegment
    from zeco.operators.fla_passes import DeltaPasses

KNOWN = ("0.6.0",)
"""Releases of fla-core whose inner functions are those that `fla_passes` calls."""

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


def why_not_fla(K: int, V: int, *dtypes: torch.dtype | None) -> str | None:
    """Return why FLA's kernels don't take a call of the delta rules; None if they do.

    Args:
        K: key dim.
        V: value dim.
        dtypes: of q, k, v, g and beta; None for one that isn't given.

    >>> why_not_fla(128, 128, torch.bfloat16, torch.bfloat16, torch.bfloat16, None, torch.float32)
    >>> why_not_fla(20, 128, torch.bfloat16, torch.bfloat16, torch.bfloat16, None, torch.float32)
    "K=20 and V=128 must both be multiples of 16 up to 256; use backend='torch'"
    """
    if any(dtype not in _DTYPES for dtype in dtypes[:3]) or len(set(dtypes[:3])) > 1:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes[:3])
        reason = f"q, k and v are {names}, but must all be bfloat16 or all float16"
    elif torch.float64 in dtypes:
        reason = "the kernels don't compute in float64"
    elif K % 16 or V % 16 or not 0 < K <= _MAX_DIM or not 0 < V <= _MAX_DIM:
        reason = f"K={K} and V={V} must both be multiples of 16 up to {_MAX_DIM}"
    else:
        return None
    return f"{reason}; use backend='torch'"


def confirm(name: str, part: str, passes: DeltaPasses) -> None:
    """Compare a part with the torch backend, unless that was done for calls like this one.

    Args:
        name: the operator.
        part: "maps", "outputs", "adjoints" or "gradients".
        passes: the call that has just run this part.

    Raises:
        BackendError: the results differ.
    """
    k, v, g, beta = passes.k, passes.v, passes.g, passes.beta
    gate = None if g is None else (g.dtype, g.ndim)
    key = (name, part, k.dtype, gate, beta.dtype, k.device, *k.shape[2:], v.shape[3])
    if key in _confirmed:
        return
    for quantity, (found, expected) in _compare(part, name, passes).items():
        scale = torch.linalg.vector_norm(expected.double())
        error = torch.linalg.vector_norm(found.double() - expected.double()) / (scale + 1e-30)
        bound = _GATE_BOUND if quantity == "gradient of g" else _BOUND
        if not error <= bound:
            raise BackendError(_message(name, quantity, float(error), bound, passes))
    _confirmed.add(key)


def _message(name: str, quantity: str, error: float, bound: float, passes: DeltaPasses) -> str:
    import triton

    _, _, H, K = passes.k.shape
    device = passes.k.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return (
        f"{name}: backend 'fla' gives a wrong {quantity}: relative error {error:.2g} (at most "
        f"{bound:g}) against the torch backend, at H={H}, K={K}, V={passes.v.shape[3]}, "
        f"{passes.k.dtype} on {where}, with fla-core "
        f"{_installed()}, triton {triton.__version__}, torch {torch.__version__}; use "
        "backend='torch', or versions of these that agree with it"
    )


def _compare(part: str, name: str, like: DeltaPasses) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what a part gives on a tiny problem like a call's, and what the torch backend gives."""
    from zeco.operators.delta_call import DeltaRuleOperator, DeltaRuleSegment

    inputs, entering, d_o, d_final = _problem(like)
    scale = inputs[0].shape[3] ** -0.5 if inputs[0] is not None else 1.0
    runs = make_runs((0, _TOKENS), _TOKENS, like.k.device)
    passes = type(like)(*inputs, scale=scale, runs=runs)  # type: ignore[arg-type]
    wide = tuple(None if x is None else x.float() for x in inputs)
    segment = DeltaRuleSegment(DeltaRuleOperator(name, scale), wide, whole(_TOKENS))
    compared: Callable[..., dict[str, tuple[Tensor, Tensor]]] = _PARTS[part]
    return compared(passes, segment, entering, d_o, d_final)


def _problem(like: DeltaPasses) -> tuple[Inputs, Tensor, Tensor, Tensor]:
    """Return inputs and an entering state, and gradients of the outputs and of the leaving state."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    _, _, H, K = like.k.shape
    V, dtype, device = like.v.shape[3], like.k.dtype, like.k.device
    q, k = random(1, _TOKENS, H, K), F.normalize(random(1, _TOKENS, H, K), dim=-1)
    v, d_o = random(1, _TOKENS, H, V), random(1, _TOKENS, H, V)
    beta = torch.rand(1, _TOKENS, H, generator=generator).to(device, like.beta.dtype)
    g = None
    if like.g is not None:
        size = (1, _TOKENS, *like.g.shape[2:])
        g = (-0.2 * torch.rand(size, generator=generator)).to(device, like.g.dtype)
    q, k, v, d_o = (x.to(device, dtype) for x in (q, k, v, d_o))
    states = random(2, 1, H, K, V).to(device)
    return (q, k, v, g, beta), states[0], d_o, states[1]


def _compare_maps(
    passes: DeltaPasses, segment: DeltaRuleSegment, entering: Tensor, d_o: Tensor, d_final: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    expected = segment.summarize()
    V = entering.shape[3]
    found = passes.maps(0, 1)
    return {
        "update": (found[..., :V], expected.update),
        "transition": (found[..., V:], expected.transition.parameters[0]),
    }


def _compare_outputs(
    passes: DeltaPasses, segment: DeltaRuleSegment, entering: Tensor, d_o: Tensor, d_final: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    o, final = passes.outputs(entering)
    expected_o, expected_finals = segment.output(entering, None)
    return {"output": (o, expected_o), "final state": (final, expected_finals[0])}


def _compare_adjoints(
    passes: DeltaPasses, segment: DeltaRuleSegment, entering: Tensor, d_o: Tensor, d_final: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    found = passes.adjoints(d_o)
    return {"adjoint of the entering state": (found, segment.adjoint(d_o.float(), None))}


def _compare_gradients(
    passes: DeltaPasses, segment: DeltaRuleSegment, entering: Tensor, d_o: Tensor, d_final: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    passes.replay(entering)
    found = passes.gradients(d_o, d_final)
    segment.replay(entering, None)
    expected = segment.backward(d_o.float(), d_final.unsqueeze(0))
    pairs = {"gradient of the entering state": (found.starts, expected.entering)}
    inputs = (found.q, found.k, found.v, found.g, found.beta)
    for name, x, y in zip(("q", "k", "v", "g", "beta"), inputs, expected.inputs, strict=True):
        if x is not None and y is not None:
            pairs[f"gradient of {name}"] = (x, y)
    return pairs


_PARTS = {
    "maps": _compare_maps,
    "outputs": _compare_outputs,
    "adjoints": _compare_adjoints,
    "gradients": _compare_gradients,
}
