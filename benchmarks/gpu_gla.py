"""The decay family on one GPU: are the Triton kernels right, and how long do they take.

    python benchmarks/gpu_gla.py --out benchmarks/results/gpu_decay.json

Correctness first, against the chunkwise torch form in fp64: a shape that fails gets no times. Times
are medians of CUDA-graph replays (launches hidden) and of ordinary calls from Python; floors count
every input and output once at the copy bandwidth that the same run measures. --fla adds Flash Linear
Attention's public op, with its default settings, in the same run.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from zeco.benchmarks.device import capture, peak_mib
from zeco.benchmarks.record import write_record
from zeco.kernels.decay import gradients as decay_gradients
from zeco.kernels.decay import passes as decay
from zeco.kernels.decay import plan as decay_plan
from zeco.kernels.scalar import gradients as scalar_gradients
from zeco.kernels.scalar import passes as scalar
from zeco.operators.gla import gla
from zeco.operators.simple_gla import simple_gla

SHAPES = {
    "base": (1, 16384, 16, 128, 128),
    "long": (1, 65536, 16, 128, 128),
    "small_heads": (1, 16384, 32, 64, 64),
    "large_heads": (1, 16384, 4, 256, 256),
}
GATES = {"weak": -0.05, "medium": -0.5, "strong": -20.0}


def make_inputs(shape, dtype, gate_dtype, gate: float) -> tuple[Tensor, ...]:
    B, T, H, K, V = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator)

    q, k = normal(B, T, H, K).to(dtype), normal(B, T, H, K).to(dtype)
    v, d_o = normal(B, T, H, V).to(dtype), normal(B, T, H, V).to(dtype)
    g = gate * (0.5 + torch.rand(B, T, H, K, device="cuda", generator=generator))
    return q, k, v, g.to(gate_dtype), d_o, normal(B, H, K, V), normal(B, H, K, V)


class Call:
    """One call's passes, to be timed in parts."""

    def __init__(self, inputs: tuple[Tensor, ...], **options: Any) -> None:
        self.q, self.k, self.v, self.g, self.d_o, self.entering, self.d_leaving = inputs
        self.plan = decay_plan.make_plan(self.q, self.v, self.g, **options)
        self.scale = self.q.shape[3] ** -0.5

    def state(self) -> None:
        self.states, self.chunks = decay.state_pass(self.plan, self.k, self.v, self.g)

    def output(self) -> tuple[Tensor, Tensor]:
        return decay.output_pass(
            self.plan, self.q, self.k, self.v, self.g, scale=self.scale, states=self.states,
            chunks=self.chunks, entering=self.entering,
        )  # fmt: skip

    def adjoint(self) -> None:
        self.adjoints, self.chunks = decay.adjoint_state_pass(
            self.plan, self.q, self.d_o, self.g, scale=self.scale
        )

    def gradients(self) -> decay_gradients.DecayGradients:
        known = {
            "scale": self.scale, "states": self.states, "chunks": self.chunks,
            "entering": self.entering,
        }  # fmt: skip
        given = (self.plan, self.q, self.k, self.v)
        return decay_gradients.gradient_passes(
            *given, self.g, self.d_o, adjoints=self.adjoints, d_leaving=self.d_leaving,
            queries=decay_gradients.query_pass(*given, self.d_o, **known), **known,
        )  # fmt: skip

    def forward(self) -> tuple[Tensor, Tensor]:
        self.state()
        return self.output()

    def both(self) -> None:
        self.forward()
        self.adjoint()
        self.gradients()


class ScalarCall(Call):
    """The same for one decay a head: simple GLA."""

    def __init__(self, inputs: tuple[Tensor, ...], **options: Any) -> None:
        q, k, v, g, *rest = inputs
        super().__init__((q, k, v, one_a_head(g), *rest), **options)
        self.sums = scalar.chunk_sums(self.plan, self.g)

    def state(self) -> None:
        self.sums = scalar.chunk_sums(self.plan, self.g)
        self.states = scalar.state_pass(self.plan, self.k, self.v, self.sums)

    def output(self) -> tuple[Tensor, Tensor]:
        return scalar.output_pass(
            self.plan, self.q, self.k, self.v, self.sums, scale=self.scale, states=self.states,
            entering=self.entering,
        )  # fmt: skip

    def adjoint(self) -> None:
        self.adjoints = scalar.adjoint_state_pass(
            self.plan, self.q, self.d_o, self.sums, scale=self.scale
        )

    def gradients(self) -> decay_gradients.DecayGradients:
        known = {
            "scale": self.scale, "states": self.states, "sums": self.sums,
            "entering": self.entering,
        }  # fmt: skip
        given = (self.plan, self.q, self.k, self.v)
        return scalar_gradients.gradient_passes(
            *given, self.g, self.d_o, adjoints=self.adjoints, d_leaving=self.d_leaving,
            queries=scalar_gradients.query_pass(*given, self.d_o, **known), **known,
        )  # fmt: skip


def one_a_head(g: Tensor) -> Tensor:
    return g[..., 0].contiguous()


class Public:
    """A call through autograd."""

    def __init__(self, inputs: tuple[Tensor, ...], run: Callable[..., Tensor]) -> None:
        *given, self.d_o, _, _ = inputs
        self.leaves = [x.detach().requires_grad_() for x in given]
        self.run = run

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.run(*self.leaves)

    def both(self) -> None:
        torch.autograd.grad(self.run(*self.leaves), self.leaves, self.d_o)


def run_ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    operator = gla if g.ndim == 4 else simple_gla
    return operator(q, k, v, g, backend="triton")[0]


def run_fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    return (chunk_gla if g.ndim == 4 else chunk_simple_gla)(q, k, v, g)[0]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def errors(call: Call) -> dict[str, float]:
    """Return errors against the torch form in fp64."""
    o, leaving = call.forward()
    call.adjoint()
    found = call.gradients()
    given = (call.q, call.k, call.v, call.g, call.entering)
    leaves = [x.double().requires_grad_() for x in given]
    operator = gla if call.g.ndim == 4 else simple_gla
    expected, final = operator(
        *leaves[:4], scale=call.scale, initial_state=leaves[4], output_final_state=True,
        backend="torch",
    )  # fmt: skip
    grads = torch.autograd.grad(
        (expected, final), leaves, (call.d_o.double(), call.d_leaving.double())
    )
    pairs = {
        "o": (o, expected.detach()),
        "final_state": (leaving, final.detach()),
        "dq": (found.q, grads[0]),
        "dk": (found.k, grads[1]),
        "dv": (found.v, grads[2]),
        "dg": (cast("Tensor", found.g), grads[3]),
        "d_initial_state": (found.entering, grads[4]),
    }
    return {name: relative(*pair) for name, pair in pairs.items()}


def bounds(dtype: torch.dtype) -> float:
    return {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 2e-4}[dtype]


def time_eager(run: Callable[[], object], repeats: int = 30) -> float:
    """Return the median time of a call in ms, launches included."""
    for _ in range(5):
        run()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def time_graph(run: Callable[[], object], repeats: int = 30) -> float:
    """Return the median time of a call in ms as replayed from a CUDA graph."""
    return time_eager(capture(run), repeats)


def copy_bandwidth() -> float:
    """Return bytes read and written per second by a large copy."""
    x = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    y = torch.empty_like(x)
    return 2 * x.numel() / (time_eager(lambda: y.copy_(x)) * 1e-3)


def parts(call: Call) -> dict[str, float]:
    """Return the time of every kernel of a forward and backward pass, in ms, by profiler."""
    call.both()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            call.both()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name, []).append(event.device_time / 1e3)
    found = {}
    for name, times in kernels.items():
        each = len(times) // 5
        for i in range(max(each, 1)):
            short = name[:60]
            found[f"{short}_{i}" if each > 1 else short] = statistics.median(
                times[i :: max(each, 1)]
            )
    return found


def floors(shape, dtype: torch.dtype, g: Tensor, bandwidth: float) -> dict[str, float]:
    """Return ms at the copy bandwidth, each input read and each output written once."""
    B, T, H, K, V = shape
    tokens, size = B * T * H, dtype.itemsize
    forward = tokens * (2 * K + 2 * V) * size + g.nbytes
    backward = tokens * (4 * K + 3 * V) * size + 2 * g.nbytes
    return {
        "forward": forward / bandwidth * 1e3,
        "forward_backward": (forward + backward) / bandwidth * 1e3,
    }


def public_times(call: Public) -> dict[str, float]:
    # Backward passes run in a thread of autograd's own, unless it is told not to.
    with torch.autograd.set_multithreading_enabled(False):
        one_thread = time_eager(call.both)
    return {
        "forward": time_eager(call.forward),
        "forward_backward": time_eager(call.both),
        "forward_backward_one_thread": one_thread,
        "forward_graph": time_graph(call.forward),
        "forward_peak_mib": peak_mib(call.forward),
        "forward_backward_peak_mib": peak_mib(call.both),
    }


def measure(
    family, shape, dtype, gate_dtype, gate: str, *, check_tokens: int, bandwidth: float, fla: bool
):
    B, T, H, K, V = shape
    small = (B, min(T, check_tokens), H, K, V)
    found: dict[str, Any] = {"family": family, "shape_BTHKV": shape, "dtype": str(dtype)}
    found |= {"gates": str(gate_dtype), "decay": gate}
    kind = {"gla": Call, "simple_gla": ScalarCall}[family]
    found["errors"] = errors(kind(make_inputs(small, dtype, gate_dtype, GATES[gate])))
    torch.cuda.empty_cache()
    bound = bounds(dtype)
    if not all(e < bound for e in found["errors"].values()):
        found["refused"] = f"an error is above {bound}"
        return found
    call = kind(make_inputs(shape, dtype, gate_dtype, GATES[gate]))
    found["segments"] = call.plan.num_segments
    found["graph_ms"] = {
        "forward": time_graph(call.forward),
        "forward_backward": time_graph(call.both),
    }
    found["eager_ms"] = {
        "forward": time_eager(call.forward),
        "forward_backward": time_eager(call.both),
    }
    found["kernels_ms"] = parts(call)
    found["floor_ms"] = floors(shape, dtype, call.g, bandwidth)
    found["peak_mib"] = {
        "forward": peak_mib(call.forward),
        "forward_backward": peak_mib(call.both),
    }
    q, k, v, g, *rest = make_inputs(shape, dtype, gate_dtype, GATES[gate])
    public = Public((q, k, v, g if family == "gla" else one_a_head(g), *rest), run_ours)
    found["public_op_ms"] = public_times(public)
    if fla:
        public.run = run_fla
        found["fla_ms"] = public_times(public)
        # Autograd isn't captured in graphs here: the second compares FLA's calls with our kernels.
        found["fla_over_ours"] = {
            "forward_both_graphs": found["fla_ms"]["forward_graph"] / found["graph_ms"]["forward"],
            "forward_backward_eager_over_graph": found["fla_ms"]["forward_backward"]
            / found["graph_ms"]["forward_backward"],
            "forward_backward_public_ops": found["fla_ms"]["forward_backward"]
            / found["public_op_ms"]["forward_backward"],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", nargs="*", default=["gla"], choices=["gla", "simple_gla"])
    parser.add_argument("--shapes", nargs="*", default=["base"], choices=SHAPES)
    parser.add_argument("--decays", nargs="*", default=["weak"], choices=GATES)
    parser.add_argument("--gate-dtypes", nargs="*", default=["float32"])
    parser.add_argument("--fla", action="store_true", help="measure FLA at the first run's shape")
    parser.add_argument("--check-tokens", type=int, default=4096)
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    figures: dict[str, Any] = {"copy_bytes_per_s": bandwidth, "runs": []}
    torch.cuda.empty_cache()
    runs = product(arguments.families, arguments.shapes, arguments.gate_dtypes, arguments.decays)
    for family, name, gate_dtype, gate in runs:
        fla = arguments.fla and not figures["runs"]
        run = measure(
            family, SHAPES[name], torch.bfloat16, getattr(torch, gate_dtype), gate,
            check_tokens=arguments.check_tokens, bandwidth=bandwidth, fla=fla,
        )  # fmt: skip
        figures["runs"].append(run)
        print(family, name, gate_dtype, gate, {k: v for k, v in run.items() if k != "shape_BTHKV"})
    command = "python " + shlex.join(sys.argv)
    write_record(arguments.out, command=command, figures=figures)


if __name__ == "__main__":
    main()
