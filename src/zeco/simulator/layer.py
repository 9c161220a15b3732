"""A layer's timeline on every device: phases of computing, the exchange between devices, the waits.

| method | order of a pass |
| --- | --- |
| zeco | projections, state pass, (scan beside local work), output pass, rest |
| lasp2 | the same with an all-gather; without overlap the local work comes after it |
| lasp1 | projections, (receive, state pass, local work, output pass, send), rest |
| all_to_all | projections, all-to-all, whole operator on its heads, all-to-all, rest |
| none | no exchange: every device has sequences of its own |

*Local work* is what needs no other device: intra-chunk attention, projections that only outputs need.
Backward has the same phases, with the scan reversed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeco.core.engine import Played, Span, play
from zeco.core.errors import ArgumentError, unknown_name
from zeco.core.fabric import Load, all_gather_s
from zeco.core.schedule import Schedule, build_schedule
from zeco.simulator.cluster import Cluster

METHODS = ("zeco", "lasp1", "lasp2", "lasp2_exposed", "all_to_all", "none")


@dataclass(frozen=True)
class PassTimes:
    """Seconds that a device computes in one layer's pass.

    Attributes:
        projection_s: what the state pass needs.
        state_s: the state pass: from keys, values and gates to the segment's map.
        local_s: what needs no other device.
        output_s: the output pass, which needs the entering state.
        rest_s: the rest of the layer.
    """

    projection_s: float
    state_s: float
    local_s: float
    output_s: float
    rest_s: float

    def __post_init__(self) -> None:
        for name in ("projection_s", "state_s", "local_s", "output_s", "rest_s"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"{name}={getattr(self, name)}: must be at least 0")

    @property
    def total_s(self) -> float:
        """Seconds of computing in all."""
        return self.projection_s + self.state_s + self.local_s + self.output_s + self.rest_s


@dataclass(frozen=True)
class Work:
    """What a layer computes and exchanges, besides its times.

    Attributes:
        load: what a state weighs.
        heads: the most devices that an all-to-all by heads can use.
        token_bytes: of a device's queries, keys, values and gates, for the all-to-all.
        output_bytes: of a device's outputs, for the all-to-all back.
    """

    load: Load
    heads: int
    token_bytes: float
    output_bytes: float


@dataclass
class PassTimeline:
    """One pass of one layer.

    Attributes:
        spans: phases and messages of all devices.
        stop_s: when each device is done.
        exposed_s: that each device stood still for the others.
        sent_inside_bytes: that each device sent inside its node.
        sent_between_bytes: that each device sent to other nodes.
    """

    spans: list[Span]
    stop_s: list[float]
    exposed_s: list[float]
    sent_inside_bytes: list[float]
    sent_between_bytes: list[float]


def simulate_pass(
    cluster: Cluster,
    times: PassTimes,
    work: Work,
    *,
    method: str,
    schedule: Schedule | None,
    start_s: Sequence[float] | None = None,
) -> PassTimeline:
    """Simulate one pass of one layer.

    Args:
        cluster: the devices.
        times: of computing on a device of slowness 1.
        work: what is exchanged.
        method: one of `METHODS`.
        schedule: the scan, for the methods that have one (see `schedule_of`).
        start_s: when each device begins; None means at 0.
    """
    if method not in METHODS:
        raise ArgumentError(unknown_name("method", method, METHODS))
    line = _Line(cluster, list(start_s or [0.0] * cluster.num_devices))
    line.compute("projections", times.projection_s)
    if method == "none":
        line.compute("operator", times.state_s + times.local_s + times.output_s)
    elif method == "all_to_all":
        _all_to_all(line, times, work)
    elif schedule is None:
        raise ArgumentError(f"schedule=None: method {method!r} needs the schedule of its scan")
    elif method == "lasp1":
        whole_s = times.state_s + times.local_s + times.output_s
        line.serial("operator", whole_s, work.load, schedule)
    else:
        line.compute("state pass", times.state_s)
        played = line.scan(work.load, schedule)
        if method == "lasp2_exposed":
            # A blocking all-gather holds the first rank too, which needs nothing of it.
            line.wait("wait for states", played.finish_s)
            line.compute("local work", times.local_s)
        else:
            line.compute("local work", times.local_s)
            line.wait("wait for states", played.entering_s)
        line.compute("output pass", times.output_s)
    line.compute("rest", times.rest_s)
    return PassTimeline(line.spans, line.now, line.exposed, line.inside, line.between)


def schedule_of(
    method: str, cluster: Cluster, algorithm: str, num_blocks: int, *, reverse: bool
) -> Schedule | None:
    """Return the scan that a method runs, None for methods without one.

    Args:
        method: one of `METHODS`.
        cluster: the devices.
        algorithm: of ``zeco``; the other methods have their own.
        num_blocks: of ``zeco``.
        reverse: whether it is the backward pass's.
    """
    if method in ("none", "all_to_all"):
        return None
    own = {"lasp1": ("serial", 1), "lasp2": ("gather", 1), "lasp2_exposed": ("gather", 1)}
    name, blocks = own.get(method, (algorithm, num_blocks))
    return build_schedule(name, cluster.num_devices, blocks, reverse=reverse, nodes=cluster.nodes)


def _all_to_all(line: _Line, times: PassTimes, work: Work) -> None:
    if line.cluster.num_devices > work.heads:
        raise ArgumentError(
            f"all_to_all on {line.cluster.num_devices} devices, but the layer has {work.heads} "
            "heads; use at most as many devices, or another method"
        )
    line.all_to_all("all-to-all of inputs", work.token_bytes)
    line.compute("operator", times.state_s + times.local_s + times.output_s)
    line.all_to_all("all-to-all of outputs", work.output_bytes)


class _Line:
    """The devices' clocks as a pass goes on."""

    def __init__(self, cluster: Cluster, start_s: list[float]) -> None:
        self.cluster = cluster
        self.now = start_s
        self.exposed = [0.0] * cluster.num_devices
        self.inside = [0.0] * cluster.num_devices
        self.between = [0.0] * cluster.num_devices
        self.spans: list[Span] = []

    def compute(self, name: str, seconds: float) -> None:
        """Let every device compute."""
        for rank, slow in enumerate(self.cluster.factors):
            self._advance(rank, name, self.now[rank] + seconds * slow)

    def wait(self, name: str, until_s: Sequence[float]) -> None:
        """Let every device stand still until its time."""
        for rank, until in enumerate(until_s):
            self.exposed[rank] += max(0.0, until - self.now[rank])
            self._advance(rank, name, max(self.now[rank], until))

    def scan(self, load: Load, schedule: Schedule) -> Played:
        """Start a scan; the devices' clocks stay."""
        played = play(
            schedule,
            load,
            self.cluster.fabric,
            nodes=self.cluster.nodes,
            start_s=self.now,
            keep_spans=True,
        )
        self._count(played)
        return played

    def serial(self, name: str, whole_s: float, load: Load, schedule: Schedule) -> None:
        """Run the whole pass inside the scan: what a rank composes takes its whole pass."""
        fabric = replace(
            self.cluster.fabric, combine_overhead_s=whole_s, combine_bytes_per_s=float("inf")
        )
        played = play(
            schedule,
            replace(load, apply_flop=0.0),
            fabric,
            nodes=self.cluster.nodes,
            start_s=self.now,
            slowness=self.cluster.factors,
            keep_spans=True,
        )
        self._count(played)
        self.wait("wait for states", played.entering_s)
        self.compute(name, whole_s)

    def all_to_all(self, name: str, num_bytes: float) -> None:
        """Exchange everyone's part of ``num_bytes`` with everyone, all standing still for it."""
        cluster, ranks = self.cluster, self.cluster.num_devices
        start = max(self.now)
        until: list[float] = []
        for rank, node in enumerate(n for n in cluster.nodes for _ in range(n)):
            part = num_bytes / ranks
            direct = replace(
                cluster.fabric, gather_latency_s=None, gather_bandwidth_bytes_per_s=None
            )
            until.append(start + all_gather_s(direct, ranks, node, part))
            self.inside[rank] += part * (node - 1)
            self.between[rank] += part * (ranks - node)
        self.wait(name, until)

    def _count(self, played: Played) -> None:
        self.spans += [s for s in played.spans if s.name != "combine"]
        for rank in range(self.cluster.num_devices):
            self.inside[rank] += played.sent_inside_bytes[rank]
            self.between[rank] += played.sent_between_bytes[rank]

    def _advance(self, rank: int, name: str, until: float) -> None:
        if until > self.now[rank]:
            self.spans.append(Span(rank, name, self.now[rank], until))
        self.now[rank] = until
