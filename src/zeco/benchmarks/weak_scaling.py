"""Time per step as ranks are added, every rank keeping its number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from zeco.benchmarks.cluster import ClusterSpec
from zeco.benchmarks.sleep import GPU_LINK_BYTES_PER_S, stretch, stretched_times
from zeco.benchmarks.steps import SLEEPS, check_methods, run_steps

Told = Callable[[dict[str, Any]], None]


def weak_scaling(
    spec: ClusterSpec,
    *,
    ranks: tuple[int, ...],
    shape: tuple[int, int, int],
    layer: dict[str, Any],
    methods: list[str],
    repetitions: int,
    told: Told,
) -> dict[str, Any]:
    """Time one layer's step under every method for several numbers of ranks.

    Args:
        spec: the links; its ranks and nodes are replaced.
        ranks: the numbers of ranks.
        shape: heads, key dim and value dim of the fp32 state.
        layer: measured times (see `sleep.read_layer`).
        methods: names in `steps.METHODS`.
        repetitions: of every step.
        told: called with each number's figures as they come.
    """
    check_methods(methods, shape, ranks)
    times = stretched_times(layer, shape, spec.rate_bits_per_s)
    points: list[dict[str, Any]] = []
    for P in ranks:
        point = run_steps(
            replace(spec, num_ranks=P, nodes=None),
            shape=shape,
            tokens=emulated_tokens(layer, shape),
            times=times,
            methods=methods,
            repetitions=repetitions,
        )
        told(point)
        points.append(point)
    first = {row["method"]: row["median_ms"] for row in points[0]["rows"]}
    for point in points:
        for row in point["rows"]:
            row["over_first"] = round(row["median_ms"] / first[row["method"]], 4)
    return {
        "compute": SLEEPS,
        "layer": layer,
        "gpu_link_bytes_per_s": GPU_LINK_BYTES_PER_S,
        "stretch": stretch(layer, shape, spec.rate_bits_per_s),
        "passes_s": asdict(times),
        "points": points,
    }


def emulated_tokens(layer: dict[str, Any], shape: tuple[int, int, int], share: float = 1.0) -> int:
    """Return the tokens whose bytes are to an emulated state as the layer's are to its state.

    >>> emulated_tokens({"shape": (16, 128, 128), "tokens": 16384}, (16, 64, 64))
    8192
    """
    return max(1, round(layer["tokens"] * share * shape[2] / layer["shape"][2]))
