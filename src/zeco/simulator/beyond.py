"""Past the paper: its cluster's links, in nodes of 8, with this library's scans.

The time of a step is the paper's step without sequence parallelism (its growth included) plus extra
work plus what of the scans isn't hidden. The scans of a layer hide behind the projections for queries
and output gates, which need no other device; taken at the device's peak speed, so that the time
to hide in is at its shortest. Both links inside nodes and between them are the fitted ones: the paper
doesn't tell them apart, so faster links inside nodes would only help.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeco.core.costs import Plan, choose_plan, predict_s
from zeco.core.fabric import all_gather_s
from zeco.core.topology import Nodes
from zeco.simulator.memory import held_bytes
from zeco.simulator.paper import (
    COLLECTIVE_SHAPE,
    ELEMENT_SIZE,
    KIND,
    SCANS_A_STEP,
    TOKENS_A_GPU,
    chain_s,
    extra_step_s,
    fit_fabric,
    paper_load,
    step_without_sp,
)
from zeco.simulator.published import own_prototype

NODE = 8
SIZES = (256, 1024, 4096)
H100_BF16_FLOP_PER_S = 989e12
"""Dense peak, from the vendor's data sheet."""

MODEL_WIDTH, KEY_WIDTH, VALUE_WIDTH = 2048, 1024, 2048
"""Assumed for the paper's 1B model: those of GLA's published 1.3B model."""


@dataclass(frozen=True)
class Beyond:
    """One size of the cluster.

    Attributes:
        gpus: P.
        plan: the fastest scan.
        scan_s: its time.
        chain_s: of the best chain.
        gather_s: of the all-gather.
        hidden_s: of a scan, behind which at least it can hide.
        without_sp_s: a step without sequence parallelism.
        scan_bytes: that the scan's largest rank holds.
        gather_bytes: that an all-gather holds.
    """

    gpus: int
    plan: Plan
    scan_s: float
    chain_s: float
    gather_s: float
    hidden_s: float
    without_sp_s: float
    scan_bytes: float
    gather_bytes: float

    @property
    def tokens(self) -> int:
        """Tokens of the sequence."""
        return self.gpus * TOKENS_A_GPU

    @property
    def exposed_step_s(self) -> float:
        """Seconds of a step in which devices wait for scans."""
        return SCANS_A_STEP * max(0.0, self.scan_s - self.hidden_s)

    def relative_throughput(self, extra_s: float) -> float:
        """Return the throughput relative to that without SP, given a step's extra work."""
        return self.without_sp_s / (self.without_sp_s + extra_s + self.exposed_step_s)


def simulate_beyond(gpus: int) -> Beyond:
    """Simulate one size of the paper's cluster, in nodes of `NODE`."""
    nodes: Nodes = (NODE,) * (gpus // NODE)
    fabric, load = fit_fabric(), paper_load()
    plan = choose_plan(gpus, COLLECTIVE_SHAPE, KIND, ELEMENT_SIZE, nodes=nodes, fabric=fabric)
    one = load.state_bytes + load.parameter_bytes
    return Beyond(
        gpus,
        plan,
        predict_s(plan, gpus, load, fabric),
        # In closed form, which the engine agrees with: thousands of ranks' programs are long.
        chain_s(gpus, fabric.latency_s, load.state_bytes / fabric.bandwidth_bytes_per_s),
        all_gather_s(fabric, gpus, NODE, one),
        hidden_s(),
        step_without_sp()(gpus),
        held_bytes(plan, gpus, load),
        gpus * one,
    )


def hidden_s() -> float:
    """Return the shortest time of the projections behind which a layer's scan can hide."""
    return 2 * TOKENS_A_GPU * MODEL_WIDTH * (KEY_WIDTH + VALUE_WIDTH) / H100_BF16_FLOP_PER_S


def extra_by_paper_s() -> float:
    """Return a step's extra work as the paper's ZeCO has it."""
    return extra_step_s("zeco")


def extra_by_prototype_s() -> float:
    """Return a step's extra work as this project's prototype of the operator has it."""
    found = own_prototype()
    one = (found["segment_scan_ms"] + found["preparation_ms"]) * 1e-3
    return SCANS_A_STEP * one * TOKENS_A_GPU / found["tokens"]


def limits(found: Beyond) -> str:
    """Say what limits a size of the cluster."""
    num_nodes = found.gpus // NODE
    share = found.scan_s / found.hidden_s
    growth = found.without_sp_s / step_without_sp()(1) - 1
    hidden = (
        f"a scan fills {share:.0%} of the least time that it can hide in, so the step doesn't see it"
        if share <= 1
        else f"a scan takes {share:.2f} times what it can hide in at least, so a part may be exposed"
    )
    return (
        f"{found.gpus} GPUs, {num_nodes} nodes: {hidden}. Its time goes into the two exchanges inside "
        f"nodes, which don't grow, and the rounds between nodes, one more for twice the nodes. A chain "
        f"would take {found.chain_s * 1e3:.2f} ms, hop after hop; an all-gather "
        f"{found.gather_s * 1e3:.1f} ms and {found.gather_bytes / 2**30:.1f} GiB on every device. What "
        f"limits the step is what also grows without sequence parallelism (gradient synchronisation "
        f"and stragglers, as fitted to 8 and 64 GPUs): {growth:.0%} over one GPU."
    )
