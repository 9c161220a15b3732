"""What calls cost on this device, and what the device can do at best: one CPU, or one CUDA GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

from zeco.core.errors import ArgumentError, unknown_name

Run = Callable[[], object]
KeyT = TypeVar("KeyT", bound=Hashable)
WARM_UP_RUNS = 3


def pick_device(name: str) -> torch.device:
    """Return a device to measure on.

    Args:
        name: ``"cpu"``, ``"cuda"``, or ``"auto"`` for CUDA where there is one.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ArgumentError(unknown_name("device", name, ("auto", "cpu", "cuda")))
    if name == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda, but torch finds no CUDA device; use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def synchronize(device: torch.device) -> None:
    """Wait until a device is through with its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_in_turn(
    runs: Mapping[KeyT, Run],
    device: torch.device,
    repetitions: int,
    *,
    warm_up: int = WARM_UP_RUNS,
    meet: Callable[[], None] | None = None,
) -> dict[KeyT, list[float]]:
    """Return the seconds of every run, all of them once in each repetition, in alternating order.

    A change of the device's clock or load so meets them all alike. On CUDA the time is the
    device's, from an empty queue to its last kernel, so that launches count where they are slower
    than the kernels.

    Args:
        runs: by name.
        device: where they run.
        repetitions: of each.
        warm_up: runs of each before any is timed.
        meet: called before each, untimed: lets several ranks begin together.
    """
    found: dict[KeyT, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(warm_up):
            run()
    for repetition in range(repetitions):
        order = list(runs.items())
        for name, run in order if repetition % 2 else reversed(order):
            found[name].append(_time(run, device, meet))
    return found


def _time(run: Run, device: torch.device, meet: Callable[[], None] | None) -> float:
    synchronize(device)
    if meet is not None:
        meet()
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def capture(
    run: Run,
    *,
    warm_up: int = WARM_UP_RUNS,
    pool: Any = None,
    errors: str = "global",
) -> Run:
    """Return the replay of a CUDA graph of ``run``, autograd included.

    Args:
        run: what is captured.
        warm_up: runs before, which allocate and compile what a graph can't.
        pool: memory (`torch.cuda.graph_pool_handle`) that the graph shares with others, of which then
            only one may run at a time and whose results nobody keeps; None for its own.
        errors: whose forbidden calls end the capture, see `torch.cuda.graph`.

    Raises:
        RuntimeError: something in it can't be captured, such as a look at a value.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode=errors):
        run()
    return graph.replay


def kernel_times(run: Run) -> dict[str, tuple[int, float]]:
    """Return the launches and the seconds of every kernel of a run, copies and fills included."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, seconds = found.get(event.name, (0, 0.0))
            found[event.name] = (count + 1, seconds + event.device_time * 1e-6)
    return found


def peak_mib(run: Run) -> float:
    """Return the most MiB that lie allocated during a run, over what lies there before it."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def copy_bytes_per_s(device: torch.device) -> float:
    """Return the bytes read and written per second by a large copy."""
    x = torch.ones(2**31 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    seconds = time_in_turn({"copy": lambda: y.copy_(x)}, device, 9)["copy"]
    return 2 * x.numel() / min(seconds)


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOPs per second of a large square matrix product."""
    n = 8192 if device.type == "cuda" else 512
    x, y = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    seconds = time_in_turn({"matmul": lambda: x @ y}, device, 9)["matmul"]
    return 2 * n**3 / min(seconds)
