"""What messages and compositions cost, and how much of them a scan has."""

from __future__ import annotations

import math
from dataclasses import dataclass

StateShape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Link:
    """One class of links, the same both ways.

    Attributes:
        latency_s: from a message's departure to its first byte's arrival.
        bandwidth_bytes_per_s: of one port, each way.
    """

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class DeviceChain:
    """What a chain inside kernels takes, without the hosts' hands.

    The figures are of two H200 over NVLink (benchmarks/results/gpus_2.json, "scans"), the start is
    that of a launch from Python (benchmarks/results/device_scan.json, "launch_us").

    Attributes:
        start_s: of the launches, driven from the hosts.
        hop_s: from one rank's words to the next one's.
        bytes_per_s: of states that pass through a rank.
        flop_per_s: speed of a rank's matrix products where transitions are dense.
    """

    start_s: float = 60e-6
    hop_s: float = 2e-6
    bytes_per_s: float = 280e9
    flop_per_s: float = 8e12


@dataclass(frozen=True)
class Fabric:
    """What links and ranks take.

    Attributes:
        latency_s: inside a node, from a message's departure to its first byte's arrival.
        bandwidth_bytes_per_s: of a rank's link inside a node, each way.
        overhead_s: for which starting a message keeps its sender's program busy.
        burst_bytes: that a link passes at once after it has rested, as one behind a token bucket.
        start_s: for which starting a scan keeps each rank's program busy.
        receive_overhead_s: for which a message that has arrived keeps its receiver's host busy.
        combine_bytes_per_s: bytes of states that a rank composes a second where transitions are
            elementwise.
        combine_flop_per_s: speed of a rank's matrix products where transitions are dense.
        combine_overhead_s: of starting a composition.
        between: links between nodes; None where they are like those inside.
        shared_nic: whether the ranks of a node share one port to the other nodes, instead of
            having one each (rails).
        grouped_calls: whether transfers that are posted together are one call, as with NCCL.
        blocking_sends: whether a program goes on only when its message is out, as on one CUDA
            stream; else sends are queued.
        collective_gather: whether all-gathers are one call of ceil(log2 P) latencies, as in a
            library of collectives, instead of a message to every other rank.
        crowd_efficiency: share of the links' bandwidth that is left where ranks send to several others
            at once.
        host_bytes_per_s: that a processor passes to or from a link; None: it isn't what limits.
        processors: that all ranks share, where they are processes of one machine; None where each
            has its own.
        gather_latency_s: of one such round, where it differs from the links'.
        gather_bandwidth_bytes_per_s: at which a rank receives such a gather, where it differs.
        device_chain: what a chain inside kernels takes, where the ranks can run one.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    overhead_s: float
    combine_bytes_per_s: float
    combine_flop_per_s: float = 2e10
    combine_overhead_s: float = 0.0
    between: Link | None = None
    shared_nic: bool = False
    grouped_calls: bool = False
    blocking_sends: bool = False
    collective_gather: bool = False
    burst_bytes: float = 0.0
    start_s: float = 0.0
    receive_overhead_s: float = 0.0
    crowd_efficiency: float = 1.0
    host_bytes_per_s: float | None = None
    processors: int | None = None
    gather_latency_s: float | None = None
    gather_bandwidth_bytes_per_s: float | None = None
    device_chain: DeviceChain = DeviceChain()

    @property
    def inside(self) -> Link:
        """The links inside a node."""
        return Link(self.latency_s, self.bandwidth_bytes_per_s)

    @property
    def outside(self) -> Link:
        """The links between nodes."""
        return self.between or self.inside


LOOPBACK = Fabric(100e-6, 1e9, 50e-6, 4e9, combine_overhead_s=50e-6)
"""Assumed for gloo between processes of one host, until it is measured."""

NVLINK_BY_NCCL = Fabric(
    5e-6,
    150e9,
    60e-6,
    1e12,
    combine_flop_per_s=2e13,
    combine_overhead_s=60e-6,
    grouped_calls=True,
    blocking_sends=True,
    collective_gather=True,
)
"""For NCCL inside a node: a call costs more than its bytes. The overheads are what a step driven from
Python took on two H200 (benchmarks/results/multi_gpu_2.json: about 120 us a block, a message and a
composition); the rest is assumed until it is measured."""


@dataclass(frozen=True)
class Load:
    """What a whole state weighs in messages and compositions.

    Attributes:
        state_bytes: of a state.
        parameter_bytes: of a transition, sent beside the update in map form.
        apply_flop: of applying a dense transition to a state; 0 for elementwise ones.
        compose_flop: of composing two maps with dense transitions; 0 for elementwise ones.
    """

    state_bytes: float
    parameter_bytes: float
    apply_flop: float = 0.0
    compose_flop: float = 0.0

    def apply_s(self, fabric: Fabric, num_blocks: int) -> float:
        """Return the seconds for applying a map to one block of a state."""
        return self._combine_s(self.apply_flop, fabric, num_blocks)

    def compose_s(self, fabric: Fabric, num_blocks: int) -> float:
        """Return the seconds for composing one block of two maps."""
        return self._combine_s(self.compose_flop, fabric, num_blocks)

    def _combine_s(self, flop: float, fabric: Fabric, num_blocks: int) -> float:
        whole = self.state_bytes / fabric.combine_bytes_per_s + flop / fabric.combine_flop_per_s
        return fabric.combine_overhead_s + whole / num_blocks


def device_chain_s(fabric: Fabric, num_ranks: int, load: Load) -> float:
    """Return the seconds of a chain inside kernels.

    Blocks follow each other so closely that a rank more costs its hop, whatever the state weighs.
    """
    costs = fabric.device_chain
    moved_s = load.state_bytes / costs.bytes_per_s + load.apply_flop / costs.flop_per_s
    return costs.start_s + (num_ranks - 1) * costs.hop_s + moved_s


def load_of(shape: StateShape, kind: str, element_size: int) -> Load:
    """Return what states of a shape weigh, with transitions of a kind.

    >>> load_of((1, 2, 4, 8), "dense", 4)
    Load(state_bytes=256, parameter_bytes=128, apply_flop=512, compose_flop=768)
    """
    B, H, K, V = shape
    state_bytes, parameter_bytes = map_bytes(shape, kind, element_size)
    if kind != "dense":
        return Load(state_bytes, parameter_bytes)
    return Load(state_bytes, parameter_bytes, 2 * B * H * K * K * V, 2 * B * H * K * K * (K + V))


def map_bytes(shape: StateShape, kind: str, element_size: int) -> tuple[int, int]:
    """Return the bytes of a state and of a transition's parameters in a message.

    >>> map_bytes((1, 2, 4, 8), "diagonal", 4)
    (256, 32)
    """
    B, H, K, V = shape
    parameters = B * H * K * (K if kind == "dense" else 1)
    return math.prod((B, H, K, V)) * element_size, parameters * element_size


def all_gather_s(fabric: Fabric, num_ranks: int, node_size: int, num_bytes: float) -> float:
    """Return the seconds of an all-gather for a rank.

    As a collective: ceil(log2 P) latencies and P - 1 values through a port, the textbook's cost of
    recursive doubling (Thakur, Rabenseifner and Gropp, 2005). Else a message to every other rank.

    Args:
        fabric: what messages cost.
        num_ranks: P.
        node_size: ranks of this rank's node.
        num_bytes: of what one rank gives.
    """
    moved_s = gather_moved_s(fabric, num_ranks, node_size, num_bytes)
    latency_s = (fabric.inside if node_size == num_ranks else fabric.outside).latency_s
    if fabric.gather_latency_s is not None:
        latency_s = fabric.gather_latency_s
    if fabric.collective_gather:
        return fabric.overhead_s + math.ceil(math.log2(num_ranks)) * latency_s + moved_s
    message_s = fabric.overhead_s + fabric.receive_overhead_s
    if fabric.processors is not None and fabric.processors < num_ranks:
        message_s *= num_ranks / fabric.processors
    return message_s * (num_ranks - 1) + latency_s + moved_s


def gather_moved_s(fabric: Fabric, num_ranks: int, node_size: int, num_bytes: float) -> float:
    """Return the seconds for which an all-gather's bytes keep a rank's links busy."""
    if fabric.gather_bandwidth_bytes_per_s is not None:
        return num_bytes * (num_ranks - 1) / fabric.gather_bandwidth_bytes_per_s
    between = num_bytes * (num_ranks - node_size) * (node_size if fabric.shared_nic else 1)
    moved_s = max(
        num_bytes * (node_size - 1) / fabric.bandwidth_bytes_per_s,
        between / fabric.outside.bandwidth_bytes_per_s,
    )
    return moved_s / (1.0 if fabric.collective_gather else fabric.crowd_efficiency)
