"""The choice of scan: every candidate played on the fabric, the fastest taken.

`zeco.core.fabric` says what costs are counted, `zeco.core.engine` plays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from zeco.core.bounds import at_least_s
from zeco.core.engine import play
from zeco.core.errors import ArgumentError, unknown_name
from zeco.core.fabric import (
    LOOPBACK,
    NVLINK_BY_NCCL,
    Fabric,
    Link,
    Load,
    StateShape,
    device_chain_s,
    load_of,
    map_bytes,
)
from zeco.core.schedule import BUILDERS, DEVICE_CHAIN, build_schedule
from zeco.core.topology import Nodes, check_nodes
from zeco.core.transitions import KINDS, Dense

__all__ = [
    "LOOPBACK",
    "NVLINK_BY_NCCL",
    "Candidates",
    "Fabric",
    "Link",
    "Load",
    "Plan",
    "StateShape",
    "choose_plan",
    "explain_plan",
    "load_of",
    "map_bytes",
    "predict_s",
]

MAX_BLOCKS = 128
"""The most pipeline blocks that are weighed for a chain."""

MAX_CROWD = 64
"""Ranks of a node up to which an exchange of everyone with everyone in it is weighed."""

ONE_BLOCK = ("serial", "gather", "doubling")
"""Scans in which blocks pipeline nothing."""


@dataclass(frozen=True)
class Plan:
    """A scan with nothing left open.

    Attributes:
        algorithm: the scan.
        num_blocks: pipeline blocks; 0 for the chain inside kernels, which cuts states by itself.
        nodes: ranks of every node, in the order of the ranks; None means one node.
    """

    algorithm: str
    num_blocks: int
    nodes: Nodes | None = None


Candidates = tuple[tuple[Plan, float], ...]


def predict_s(plan: Plan, num_ranks: int, load: Load, fabric: Fabric) -> float:
    """Return the seconds until every rank has its states, all ranks starting at once.

    Args:
        plan: the scan.
        num_ranks: P.
        load: what a whole state weighs.
        fabric: what messages and compositions cost.
    """
    if plan.algorithm == DEVICE_CHAIN:
        return device_chain_s(fabric, num_ranks, load)
    schedule = build_schedule(plan.algorithm, num_ranks, plan.num_blocks, nodes=plan.nodes)
    return play(schedule, load, fabric, nodes=plan.nodes).end_s


def explain_plan(
    num_ranks: int,
    shape: StateShape,
    kind: str,
    element_size: int,
    *,
    nodes: Nodes | None = None,
    fabric: Fabric = LOOPBACK,
    on_device: bool = False,
) -> Candidates:
    """Return every plan that ``auto`` weighs with its predicted seconds, fastest first.

    Args:
        num_ranks: P.
        shape: [B, H, K, V] of the states.
        kind: of the transitions.
        element_size: bytes of an element of the state.
        nodes: ranks of every node, in the order of the ranks; None means one node.
        fabric: costs to predict by.
        on_device: whether the ranks can run a chain inside kernels.

    >>> for plan, seconds in explain_plan(4, (1, 16, 128, 128), "diagonal", 4)[:2]:
    ...     print(plan.algorithm, plan.num_blocks, seconds > 0)
    chain 8 True
    chain 4 True
    """
    _check(num_ranks, kind, nodes)
    load = load_of(shape, kind, element_size)
    plans = _plans(num_ranks, _num_rows(shape, kind), nodes, "auto", on_device=on_device)
    priced = [(p, predict_s(p, num_ranks, load, fabric)) for p in plans]
    return tuple(sorted(priced, key=lambda item: item[1]))


@lru_cache(maxsize=512)
def choose_plan(
    num_ranks: int,
    shape: StateShape,
    kind: str,
    element_size: int,
    *,
    algorithm: str = "auto",
    num_blocks: int | None = None,
    nodes: Nodes | None = None,
    fabric: Fabric = LOOPBACK,
    on_device: bool = False,
) -> Plan:
    """Fill in what a caller left open; the same plan as the first of `explain_plan`, but sooner.

    Candidates are played in the order of a lower bound of their time, and only while that is below
    the best time found.

    Args:
        num_ranks: P.
        shape: [B, H, K, V] of the states.
        kind: of the transitions.
        element_size: bytes of an element of the state.
        algorithm: a scan, or ``"auto"``.
        num_blocks: pipeline blocks, or None.
        nodes: ranks of every node, in the order of the ranks; None means one node, in which the
            two-level scans are left with their part inside a node.
        fabric: costs to choose by.
        on_device: whether the ranks can run a chain inside kernels, for ``"auto"`` to weigh.

    Raises:
        ArgumentError: an unknown algorithm or kind, or nodes that don't hold P ranks.

    >>> choose_plan(4, (1, 16, 128, 128), "diagonal", 4).algorithm
    'chain'
    """
    if algorithm != "auto" and algorithm not in BUILDERS:
        raise ArgumentError(unknown_name("algorithm", algorithm, ["auto", *BUILDERS]))
    _check(num_ranks, kind, nodes)
    if algorithm != "auto" and num_blocks is not None:
        return Plan(algorithm, num_blocks, nodes)
    if algorithm in ONE_BLOCK:
        return Plan(algorithm, 1, nodes)
    if num_ranks == 1:
        return Plan("chain" if algorithm == "auto" else algorithm, num_blocks or 1, nodes)
    load = load_of(shape, kind, element_size)
    # Inside kernels nobody is asked for a number of blocks.
    on_device = on_device and num_blocks is None
    plans = _plans(num_ranks, _num_rows(shape, kind), nodes, algorithm, on_device=on_device)
    best = _fastest(plans, num_ranks, load, fabric)
    return best if num_blocks is None else Plan(best.algorithm, num_blocks, nodes)


def _fastest(plans: list[Plan], num_ranks: int, load: Load, fabric: Fabric) -> Plan:
    if len(plans) == 1:
        return plans[0]
    nodes = check_nodes(plans[0].nodes, num_ranks)
    bounds = {p: at_least_s(p.algorithm, p.num_blocks, nodes, load, fabric) for p in plans}
    best, best_s = plans[0], float("inf")
    for plan in sorted(plans, key=lambda p: bounds[p]):
        if bounds[plan] >= best_s:
            break
        seconds = predict_s(plan, num_ranks, load, fabric)
        if seconds < best_s:
            best, best_s = plan, seconds
    return best


def _plans(
    num_ranks: int, num_rows: int, nodes: Nodes | None, algorithm: str, *, on_device: bool
) -> list[Plan]:
    """Return the plans to weigh for an algorithm, or for all."""
    known = check_nodes(nodes, num_ranks)
    # Fewer blocks than a node has ranks would leave some without a share of what crosses nodes.
    share = min(max(known), num_rows)
    pipelined = [share * more for more in (1, 2, 4, 8) if share * more <= num_rows]
    blocks = {
        "gather": [1],
        "doubling": [1],
        "chain": [1 << i for i in range(MAX_BLOCKS.bit_length()) if 1 << i <= num_rows],
        "two_level": pipelined if len(known) > 1 else [share],
        "two_level_doubling": [share],
        DEVICE_CHAIN: [0],
    }
    if algorithm != "auto":
        names = [algorithm]
    elif num_ranks == 1:
        return [Plan("chain", 1, nodes)]
    else:
        # In one node both scans of two levels are the same, and in a huge one no good.
        scans = {"gather", "doubling", "chain"} | ({DEVICE_CHAIN} if on_device else set())
        if max(known) <= MAX_CROWD:
            scans |= {"two_level", "two_level_doubling"} if len(known) > 1 else {"two_level"}
        names = [n for n in blocks if n in scans]
    return [Plan(name, number, nodes) for name in names for number in blocks[name]]


def _num_rows(shape: StateShape, kind: str) -> int:
    """Return into how many blocks a state can be cut."""
    B, H, K, V = shape
    return max(1, B * H * (V if kind == Dense.kind else K))


def _check(num_ranks: int, kind: str, nodes: Nodes | None) -> None:
    if kind not in KINDS:
        raise ArgumentError(unknown_name("transition kind", kind, KINDS))
    check_nodes(nodes, num_ranks)
