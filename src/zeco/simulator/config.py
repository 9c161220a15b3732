"""A simulation as a configuration: the cluster, the state, the layer's times, the methods."""

from __future__ import annotations

from dataclasses import dataclass, field

from zeco.core.errors import ArgumentError, unknown_name
from zeco.core.fabric import Fabric, Link, load_of
from zeco.core.schedule import BUILDERS
from zeco.core.transitions import KINDS
from zeco.simulator.cluster import Cluster
from zeco.simulator.layer import METHODS, PassTimes, Work


@dataclass(frozen=True)
class LinkConfig:
    """One class of links.

    Attributes:
        latency_us: microseconds from a message's departure to its first byte's arrival.
        bandwidth_GB_per_s: of one port, each way.
    """

    latency_us: float
    bandwidth_GB_per_s: float  # noqa: N815 (the unit's own spelling)


@dataclass(frozen=True)
class ClusterConfig:
    """The devices and what they and their links take; see `zeco.core.fabric.Fabric`.

    Attributes:
        nodes: devices of every node.
        inside: links inside nodes.
        between: links between nodes.
        shared_nic: whether the devices of a node share one port to the other nodes.
        overhead_us: of starting a message.
        combine_GB_per_s: of composing states elementwise.
        combine_TFLOP_per_s: of composing dense transitions.
        combine_overhead_us: of starting a composition.
        grouped_calls: whether transfers posted together are one call.
        blocking_sends: whether a device's scan goes on only when its message is out.
        collective_gather: whether all-gathers are one call of log2(P) latencies.
        slowness: by how much each device computes slower; all 1 when left out.
    """

    nodes: tuple[int, ...]
    inside: LinkConfig
    between: LinkConfig
    shared_nic: bool = False
    overhead_us: float = 0.0
    combine_GB_per_s: float = 1000.0  # noqa: N815
    combine_TFLOP_per_s: float = 20.0  # noqa: N815
    combine_overhead_us: float = 0.0
    grouped_calls: bool = True
    blocking_sends: bool = False
    collective_gather: bool = True
    slowness: tuple[float, ...] | None = None

    def build(self) -> Cluster:
        """Return the cluster."""
        fabric = Fabric(
            self.inside.latency_us * 1e-6,
            self.inside.bandwidth_GB_per_s * 1e9,
            self.overhead_us * 1e-6,
            self.combine_GB_per_s * 1e9,
            combine_flop_per_s=self.combine_TFLOP_per_s * 1e12,
            combine_overhead_s=self.combine_overhead_us * 1e-6,
            between=Link(self.between.latency_us * 1e-6, self.between.bandwidth_GB_per_s * 1e9),
            shared_nic=self.shared_nic,
            grouped_calls=self.grouped_calls,
            blocking_sends=self.blocking_sends,
            collective_gather=self.collective_gather,
        )
        return Cluster(self.nodes, fabric, self.slowness)


@dataclass(frozen=True)
class PassConfig:
    """Milliseconds that a device computes in one layer's pass; see `PassTimes`."""

    projection_ms: float
    state_ms: float
    local_ms: float
    output_ms: float
    rest_ms: float

    def build(self) -> PassTimes:
        """Return the times in seconds."""
        given = (self.projection_ms, self.state_ms, self.local_ms, self.output_ms, self.rest_ms)
        return PassTimes(*(t * 1e-3 for t in given))


@dataclass(frozen=True)
class LayerConfig:
    """A layer.

    Attributes:
        forward: times of the forward pass.
        backward: times of the backward pass.
        batch: B.
        heads: H.
        key_dim: K.
        value_dim: V.
        kind: of the transitions.
        state_element_size: bytes of an element of a state.
        tokens_per_device: T.
        token_element_size: bytes of an element of activations.
        num_layers: of the model.
    """

    forward: PassConfig
    backward: PassConfig
    heads: int
    key_dim: int
    value_dim: int
    tokens_per_device: int
    batch: int = 1
    kind: str = "diagonal"
    state_element_size: int = 4
    token_element_size: int = 2
    num_layers: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(unknown_name("transition kind", self.kind, KINDS))
        for name in ("heads", "key_dim", "value_dim", "tokens_per_device", "batch", "num_layers"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"layer.{name}={getattr(self, name)}: must be at least 1")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The state's, [B, H, K, V]."""
        return (self.batch, self.heads, self.key_dim, self.value_dim)

    def build(self) -> Work:
        """Return what a layer exchanges."""
        elements = self.batch * self.tokens_per_device * self.heads * self.token_element_size
        return Work(
            load_of(self.shape, self.kind, self.state_element_size),
            self.heads,
            # Queries, keys and gates of K numbers, values of V.
            elements * (3 * self.key_dim + self.value_dim),
            elements * self.value_dim,
        )


@dataclass(frozen=True)
class SimulationConfig:
    """All of a simulation.

    Attributes:
        cluster: the devices.
        layer: what they compute and exchange.
        methods: to compare; see `zeco.simulator.layer`.
        algorithm: the scan of ``zeco``; ``"auto"`` takes the fastest.
        num_blocks: its pipeline blocks; the best when left out.
    """

    cluster: ClusterConfig
    layer: LayerConfig
    methods: tuple[str, ...] = field(default=("zeco", "lasp2", "lasp2_exposed", "lasp1", "none"))
    algorithm: str = "auto"
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                raise ArgumentError(unknown_name("method", method, METHODS))
        if self.algorithm not in ("auto", *BUILDERS):
            raise ArgumentError(unknown_name("algorithm", self.algorithm, ["auto", *BUILDERS]))
