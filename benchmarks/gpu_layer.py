"""A gated-linear-attention layer on one GPU: what its kernels are, a graph of it, memory, a timeline.

    python benchmarks/gpu_layer.py --out benchmarks/results/gpu_layer.json

Parts, any of which --parts picks:

launches   kernels and GPU time of a layer's forward and backward pass, and of each of its parts alone
graph      the layer's forward and backward pass captured in a CUDA graph, its results compared
memory     peak memory and time of a stack of layers, ours and then Flash Linear Attention's layer of
           the same sizes (package flash-linear-attention), one after the other
timeline   kernels of a middle rank's layer by stream, as a PNG. The layer, the method and the scan are
           the real ones; the wire is a stand-in: a message arrives --hop-us late for every rank that
           it has passed. Of five runs the one is shown whose scans lie under compute for the middle
           share of their time. With --captured the runs are replays of a CUDA graph, in which
           less time passes between kernels. Started by torchrun on several GPUs, with
           --parts timeline, the ranks are real, and so is the wire.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from zeco.benchmarks.device import capture, kernel_times, synchronize, time_in_turn
from zeco.benchmarks.fla_settings import one_setting_each
from zeco.benchmarks.record import write_record
from zeco.benchmarks.stand_in import StandInTransport, measure_cycles_per_us
from zeco.benchmarks.timeline import (
    describe_timeline,
    draw_timeline,
    middle_timeline,
    trace_timelines,
)
from zeco.collectives.groups import Group
from zeco.layers import GatedLinearAttention
from zeco.operators.log_gate import log_sigmoid_gate
from zeco.ops import gla
from zeco.sequence_parallel import SequenceParallel

Run = Callable[[], object]
TRACES = 5
PARTS = ("launches", "graph", "memory", "timeline")


def make_layer(given: argparse.Namespace) -> GatedLinearAttention:
    torch.manual_seed(0)
    layer = GatedLinearAttention(
        given.width, given.heads, expand_k=given.expand_k, conv_width=given.conv_width
    )
    return layer.to(given.device, given.dtype)


def tokens(given: argparse.Namespace) -> Tensor:
    x = torch.randn(1, given.tokens, given.width, device=given.device)
    return x.to(given.dtype).requires_grad_()


def passes(module: Callable[..., Tensor], leaves: list[Tensor], *inputs: Tensor) -> dict[str, Run]:
    """Return the forward pass without autograd, and the forward and backward pass."""
    d_y = torch.ones_like(module(*inputs).detach())

    def forward() -> Tensor:
        with torch.no_grad():
            return module(*inputs)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(*inputs), leaves, d_y)

    return {"forward": forward, "forward_backward": both}


def layer_passes(given: argparse.Namespace, sp: SequenceParallel | None = None) -> dict[str, Run]:
    layer, x = make_layer(given), tokens(given)
    return passes(lambda y: layer(y, sp=sp)[0], [x, *layer.parameters()], x)


def part_passes(given: argparse.Namespace) -> dict[str, dict[str, Run]]:
    """Return the passes of each part of a layer alone, on inputs of the layer's sizes."""
    layer, x = make_layer(given), tokens(given)
    heads, convolution = layer.heads, layer.heads.convolution
    shapes = heads.shapes
    H, K = shapes[0]
    V = shapes[2][1]

    def leaf(*dims: int, dtype: torch.dtype = given.dtype) -> Tensor:
        x = torch.randn(1, given.tokens, *dims, device=given.device)
        return x.to(dtype).requires_grad_()

    mixed = leaf(sum(h * d for h, d in shapes))
    o, r = leaf(H, V), leaf(H, V)
    logits = leaf(H * K)
    q, k, v = leaf(H, K), leaf(H, K), leaf(H, V)
    g = F.logsigmoid(leaf(H, K, dtype=torch.float32)).div(16).detach().requires_grad_()
    linears = [heads.projection, layer.decay_down, layer.decay_up, layer.gate, layer.out]
    weights = [weight for linear in linears for weight in linear.parameters()]

    def project(y: Tensor) -> Tensor:
        parts = heads.projection(y), layer.decay_up(layer.decay_down(y)), layer.out(layer.gate(y))
        return torch.cat(parts, -1)

    found = {
        "projections": passes(project, [x, *weights], x),
        "decay gate": passes(
            lambda y: log_sigmoid_gate(y, normalizer=layer.gate_normalizer), [logits], logits
        ),
        "operator": passes(lambda *y: gla(*y)[0], [q, k, v, g], q, k, v, g),
        "norm and output gate": passes(layer.norm, [o, r, *layer.norm.parameters()], o, r),
    }
    if convolution is not None:
        found["convolution and SiLU"] = passes(
            lambda y: convolution(y)[0], [mixed, *convolution.parameters()], mixed
        )
    return found


def measure_launches(given: argparse.Namespace) -> dict[str, Any]:
    everything = {"whole layer": layer_passes(given), **part_passes(given)}
    figures: dict[str, Any] = {}
    for name, runs in everything.items():
        figures[name] = {}
        for work, run in runs.items():
            kernels = kernel_times(run)
            count, seconds = (sum(x[i] for x in kernels.values()) for i in (0, 1))
            figures[name][work] = {
                "launches": count,
                "kernels_ms": round(seconds * 1e3, 4),
                "kernels": {n[:200]: [c, round(s * 1e3, 4)] for n, (c, s) in kernels.items()},
            }
            print(f"{name:<24}{work:<18}{count:>5} launches {seconds * 1e3:>9.3f} ms of kernels")
    return figures


def measure_graph(given: argparse.Namespace) -> dict[str, Any]:
    """Capture a layer's passes; compare a replay's results with those of the eager call."""
    layer, x = make_layer(given), tokens(given)
    runs = passes(lambda y: layer(y)[0], [x, *layer.parameters()], x)
    found: list[tuple[Tensor, ...]] = []

    def both() -> None:
        found[:] = [runs["forward_backward"]()]

    replays = {"forward": capture(runs["forward"]), "forward_backward": capture(both)}
    captured = found[0]
    with torch.no_grad():
        x.mul_(0.5)  # a graph reads its inputs where they lie
    both()
    expected = [g.clone() for g in found[0]]
    replays["forward_backward"]()
    synchronize(given.device)
    errors = [
        float((g - e).float().norm() / e.float().norm())
        for g, e in zip(captured, expected, strict=True)
    ]
    timed = {f"{work}, eager": run for work, run in runs.items()}
    timed |= {f"{work}, graph": run for work, run in replays.items()}
    times = time_in_turn(timed, given.device, given.repetitions)
    medians = {name: round(statistics.median(t) * 1e3, 4) for name, t in times.items()}
    print("graph", medians, "largest difference", max(errors))
    return {"median_ms": medians, "largest_difference": max(errors)}


class Stack(nn.Module):
    """Layers with a residual connection around each."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def fla_layer(given: argparse.Namespace) -> nn.Module:
    from fla.layers.gla import GatedLinearAttention as FLALayer

    layer = FLALayer(
        hidden_size=given.width, num_heads=given.heads, expand_k=given.expand_k, expand_v=1.0,
        use_short_conv=given.conv_width > 0, conv_size=given.conv_width or 4,
    )  # fmt: skip
    return layer.to(given.device, given.dtype)


def measure_memory(given: argparse.Namespace) -> dict[str, Any]:
    """Return peak memory over the parameters' and time of stacks of layers."""
    makers = {"zeco": make_layer, "fla": fla_layer}
    figures: dict[str, Any] = {"layers": given.layers, "fla_tuning": given.fla_tuning}
    untuned = given.fla_tuning == "off"
    for name in given.stacks:
        try:
            with one_setting_each() if untuned else nullcontext():
                figures[name] = measure_stack(given, makers[name], times=not untuned)
        except Exception as error:
            traceback.print_exc()
            figures[name] = {"failed": f"{type(error).__name__}: {error}"}
        print(name, figures[name])
        torch.cuda.empty_cache()
    return figures


def measure_stack(
    given: argparse.Namespace, make: Callable[[argparse.Namespace], nn.Module], *, times: bool
) -> dict[str, Any]:
    stack = Stack([make(given) for _ in range(given.layers)])
    x = tokens(given)
    d_y = torch.ones_like(x)

    def both() -> None:
        stack.zero_grad(set_to_none=True)
        x.grad = None
        stack(x).backward(d_y)

    both()  # compiles, and autotunes
    for parameter in [x, *stack.parameters()]:
        parameter.grad = None
    synchronize(given.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = stack(x)
    kept = torch.cuda.memory_allocated() - before
    y.backward(d_y)
    del y
    synchronize(given.device)
    peak = torch.cuda.max_memory_allocated()
    figures: dict[str, Any] = {
        "parameters": sum(p.numel() for p in stack.parameters()),
        "before_mib": round(before / 2**20, 1),
        "kept_for_backward_mib": round(kept / 2**20, 1),
        "kept_for_backward_mib_a_layer": round(kept / 2**20 / given.layers, 2),
        "peak_mib": round(peak / 2**20, 1),
    }
    if times:
        runs = {"forward": passes(stack, [x], x)["forward"], "forward_backward": both}
        found = time_in_turn(runs, given.device, given.repetitions)
        figures["median_ms_a_layer"] = {
            work: round(statistics.median(t) * 1e3 / given.layers, 4) for work, t in found.items()
        }
    return figures


def join_group(given: argparse.Namespace) -> Group:
    """Return the ranks that torchrun started, or a middle rank without neighbours."""
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(given.device)
        dist.init_process_group("nccl", device_id=given.device)
        given.ranks = dist.get_world_size()
        return dist.group.WORLD
    cycles = measure_cycles_per_us(given.device)
    rank, ranks = given.ranks // 2, given.ranks
    return StandInTransport(rank, ranks, hop_us=given.hop_us, cycles_per_us=cycles)


def measure_timeline(given: argparse.Namespace) -> dict[str, Any]:
    """Trace a rank's layer, draw it, and say how much of its scans lies under compute."""
    group = join_group(given)
    stand_in = isinstance(group, StandInTransport)
    wire = f"{given.hop_us:g} µs a hop" if stand_in else f"{given.ranks} GPUs"
    sp = SequenceParallel(group, algorithm=given.algorithm, num_blocks=given.num_blocks)
    split = layer_passes(given, sp)
    if isinstance(group, StandInTransport):
        split = {work: group.joined(run) for work, run in split.items()}
    plain = layer_passes(given)
    if stand_in:  # what arrives is zeros, so a rank computes what a lone one does
        check_same(split["forward_backward"](), plain["forward_backward"]())
    else:
        split["forward_backward"]()
    timelines = trace_timelines(
        split["forward_backward"],
        TRACES,
        inside_kernels=given.algorithm == "device_chain",
        captured=given.captured,
    )
    for timeline in timelines:
        print("timeline:", *(f"{scan} {scan.share:.0%}" for scan in timeline.scans))
    shown = middle_timeline(timelines)
    name = given.out.stem + ("" if stand_in else f"_{sp.rank}")
    how = ", as a CUDA graph" if given.captured else ""
    draw_timeline(
        given.out.with_name(f"{name}.png"),
        shown.kernels,
        shown.rows,
        title=f"A GLA layer of rank {sp.rank} of {sp.size}, {given.tokens} tokens, width "
        f"{given.width}, forward and backward{how}: {given.algorithm}, {wire}",
    )
    runs = {f"{work}, without sp": run for work, run in plain.items()}
    runs |= {f"{work}, rank {sp.rank} of {sp.size}": run for work, run in split.items()}
    runs = {name: capture(run) for name, run in runs.items()}  # a slow host is no part of the times
    times = time_in_turn(runs, given.device, given.repetitions)
    medians = {name: round(statistics.median(t) * 1e3, 4) for name, t in times.items()}
    print("timeline:", medians)
    return {
        "rank": sp.rank,
        "ranks": sp.size,
        "wire": wire,
        "algorithm": given.algorithm,
        "captured": given.captured,
        "median_ms": medians,
        "shares_of_all_traces": [[round(scan.share, 4) for scan in t.scans] for t in timelines],
        **describe_timeline(shown),
    }


def check_same(found: Any, expected: Any) -> None:
    """Refuse gradients that differ by more than their rounding."""
    errors = [
        float((f - e).float().norm() / e.float().norm())
        for f, e in zip(found, expected, strict=True)
    ]
    print("timeline: largest difference from a lone rank", max(errors))
    if not max(errors) < 1e-2:
        raise RuntimeError(f"the rank's gradients are off: {errors}")


MEASURES = {
    "launches": measure_launches,
    "graph": measure_graph,
    "memory": measure_memory,
    "timeline": measure_timeline,
}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--expand-k", type=float, default=0.5)
    parser.add_argument("--conv-width", type=int, default=4, help="0 for none")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=24, help="of the stack")
    parser.add_argument("--stacks", nargs="*", default=["zeco", "fla"], choices=["zeco", "fla"])
    parser.add_argument(
        "--fla-tuning", default="default", choices=["default", "off"], help="of its kernels"
    )
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=8, help="that the timeline stands for")
    parser.add_argument("--hop-us", type=float, default=5.0)
    parser.add_argument("--algorithm", default="device_chain")
    parser.add_argument("--num-blocks", type=int, help="left out, the cost model chooses")
    parser.add_argument(
        "--captured", action="store_true", help="the timeline's passes replayed from a CUDA graph"
    )
    given = parser.parse_args(arguments)
    given.dtype = torch.bfloat16
    given.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return given


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    names = ("width", "heads", "expand_k", "conv_width", "tokens")
    figures: dict[str, Any] = {"sizes": {name: getattr(given, name) for name in names}}
    failed = False
    for part in given.parts:
        try:
            figures[part] = MEASURES[part](given)
        except Exception as error:  # the other parts are measured all the same
            failed = True
            traceback.print_exc()
            figures[part] = {"failed": f"{type(error).__name__}: {error}"}
        torch.cuda.empty_cache()
    if given.device.index == 0:
        write_record(given.out, command="python " + shlex.join(sys.argv), figures=figures)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
