"""A cluster that isn't here: its nodes, links and devices."""

from __future__ import annotations

from dataclasses import dataclass

from zeco.core.errors import ArgumentError
from zeco.core.fabric import Fabric
from zeco.core.topology import Nodes, check_nodes


@dataclass(frozen=True)
class Cluster:
    """Devices in nodes.

    Attributes:
        nodes: devices of every node, in the order of the ranks.
        fabric: what messages and compositions cost.
        slowness: by how much each device computes slower than the times given; None means 1.
    """

    nodes: Nodes
    fabric: Fabric
    slowness: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ArgumentError("nodes=(): a cluster needs at least one node; give its devices")
        check_nodes(self.nodes, sum(self.nodes))
        if self.slowness is not None and len(self.slowness) != self.num_devices:
            raise ArgumentError(
                f"slowness has {len(self.slowness)} entries, but nodes={self.nodes} hold "
                f"{self.num_devices} devices; give one a device, or none at all"
            )
        if self.slowness is not None and min(self.slowness) <= 0:
            raise ArgumentError(f"slowness={self.slowness}: every entry must be above 0")
        _check_fabric(self.fabric)

    @property
    def num_devices(self) -> int:
        """Devices of all nodes, P."""
        return sum(self.nodes)

    @property
    def factors(self) -> list[float]:
        """Every device's slowness."""
        return list(self.slowness or [1.0] * self.num_devices)


def _check_fabric(fabric: Fabric) -> None:
    """Refuse times below 0 and speeds that aren't above it."""
    times = {
        "latency": min(fabric.inside.latency_s, fabric.outside.latency_s),
        "overhead": min(fabric.overhead_s, fabric.combine_overhead_s),
    }
    speeds = {
        "bandwidth inside nodes": fabric.inside.bandwidth_bytes_per_s,
        "bandwidth between nodes": fabric.outside.bandwidth_bytes_per_s,
        "speed of compositions": min(fabric.combine_bytes_per_s, fabric.combine_flop_per_s),
    }
    for name, value in times.items():
        if value < 0:
            raise ArgumentError(f"{name} of {value:g} s: must be at least 0")
    for name, value in speeds.items():
        if value <= 0:
            raise ArgumentError(f"{name} of {value:g} a second: must be above 0")
