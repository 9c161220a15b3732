"""How much computing a method needs to hide its communication: fewer and fewer tokens on a rank."""

from __future__ import annotations

from typing import Any

from zeco.benchmarks.cluster import ClusterSpec
from zeco.benchmarks.sleep import GPU_LINK_BYTES_PER_S, stretch, stretched_times
from zeco.benchmarks.steps import SLEEPS, check_methods, run_steps
from zeco.benchmarks.weak_scaling import Told, emulated_tokens


def overlap(
    spec: ClusterSpec,
    *,
    shares: tuple[float, ...],
    shape: tuple[int, int, int],
    layer: dict[str, Any],
    methods: list[str],
    repetitions: int,
    told: Told,
) -> dict[str, Any]:
    """Time one layer's step under every method for several numbers of tokens on a rank.

    Args:
        spec: the cluster.
        shares: of the layer's measured tokens, and so of its times.
        shape: heads, key dim and value dim of the fp32 state.
        layer: measured times (see `sleep.read_layer`).
        methods: names in `steps.METHODS`.
        repetitions: of every step.
        told: called with each share's figures as they come.
    """
    check_methods(methods, shape, (spec.num_ranks,))
    points: list[dict[str, Any]] = []
    for share in shares:
        point = run_steps(
            spec,
            shape=shape,
            tokens=emulated_tokens(layer, shape, share),
            times=stretched_times(layer, shape, spec.rate_bits_per_s, share=share),
            methods=methods,
            repetitions=repetitions,
        )
        point["tokens"] = round(layer["tokens"] * share)
        told(point)
        points.append(point)
    return {
        "compute": SLEEPS,
        "layer": layer,
        "gpu_link_bytes_per_s": GPU_LINK_BYTES_PER_S,
        "stretch": stretch(layer, shape, spec.rate_bits_per_s),
        "points": points,
    }
