"""Times below which a scan can't come, in closed form: they spare the choice of scan most plays."""

from __future__ import annotations

from zeco.core.fabric import Fabric, Link, Load, all_gather_s, device_chain_s
from zeco.core.schedule import DEVICE_CHAIN
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
    if algorithm == DEVICE_CHAIN:
        return device_chain_s(fabric, num_ranks, load)
    return fabric.start_s + _from_start_s(algorithm, num_blocks, nodes, load, fabric)


def _from_start_s(
    algorithm: str, num_blocks: int, nodes: Nodes, load: Load, fabric: Fabric
) -> float:
    num_ranks = sum(nodes)
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
    shaped = max(0.0, num_bytes - fabric.burst_bytes)
    message_s = fabric.overhead_s + fabric.receive_overhead_s
    return message_s + link.latency_s + shaped / link.bandwidth_bytes_per_s


def _chain_s(num_blocks: int, nodes: Nodes, load: Load, fabric: Fabric) -> float:
    """The last block leaves the first rank after all others; then it goes through every rank."""
    block = load.state_bytes / num_blocks
    apply_s = load.apply_s(fabric, num_blocks)
    hops_s = (sum(nodes) - len(nodes)) * (apply_s + _hop_s(fabric.inside, block, fabric))
    hops_s += (len(nodes) - 1) * (apply_s + _hop_s(fabric.outside, block, fabric))
    first = fabric.inside if nodes[0] > 1 else fabric.outside
    others_bytes = (num_blocks - 1) * block
    link_s = max(0.0, others_bytes - fabric.burst_bytes) / first.bandwidth_bytes_per_s
    return max((num_blocks - 1) * (apply_s + fabric.overhead_s), link_s) + hops_s


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
    """A message in each exchange inside a node, an owner's compositions, and what is between nodes."""
    local, num_nodes = min(nodes), len(nodes)
    apply_s = load.apply_s(fabric, num_blocks)
    state = load.state_bytes / num_blocks
    owned = num_blocks // max(nodes)
    exchanges_s = walk_s = 0.0
    if local > 1 and owned > 0:
        exchanges_s = 2 * _hop_s(fabric.inside, owned * state, fabric)
        walk_s = (local - 2) * apply_s
    ready = [walk_s] + [0.0] * (num_nodes - 1)
    if algorithm == "two_level":
        hop_s = _hop_s(fabric.outside, state, fabric) + apply_s
        between_s = walk_s + (num_nodes - 1) * hop_s - apply_s
    else:
        between_s = _doubling_s(num_blocks, (1,) * num_nodes, load, fabric, ready)
    return exchanges_s + max(0.0, between_s)
