"""Forward and backward of the chunkwise torch operators on a CPU, against Transformers' torch paths.

    python benchmarks/cpu_operators.py --out benchmarks/results/cpu_operators.json

Correctness first: outputs and gradients must agree before anything is timed. All contestants take
turns within every repetition, so that a change of the machine's load meets them all; figures are
medians with quartiles. Floors are the matmuls of the chunkwise form alone, forward and backward,
on packed tensors of the same sizes, without gates, masks, copies or the scan over chunks.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from zeco.benchmarks.record import write_record
from zeco.ops import gated_delta_rule, gla, simple_gla, ssd

TRANSFORMERS = "transformers.models."
CHUNK = 64
# Products (rows, inner, columns) of a chunk, by letter: C tokens, K and V channels. Scores, their
# product with values, the chunk's update of the state, and the queries' read of the state.
DECAY_PRODUCTS = ("CKC", "CCV", "KCV", "CKV")
# And: keys' products with keys, the two solutions (as products with an inverse), keys' read.
DELTA_PRODUCTS = (*DECAY_PRODUCTS, "CKC", "CCV", "CCK", "CKV")
TOLERANCE = 1e-3

Run = Callable[[], object]


class Call:
    """A forward and backward pass, to be repeated."""

    def __init__(self, function: Callable[..., Tensor], leaves: Sequence[Tensor], d_o: Tensor):
        self.function, self.leaves, self.d_o = function, leaves, d_o

    def results(self) -> tuple[Tensor, ...]:
        """Return the output and all gradients."""
        o = self.function(*self.leaves)
        return o.detach(), *torch.autograd.grad(o, self.leaves, self.d_o)

    def __call__(self) -> None:
        self.results()


class Floor:
    """The matmuls of a chunkwise form: each product, and the two of its backward pass."""

    def __init__(self, products: Sequence[str], batch: int, sizes: dict[str, int]):
        self.products = []
        for rows, inner, columns in products:
            m, n, p = sizes[rows], sizes[inner], sizes[columns]
            a, b, d = torch.randn(batch, m, n), torch.randn(batch, n, p), torch.randn(batch, m, p)
            outs = torch.empty_like(d), torch.empty_like(a), torch.empty_like(b)
            self.products.append((a, b, d, outs))
        self.flops = sum(6 * a.shape[0] * a.shape[1] * b.shape[1] * b.shape[2]
                         for a, b, _, _ in self.products)  # fmt: skip

    def __call__(self) -> None:
        for a, b, d, (c, d_a, d_b) in self.products:
            torch.bmm(a, b, out=c)
            torch.bmm(d, b.mT, out=d_a)
            torch.bmm(a.mT, d, out=d_b)


def load(module: str, name: str) -> Callable[..., Any]:
    """Return Transformers' torch function, not the kernels that it may put in front of it."""
    return inspect.unwrap(getattr(importlib.import_module(TRANSFORMERS + module), name))


def make_calls(T: int, H: int, K: int, V: int) -> dict[str, dict[str, Call]]:
    """Return every operator's contestants, ours first, on the same inputs."""
    torch.manual_seed(0)
    q, v, d_o = torch.randn(1, T, H, K), torch.randn(1, T, H, V), torch.randn(1, T, H, V)
    k = F.normalize(torch.randn(1, T, H, K), dim=-1)
    g, gk = (F.logsigmoid(torch.randn(1, T, H, *more) + 3) for more in ((), (K,)))
    beta, dt, A = torch.rand(1, T, H), F.softplus(torch.randn(1, T, H) - 2), -1 - torch.rand(H)
    for x in (q, k, v, g, gk, beta, dt, A):
        x.requires_grad_()
    delta = load("qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule")
    mamba = load("mamba2.modeling_mamba2", "mamba2_chunk_scan")

    def scan(chunk: int) -> Callable[..., Tensor]:
        return lambda x, dt, A, B, C: mamba(x, dt, A, B, C, chunk)

    deltas, states = (q, k, v, g, beta), (v, dt, A, k, q)
    return {
        "gated_delta_rule": {
            "zeco": Call(lambda *x: gated_delta_rule(*x)[0], deltas, d_o),
            "transformers": Call(lambda *x: delta(*x)[0], deltas, d_o),
        },
        "ssd": {
            "zeco": Call(lambda *x: ssd(*x)[0], states, d_o),
            # 256 is the default of Mamba2Config; 64 is also what ours takes.
            "transformers": Call(scan(256), states, d_o),
            "transformers_chunk_64": Call(scan(64), states, d_o),
        },
        "simple_gla": {"zeco": Call(lambda *x: simple_gla(*x)[0], (q, k, v, g), d_o)},
        "gla": {"zeco": Call(lambda *x: gla(*x)[0], (q, k, v, gk), d_o)},
    }


def check(calls: dict[str, dict[str, Call]]) -> dict[str, float]:
    """Return the largest relative error of each against the first; exit above the tolerance."""
    errors = {}
    for operator, contestants in calls.items():
        reference = exact(operator, contestants["zeco"])
        for name, call in contestants.items():
            pairs = zip(call.results(), reference, strict=True)
            error = max(float((x - y).norm() / y.norm()) for x, y in pairs)
            errors[f"{operator}/{name}"] = error
            if not error < TOLERANCE:
                sys.exit(f"{operator}: {name} is off by {error:.1e} (relative to fp64): no times")
    return errors


def exact(operator: str, call: Call) -> tuple[Tensor, ...]:
    """Return the output and gradients in fp64."""
    leaves = [x.detach().double().requires_grad_() for x in call.leaves]
    return Call(call.function, leaves, call.d_o.double()).results()


def measure(runs: dict[str, Run], repetitions: int) -> dict[str, list[float]]:
    """Return each one's times in ms; all run once in every repetition, in alternating order."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repetitions + 1):
        order = list(runs.items())
        for name, run in order if repetition % 2 else reversed(order):
            start = time.perf_counter()
            run()
            elapsed = 1e3 * (time.perf_counter() - start)
            # The first repetition warms up.
            if repetition:
                times[name].append(elapsed)
    return times


def summarize(times: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return {"median_ms": median, "quartile_1_ms": low, "quartile_3_ms": high, "min_ms": min(times)}


def make_ratios(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the others' medians over ours, and ours over the floors."""
    median = {name: figure["median_ms"] for name, figure in figures.items()}
    ratios = {}
    for name, value in median.items():
        operator, contestant = name.split("/")
        ours = median[f"{operator}/zeco"]
        if contestant == "floor":
            ratios[f"{operator}: zeco over floor"] = ours / value
        elif contestant != "zeco":
            ratios[f"{operator}: {contestant} over zeco"] = value / ours
    return ratios


def show(figures: dict[str, dict[str, float]], ratios: dict[str, float]) -> None:
    table = Table(title="Forward and backward on a CPU, fp32")
    for column in ("run", "median ms", "quartiles ms", "min ms"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, x in figures.items():
        spread = f"{x['quartile_1_ms']:.1f} to {x['quartile_3_ms']:.1f}"
        table.add_row(name, f"{x['median_ms']:.1f}", spread, f"{x['min_ms']:.1f}")
    console = Console()
    console.print(table)
    for name, ratio in ratios.items():
        console.print(f"{name}: {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--channels", type=int, default=64, help="of keys and of values")
    arguments = parser.parse_args()
    if arguments.repetitions < 2:
        parser.error(f"--repetitions is {arguments.repetitions}: pass at least 2, for quartiles")
    if arguments.tokens % CHUNK:
        parser.error(f"--tokens is {arguments.tokens}: pass a multiple of {CHUNK}, as floors need")
    torch.set_num_threads(arguments.threads)
    T, H, K = arguments.tokens, arguments.heads, arguments.channels
    calls = make_calls(T, H, K, K)
    errors = check(calls)
    runs: dict[str, Run] = {}
    flops: dict[str, int] = {}
    for operator, contestants in calls.items():
        runs |= {f"{operator}/{name}": call for name, call in contestants.items()}
        products = DELTA_PRODUCTS if operator == "gated_delta_rule" else DECAY_PRODUCTS
        floor = Floor(products, H * T // CHUNK, {"C": CHUNK, "K": K, "V": K})
        runs[f"{operator}/floor"], flops[operator] = floor, floor.flops
    load_before = os.getloadavg()[0]
    times = measure(runs, arguments.repetitions)
    figures = {name: summarize(x) for name, x in times.items()}
    ratios = make_ratios(figures)
    show(figures, ratios)
    if arguments.out is None:
        return
    record = {
        "shape_BTHKV": [1, T, H, K, K],
        "dtype": "float32",
        "threads": arguments.threads,
        "repetitions": arguments.repetitions,
        "transformers": importlib.import_module("transformers").__version__,
        "load_average_1min": {"before": load_before, "after": os.getloadavg()[0]},
        "max_relative_error_to_fp64": errors,
        "floor_flops": flops,
        "forward_backward": figures,
        "ratios": ratios,
    }
    command = "python " + shlex.join(sys.argv)
    write_record(arguments.out, command=command, figures=record)


if __name__ == "__main__":
    main()
