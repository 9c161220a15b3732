"""The scans against each other on emulated hosts, all in one run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from zeco.benchmarks.calibration import calibrate, meet
from zeco.benchmarks.cluster import ClusterSpec
from zeco.benchmarks.hosts import run_on_hosts
from zeco.benchmarks.timing import interface_bytes, spread, timed_together
from zeco.collectives.scan import start_scan
from zeco.collectives.transport import Transport
from zeco.core.costs import choose_plan, explain_plan, load_of, predict_s
from zeco.core.errors import ArgumentError, unknown_name
from zeco.core.fabric_file import fabric_from_dict, fabric_to_dict
from zeco.core.maps import AffineMap
from zeco.core.transitions import Dense, Diagonal, Identity, Scalar, Transition

KINDS = ("identity", "scalar", "diagonal", "dense")
BOUND = 1e-4
TASK = "zeco.benchmarks.comm:measure"


@dataclass(frozen=True)
class Candidate:
    """One way to find the entering states.

    Attributes:
        name: as shown.
        algorithm: a scan, ``"auto"``, or ``"all_gather"``: torch's own all-gather of the maps and a
            fold of them on every rank, as in LASP-2.
        num_blocks: pipeline blocks; None leaves them to the cost model.
    """

    name: str
    algorithm: str
    num_blocks: int | None = None


def candidates(blocks: tuple[int, ...], *, nodes: bool, latency: bool = False) -> list[Candidate]:
    """Return what is compared.

    Args:
        blocks: block counts of the chain, beside 1.
        nodes: whether there are nodes, so that scans of two levels differ from others.
        latency: whether messages are sent late, which torch's own all-gather wouldn't be: then it is
            left out, and the library's ``gather`` stands for it.
    """
    found = [] if latency else [Candidate("all-gather", "all_gather")]
    found.append(Candidate("chain, 1 block", "chain", 1))
    found += [Candidate(f"chain, {b} blocks", "chain", b) for b in blocks if b != 1]
    found += [Candidate("gather", "gather"), Candidate("doubling", "doubling")]
    found.append(Candidate("two_level", "two_level"))
    if nodes:
        found.append(Candidate("two_level_doubling", "two_level_doubling"))
    return [*found, Candidate("auto", "auto")]


def compare_scans(
    spec: ClusterSpec,
    *,
    shape: tuple[int, int, int],
    kind: str,
    blocks: tuple[int, ...],
    repetitions: int,
    fabric: dict[str, Any] | None,
    timeout_s: float,
) -> dict[str, Any]:
    """Lay a cluster and time every candidate on it; see `measure` for the arguments."""
    if kind not in KINDS:
        raise ArgumentError(unknown_name("transition kind", kind, KINDS))
    found = candidates(blocks, nodes=spec.nodes is not None, latency=spec.latency_s > 0)
    arguments = {
        "shape": shape,
        "kind": kind,
        "which": [asdict(c) for c in found],
        "repetitions": repetitions,
        "fabric": fabric,
    }
    return merge(run_on_hosts(spec, TASK, arguments, timeout_s=timeout_s))


def merge(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the ranks' figures together: times are the same on all, bytes are one's own.

    Sent bytes are those of the rank that sends most, and of the mean one.
    """
    first = ranks[0]
    rows: list[dict[str, Any]] = []
    for i, row in enumerate(first["rows"]):
        ledger = [rank["rows"][i]["ledger_bytes"] for rank in ranks]
        links = [rank["rows"][i]["interface_bytes"] for rank in ranks]
        row = {k: v for k, v in row.items() if not k.endswith("_bytes")}
        row |= {"most_ledger_bytes": max(ledger), "mean_ledger_bytes": sum(ledger) / len(ranks)}
        row |= {"most_interface_bytes": max(links), "mean_interface_bytes": sum(links) / len(ranks)}
        rows.append(row)
    times = {row["name"]: row["median_ms"] for row in rows}
    best = min((row for row in rows if row["name"] != "auto"), key=lambda row: row["median_ms"])
    ratios = {
        "all_gather_over_auto": times.get("all-gather", times["gather"]) / times["auto"],
        "one_block_chain_over_auto": times["chain, 1 block"] / times["auto"],
        "auto_over_best": times["auto"] / best["median_ms"],
        "best": best["name"],
    }
    return {**{k: v for k, v in first.items() if k != "rows"}, "rows": rows, "ratios": ratios}


def measure(
    transport: Transport,
    *,
    shape: list[int],
    kind: str,
    which: list[dict[str, Any]],
    repetitions: int,
    fabric: dict[str, Any] | None,
) -> dict[str, Any]:
    """Time the candidates in turn, repetition by repetition, on every rank of a group.

    Args:
        transport: this rank's end of the group.
        shape: heads, key dim and value dim of the fp32 state.
        kind: of the transitions.
        which: the candidates' fields.
        repetitions: of each, after one run that is checked against a fold of all maps and not timed.
        fabric: what ``auto`` chooses by; None measures it first.
    """
    costs = calibrate(transport) if fabric is None else fabric_from_dict(fabric)
    transport.fabric = replace(costs)
    maps = [_map_of(rank, shape, kind) for rank in range(transport.size)]
    expected = _prefix(maps, transport.rank)
    own = maps[transport.rank]
    del maps
    tried = [Candidate(**fields) for fields in which]
    for candidate in tried:
        _check(candidate, _enter(transport, own, candidate), expected, transport.rank)
    times: list[list[float]] = [[] for _ in tried]
    ledger: list[list[int]] = [[] for _ in tried]
    links: list[list[int]] = [[] for _ in tried]
    for _ in range(repetitions):
        for i, candidate in enumerate(tried):
            meet(transport)
            before = interface_bytes()

            def work(candidate: Candidate = candidate) -> None:
                _enter(transport, own, candidate)

            transport.ledger.clear()
            times[i].append(timed_together(transport, work))
            sent = transport.ledger.sent
            ledger[i].append(sum(t.bytes for name, t in sent.items() if name != "calibrate"))
            links[i].append(interface_bytes() - before)
    H, K, V = shape
    of_scan: tuple[Any, ...] = (transport.size, (1, H, K, V), kind, 4)
    known: dict[str, Any] = {"nodes": transport.nodes, "fabric": transport.fabric}
    rows: list[dict[str, Any]] = []
    for i, c in enumerate(tried):
        row = {**asdict(c), **spread(times[i])}
        row |= {"ledger_bytes": median(ledger[i]), "interface_bytes": median(links[i])}
        if c.algorithm != "all_gather":
            plan = choose_plan(*of_scan, algorithm=c.algorithm, num_blocks=c.num_blocks, **known)
            seconds = predict_s(plan, transport.size, load_of((1, H, K, V), kind, 4), costs)
            row |= {"plan": [plan.algorithm, plan.num_blocks]}
            row |= {"predicted_ms": round(seconds * 1e3, 4)}
        rows.append(row)
    plans = explain_plan(*of_scan, **known)
    return {
        "ranks": transport.size,
        "rows": rows,
        "chosen": {"algorithm": plans[0][0].algorithm, "num_blocks": plans[0][0].num_blocks},
        "predicted_ms": [
            {"algorithm": p.algorithm, "num_blocks": p.num_blocks, "ms": seconds * 1e3}
            for p, seconds in plans
        ],
        "fabric": fabric_to_dict(transport.fabric),
    }


def _enter(transport: Transport, own: AffineMap, candidate: Candidate) -> torch.Tensor:
    """Return the state that enters this rank."""
    if candidate.algorithm == "all_gather":
        return _gather_and_fold(transport, own)
    scan = start_scan(
        transport, own, algorithm=candidate.algorithm, num_blocks=candidate.num_blocks
    )
    return scan.wait()[0]


def _gather_and_fold(transport: Transport, own: AffineMap) -> torch.Tensor:
    parameters = own.transition.parameters
    message = torch.cat([x.reshape(-1) for x in (own.update, *parameters)])
    found = list(message.new_empty(transport.size, message.numel()))
    dist.all_gather(found, message, group=transport.as_group())  # type: ignore[arg-type]
    num_bytes = message.numel() * message.element_size()
    transport.ledger.count_sent("all-gather", num_bytes * (transport.size - 1))
    size = own.update.numel()
    entering = torch.zeros_like(own.update)
    for other in found[: transport.rank]:
        update = other[:size].view_as(own.update)
        rest = tuple(other[size:].view_as(p) for p in parameters)
        entering = AffineMap(update, own.transition.with_parameters(rest))(entering)
    return entering


def _map_of(rank: int, shape: list[int], kind: str) -> AffineMap:
    H, K, V = shape
    draw = torch.Generator().manual_seed(rank)
    update = torch.randn(1, H, K, V, generator=draw)
    transition: Transition = Identity()
    if kind == "scalar":
        transition = Scalar(-torch.rand(1, H, generator=draw))
    elif kind == "diagonal":
        transition = Diagonal(-torch.rand(1, H, K, generator=draw))
    elif kind == "dense":
        transition = Dense(torch.randn(1, H, K, K, generator=draw) * K**-0.5)
    return AffineMap(update, transition)


def _prefix(maps: list[AffineMap], rank: int) -> torch.Tensor:
    entering = torch.zeros_like(maps[0].update)
    for earlier in maps[:rank]:
        entering = earlier(entering)
    return entering


def _check(candidate: Candidate, entering: torch.Tensor, expected: torch.Tensor, rank: int) -> None:
    """Refuse to time what computes something else."""
    scale = float(expected.abs().max()) or 1.0
    error = float((entering - expected).abs().max()) / scale
    if not error <= BOUND:
        raise ArithmeticError(f"{candidate.name}: relative error {error:.1e} on rank {rank}")
