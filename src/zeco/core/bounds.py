"""Times below which a scan can't come, in closed form: they spare the choice of scan most plays."""

from __future__ import annotations

import math

from zeco.core.fabric import Fabric, Link, Load, all_gather_s
from zeco.core.topology import Nodes, node_of_ranks


def at_least_s(algorithm: str, num_blocks: int, nodes: Nodes, load: Load, fabric: Fabric) -> float:
    """Return a lower bound of what `zeco.core.engine` finds for a scan from rest.

    Args:
        algorithm: the scan.
        num_blocks: its pipeline blocks.
        nodes: ranks of every node.
        load: what a whole state weighs.
        fabric: what messages and compositions cost.
    """
    num_ranks = sum(nodes)
    if num_ranks == 1:
        return 0.0
    apply_s = load.apply_s(fabric, num_blocks)
    match algorithm:
        case "chain" | "serial":
            return _chain_s(num_blocks, nodes, load, fabric)
        case "gather":
            gathered = (load.state_bytes + load.parameter_bytes) / num_blocks
            once = all_gather_s(fabric, num_ranks, max(nodes), gathered)
            return num_blocks * (once + (num_ranks - 1) * apply_s)
        case "doubling":
            return _doubling_s(num_blocks, nodes, load, fabric, [0.0] * num_ranks)
        case _:
            return _two_level_s(algorithm, num_blocks, nodes, load, fabric)


def _hop_s(link: Link, num_bytes: float, fabric: Fabric) -> float:
    return fabric.overhead_s + link.latency_s + num_bytes / link.bandwidth_bytes_per_s


def _chain_s(num_blocks: int, nodes: Nodes, load: Load, fabric: Fabric) -> float:
    """The last block leaves the first rank after all others; then it goes through every rank."""
    block = load.state_bytes / num_blocks
    apply_s = load.apply_s(fabric, num_blocks)
    hops_s = (sum(nodes) - len(nodes)) * (apply_s + _hop_s(fabric.inside, block, fabric))
    hops_s += (len(nodes) - 1) * (apply_s + _hop_s(fabric.outside, block, fabric))
    first = fabric.inside if nodes[0] > 1 else fabric.outside
    period_s = max(apply_s + fabric.overhead_s, block / first.bandwidth_bytes_per_s)
    return (num_blocks - 1) * period_s + hops_s


def _doubling_s(
    num_blocks: int, nodes: Nodes, load: Load, fabric: Fabric, ready: list[float]
) -> float:
    """Round by round, each rank waits for the one it receives from; ports are taken to be free."""
    size, node_of = sum(nodes), node_of_ranks(nodes)
    apply_s = load.apply_s(fabric, num_blocks)
    state = load.state_bytes / num_blocks
    distance = 1
    while distance < size:
        before = list(ready)
        for place in range(distance, size):
            source = place - distance
            link = fabric.inside if node_of[source] == node_of[place] else fabric.outside
            arrived = before[source] + _hop_s(link, state, fabric)
            combines = (distance > 1) + (place + 2 * distance < size)
            ready[place] = max(before[place], arrived) + combines * apply_s
        distance *= 2
    return max(ready)


def _two_level_s(
    algorithm: str, num_blocks: int, nodes: Nodes, load: Load, fabric: Fabric
) -> float:
    """Both exchanges inside a node, the owners' compositions, and what is between the nodes."""
    local, num_nodes = min(nodes), len(nodes)
    apply_s = load.apply_s(fabric, num_blocks)
    owned = num_blocks // max(nodes)
    exchanges_s = walk_s = compose_s = 0.0
    if local > 1 and owned > 0:
        state = load.state_bytes / num_blocks
        exchanges_s = fabric.latency_s
        for messages in (num_blocks - math.ceil(num_blocks / local), owned * (local - 2)):
            calls = min(messages, 1) if fabric.grouped_calls else messages
            exchanges_s += calls * fabric.overhead_s
            exchanges_s += messages * state / fabric.bandwidth_bytes_per_s
        walk_s = owned * (local - 2) * apply_s
        compose_s = owned * (local - 1) * load.compose_s(fabric, num_blocks)
    # The first node walks, those in the middle compose their maps, the last one has neither to do.
    ready = [walk_s, *[compose_s] * (num_nodes - 2), 0.0][:num_nodes]
    if algorithm == "two_level":
        hop_s = _hop_s(fabric.outside, load.state_bytes / num_blocks, fabric)
        between_s = max(
            start + (num_nodes - 1 - node) * (hop_s + (node > 0) * apply_s)
            for node, start in enumerate(ready)
        )
    else:
        between_s = _doubling_s(num_blocks, (1,) * num_nodes, load, fabric, ready)
    return exchanges_s + between_s + (walk_s if num_nodes > 1 else 0.0)
