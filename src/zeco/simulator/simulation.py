"""A model's step on a cluster: all layers forward, then all backward, by every method."""

from __future__ import annotations

from dataclasses import dataclass

from zeco.core.costs import Plan, choose_plan
from zeco.core.engine import Span
from zeco.simulator.cluster import Cluster
from zeco.simulator.config import SimulationConfig
from zeco.simulator.layer import PassTimeline, schedule_of, simulate_pass
from zeco.simulator.memory import held_bytes


@dataclass(frozen=True)
class Outcome:
    """What a method takes.

    Attributes:
        method: its name.
        plan: its scan, if it has one.
        step_s: of all layers, forward and backward, until the slowest device is done.
        exposed_s: of it, that the device which waited most stood still.
        sent_inside_bytes: that the device which sent most sent inside its node.
        sent_between_bytes: that the device which sent most sent to other nodes.
        scan_bytes: that a scan holds on a device while it runs.
        kept_bytes: of entering states that a device keeps for the backward pass.
        phases_s: of the first forward and the first backward pass, the longest of all devices for
            every phase.
        spans: of the last layer's forward and backward pass, for timelines.
    """

    method: str
    plan: Plan | None
    step_s: float
    exposed_s: float
    sent_inside_bytes: float
    sent_between_bytes: float
    scan_bytes: float
    kept_bytes: float
    phases_s: dict[str, float]
    spans: list[Span]


def simulate(config: SimulationConfig) -> list[Outcome]:
    """Simulate every method of a configuration.

    A device begins a layer when it is done with the one before: delays are carried on, not added up.
    """
    cluster = config.cluster.build()
    return [_simulate(config, cluster, method) for method in config.methods]


def _simulate(config: SimulationConfig, cluster: Cluster, method: str) -> Outcome:
    layer, work = config.layer, config.layer.build()
    plan = _plan(config, cluster, method)
    algorithm, num_blocks = ("chain", 1) if plan is None else (plan.algorithm, plan.num_blocks)
    forward = schedule_of(method, cluster, algorithm, num_blocks, reverse=False)
    backward = schedule_of(method, cluster, algorithm, num_blocks, reverse=True)
    passes = [(layer.forward.build(), forward)] * layer.num_layers
    passes += [(layer.backward.build(), backward)] * layer.num_layers
    now = [0.0] * cluster.num_devices
    found: list[PassTimeline] = []
    for times, schedule in passes:
        found.append(
            simulate_pass(cluster, times, work, method=method, schedule=schedule, start_s=now)
        )
        now = list(found[-1].stop_s)
    kept = work.load.state_bytes * layer.num_layers if plan is not None else 0.0
    return Outcome(
        method,
        plan,
        max(now),
        max(map(sum, zip(*(f.exposed_s for f in found), strict=True))),
        max(map(sum, zip(*(f.sent_inside_bytes for f in found), strict=True))),
        max(map(sum, zip(*(f.sent_between_bytes for f in found), strict=True))),
        0.0 if plan is None else held_bytes(plan, cluster.num_devices, work.load),
        kept,
        _phases("forward", found[0]) | _phases("backward", found[layer.num_layers]),
        found[layer.num_layers - 1].spans + found[layer.num_layers].spans,
    )


def _plan(config: SimulationConfig, cluster: Cluster, method: str) -> Plan | None:
    own = {"lasp1": "serial", "lasp2": "gather", "lasp2_exposed": "gather"}
    if method in ("none", "all_to_all"):
        return None
    if method in own:
        return Plan(own[method], 1, cluster.nodes)
    layer = config.layer
    return choose_plan(
        cluster.num_devices,
        layer.shape,
        layer.kind,
        layer.state_element_size,
        algorithm=config.algorithm,
        num_blocks=config.num_blocks,
        nodes=cluster.nodes,
        fabric=cluster.fabric,
    )


def _phases(direction: str, found: PassTimeline) -> dict[str, float]:
    totals: dict[str, dict[int, float]] = {}
    for span in found.spans:
        if span.peer is None and span.name != "all-gather":
            of_rank = totals.setdefault(f"{direction}: {span.name}", {})
            of_rank[span.rank] = of_rank.get(span.rank, 0.0) + span.stop_s - span.start_s
    return {name: max(of_rank.values()) for name, of_rank in totals.items()}
