"""One public operator on one device: right first, then how long, beside a peer and the floors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from zeco.benchmarks.device import (
    Run,
    capture,
    copy_bytes_per_s,
    kernel_times,
    matmul_flops_per_s,
    peak_mib,
    time_in_turn,
)
from zeco.benchmarks.floors import floors
from zeco.benchmarks.op_gate import (
    BOUNDS,
    call_errors,
    cast_inputs,
    exact_results,
    forward_errors,
    make_problem,
    norm_errors,
    oracle_errors,
    too_large,
)
from zeco.benchmarks.peers import MambaPeer, Peer, find_peer, why_no_peer
from zeco.benchmarks.timing import spread
from zeco.benchmarks.virtual_ranks import middle_rank, solve_on_ranks
from zeco.core.errors import ArgumentError
from zeco.testing.cases import Case, Setting
from zeco.testing.conformance import Problem, Results

OURS = "zeco"
FORWARD, BOTH = "forward", "forward_backward"
EAGER, GRAPH = "eager", "graph"
PLAIN, RANK = "plain", "middle rank"


@dataclass(frozen=True)
class OpSpec:
    """What is measured.

    Attributes:
        case: the operator.
        setting: its sizes and decays.
        dtype: of the inputs.
        gates_dtype: of those that decays are made of.
        backend: of our operator.
        device: where it runs.
        repetitions: of every time.
        hows: of `EAGER` and `GRAPH`, those that are timed.
        peer: a peer's name, ``"none"``, or ``"auto"``: the operator's peer where it runs.
        check_tokens: on which the results are checked.
        num_ranks: P virtual ranks, for the cost that a middle one adds; None for none.
        forward_only: why no backward pass is checked and timed; None to do so.
    """

    case: Case
    setting: Setting
    dtype: torch.dtype
    gates_dtype: torch.dtype
    backend: str
    device: torch.device
    repetitions: int
    hows: tuple[str, ...]
    peer: str
    check_tokens: int
    num_ranks: int | None = None
    forward_only: str | None = None


@dataclass(frozen=True)
class Call:
    """An operator's call, to be repeated.

    Attributes:
        operator: takes the inputs by name.
        leaves: the inputs.
        d_o: the gradient that the outputs get.
        options: passed on.
        forward_only: why the backward pass isn't run, or None.
    """

    operator: Callable[..., Any]
    leaves: dict[str, Tensor]
    d_o: Tensor
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    forward_only: str | None = None

    def outputs(self, **more: Any) -> Tensor:
        """Return the outputs [B, T, H, V]."""
        return self.operator(**self.leaves, **self.options, **more)[0]

    def forward(self, **more: Any) -> Tensor:
        """Run the forward pass alone."""
        with torch.no_grad():
            return self.outputs(**more)

    def gradients(self, o: Tensor) -> tuple[Tensor, ...]:
        """Run the backward pass of outputs."""
        return torch.autograd.grad(o, list(self.leaves.values()), self.d_o)

    def runs(self, **more: Any) -> dict[str, Run]:
        """Return the passes that can be timed, by name."""
        found: dict[str, Run] = {FORWARD: lambda: self.forward(**more)}
        if self.forward_only is None:
            found[BOTH] = lambda: self.gradients(self.outputs(**more))
        return found


def measure_op(spec: OpSpec) -> dict[str, Any]:
    """Check an operator, then time it.

    Returns:
        The figures; with ``refused`` in place of times when a result is wrong.

    Raises:
        ArgumentError: the options don't go together.
    """
    _check(spec)
    figures = _describe(spec)
    figures["gate"] = gate = _gate(spec, figures["notes"])
    if gate["wrong"]:
        figures["refused"] = "; ".join(gate["wrong"])
        return figures
    ours = _make_call(spec)
    figures["backend_used"] = backend_of(ours.outputs())
    calls = {OURS: ours}
    peer = find_peer(spec.case.name)
    if peer is not None and peer.name in gate["errors"]:
        forward_only = spec.forward_only or peer.why_forward_only()
        options = dict(spec.case.options)
        calls[peer.name] = Call(peer, ours.leaves, ours.d_o, options, forward_only)
        if spec.forward_only is None and forward_only is not None:
            figures["notes"].append(f"{peer.name}, forward only: {forward_only}")
    rates = {
        "copy_bytes_per_s": copy_bytes_per_s(spec.device),
        "matmul_flops_per_s": matmul_flops_per_s(spec.device, spec.dtype),
    }
    figures["device_rates"] = rates
    figures["floors"] = floors(
        spec.case.name, ours.leaves.values(), ours.forward(), spec.setting.key_dim, **rates
    )
    figures["rows"] = _times(spec, calls, figures["floors"], figures["notes"])
    if spec.device.type == "cuda":
        figures |= _count(calls)
    else:
        figures["notes"].append("on a CPU: no CUDA graphs, launches or peak memory")
    if spec.num_ranks is not None:
        figures["added_by_a_middle_rank"] = _added(spec, ours)
    return figures


def backend_of(o: Tensor) -> str | None:
    """Return the backend of the operator call that outputs come from; None if none is found."""
    waiting, seen = [o.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        backend = getattr(getattr(node, "operator", None), "backend", None)
        if backend is not None:
            return str(backend)
        waiting += [earlier for earlier, _ in node.next_functions]
    return None


def _check(spec: OpSpec) -> None:
    if GRAPH in spec.hows and spec.device.type != "cuda":
        raise ArgumentError("CUDA graphs need a CUDA device; time the calls in eager mode")
    if spec.dtype not in BOUNDS:
        raise ArgumentError(
            f"dtype {spec.dtype} has no bound for errors: use one of {list(BOUNDS)}"
        )
    if spec.num_ranks is not None and spec.num_ranks < 3:
        raise ArgumentError(
            f"{spec.num_ranks} virtual ranks have no middle one; give at least 3, or none"
        )


def _describe(spec: OpSpec) -> dict[str, Any]:
    s = spec.setting
    on_gpu = spec.device.type == "cuda"
    return {
        "op": spec.case.name,
        "shape_BTHKV": [s.batch, s.length, s.heads, s.key_dim, s.value_dim],
        "key_heads": s.key_heads,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "gates_dtype": str(spec.gates_dtype).removeprefix("torch."),
        "decay": s.decay,
        "backend": spec.backend,
        "device": torch.cuda.get_device_name(spec.device) if on_gpu else "cpu",
        "notes": [],
    }


def _gate(spec: OpSpec, notes: list[str]) -> dict[str, Any]:
    """Return the errors of everything that is to be timed, and what of it is wrong."""
    case = spec.case
    prefix = replace(spec.setting, length=min(spec.check_tokens, spec.setting.length))
    reference = oracle_errors(case, prefix, spec.device)
    problem = make_problem(case, prefix, spec.device, spec.dtype, spec.gates_dtype)
    expected = exact_results(problem)
    errors_of = call_errors if spec.forward_only is None else forward_errors
    errors = {OURS: errors_of(problem, expected, case.operator, backend=spec.backend)}
    errors["torch"] = errors_of(problem, expected, case.operator, backend="torch")
    wrong = [
        f"the torch form in fp64 is off the oracle in {name} by {reference[name]:.1e}"
        for name in too_large(reference, torch.float64)
    ]
    wrong += [
        f"{name} is off by {errors[OURS][name]:.1e}" for name in too_large(errors[OURS], spec.dtype)
    ]
    if spec.num_ranks is not None:
        joined, _ = solve_on_ranks(problem, spec.num_ranks, backend=spec.backend)
        errors["virtual ranks"] = norm_errors(joined, {n: expected[n] for n in errors[OURS]})
        wrong += [
            f"on {spec.num_ranks} virtual ranks {name} is off by "
            f"{errors['virtual ranks'][name]:.1e}"
            for name in too_large(errors["virtual ranks"], spec.dtype)
        ]
    peer = find_peer(case.name)
    if spec.peer != "none":
        found = _peer_errors(spec, peer, problem, expected)
        if peer is None or isinstance(found, str):
            notes.append(f"no peer: {found}")
        else:
            errors[peer.name] = found
            notes += [
                f"{peer.name} itself is off by {found[name]:.1e} in {name}"
                for name in too_large(found, spec.dtype)
            ]
    return {
        "tokens": prefix.length,
        "bound": BOUNDS[spec.dtype],
        "reference_errors": reference,
        "errors": errors,
        "wrong": wrong,
    }


def _peer_errors(
    spec: OpSpec, peer: Peer | MambaPeer | None, problem: Problem, expected: Results
) -> dict[str, float] | str:
    """Return the peer's errors, or why there is no peer."""
    grouped = spec.setting.heads != spec.setting.key_heads
    reason = why_no_peer(spec.case.name, spec.device, grouped=grouped)
    if peer is not None and reason is None and spec.peer in ("auto", peer.name):
        try:
            both = spec.forward_only is None and peer.why_forward_only() is None
            return (call_errors if both else forward_errors)(problem, expected, peer)
        except Exception as error:  # whatever stops the peer doesn't stop our own measurement
            reason = f"{type(error).__name__}: {error}"
    if spec.peer != "auto":
        reason = reason or f"there is no peer of {spec.case.name} by that name"
        raise ArgumentError(f"--peer {spec.peer}: {reason}; or leave the peer out: --peer none")
    return str(reason)


def _make_call(spec: OpSpec) -> Call:
    """Return our call on random inputs, which are drawn where they are used."""
    setting, device = spec.setting, spec.device
    generator = torch.Generator(device).manual_seed(0)
    with device:
        inputs = spec.case.make(setting, generator)
        d_o = torch.randn(
            setting.batch, setting.length, setting.heads, setting.value_dim, generator=generator
        )
    inputs = cast_inputs(inputs, spec.dtype, spec.gates_dtype)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    options = {**dict(spec.case.options), "backend": spec.backend}
    return Call(spec.case.operator, leaves, d_o.to(spec.dtype), options, spec.forward_only)


def _times(
    spec: OpSpec, calls: dict[str, Call], floor: dict[str, dict[str, float]], notes: list[str]
) -> list[dict[str, Any]]:
    """Return the times of every call, pass and way to launch it; all take turns."""
    runs: dict[tuple[str, str, str], Run] = {}
    for name, call in calls.items():
        for work, run in call.runs().items():
            if EAGER in spec.hows:
                runs[name, work, EAGER] = run
            if GRAPH in spec.hows:
                try:
                    runs[name, work, GRAPH] = capture(run)
                except RuntimeError as error:
                    if name == OURS:
                        raise
                    notes.append(f"{name}, {work}: can't be captured in a graph: {error}")
    times = time_in_turn(runs, spec.device, spec.repetitions)
    rows: list[dict[str, Any]] = []
    for key in runs:
        name, work, how = key
        row: dict[str, Any] = {"name": name, "pass": work, "how": how}
        row |= spread(times[key])
        rows.append(row | {"over_floor": round(row["median_ms"] / floor[work]["floor_ms"], 3)})
    ours = {(r["pass"], r["how"]): r["median_ms"] for r in rows if r["name"] == OURS}
    for row in rows:
        row["over_ours"] = round(row["median_ms"] / ours[row["pass"], row["how"]], 3)
    return rows


def _count(calls: dict[str, Call]) -> dict[str, Any]:
    """Return every call's launches and peak memory; kernels with launches and ms."""
    launches: dict[str, Any] = {}
    peaks: dict[str, Any] = {}
    for name, call in calls.items():
        launches[name] = {work: _launches(run) for work, run in call.runs().items()}
        peaks[name] = {work: round(peak_mib(run), 2) for work, run in call.runs().items()}
    return {"launches": launches, "peak_mib": peaks}


def _launches(run: Run) -> dict[str, Any]:
    """Return a run's launches, and every kernel's share of them with its ms."""
    found = kernel_times(run)
    return {
        "total": sum(count for count, _ in found.values()),
        "ms": round(sum(seconds for _, seconds in found.values()) * 1e3, 5),
        "kernels": {name: [count, round(s * 1e3, 5)] for name, (count, s) in found.items()},
    }


def _added(spec: OpSpec, ours: Call) -> dict[str, Any]:
    """Return what a middle rank's passes take beside the plain operator's on the same tokens."""
    rank = middle_rank(ours.outputs, ours.gradients)
    runs: dict[tuple[str, str, str], Run] = {}
    for who, more in ((PLAIN, {}), (RANK, {"sp": rank})):
        for work, run in ours.runs(**more).items():
            for how in spec.hows:
                runs[who, work, how] = run if how == EAGER else capture(run)
    times = time_in_turn(runs, spec.device, spec.repetitions)
    rows: list[dict[str, Any]] = []
    for who, work, how in runs:
        row: dict[str, Any] = {"name": who, "pass": work, "how": how}
        rows.append(row | spread(times[who, work, how]))
    medians = {(r["name"], r["pass"], r["how"]): r["median_ms"] for r in rows}
    shares = {
        f"{work}, {how}": round(medians[RANK, work, how] / medians[PLAIN, work, how] - 1, 4)
        for who, work, how in runs
        if who == PLAIN
    }
    added = {"ranks": spec.num_ranks, "rows": rows, "added_share": shares}
    if spec.device.type == "cuda":
        runs_of_rank = ours.runs(sp=rank).items()
        added["launches"] = {work: _launches(run) for work, run in runs_of_rank}
    return added
