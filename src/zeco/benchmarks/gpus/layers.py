"""Operators on P ranks under every method, beside no sequence parallelism and a peer's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeco.benchmarks.device import synchronize
from zeco.benchmarks.fla_settings import one_setting_each
from zeco.benchmarks.gpus import fla_cp
from zeco.benchmarks.gpus.team import METHODS, Team, Told, teams
from zeco.benchmarks.op import BOTH, FORWARD, Call
from zeco.benchmarks.op_gate import BOUNDS, GATES, cast_inputs
from zeco.benchmarks.timing import spread
from zeco.benchmarks.virtual_ranks import middle_rank
from zeco.sequence_parallel import SequenceParallel
from zeco.testing.cases import CASES, Setting

NONE, PEER, MIDDLE = "none", "fla cp", "a middle rank, its scans arrived"
GATE_FACTOR = 4.0
"""Gradients of what decays are made of are sums in which large terms cancel."""


@dataclass(frozen=True)
class LayerCase:
    """An operator at a size.

    Attributes:
        op: its public name.
        tokens: on each rank.
        heads: H.
        head_dim: K = V.
    """

    op: str
    tokens: int
    heads: int
    head_dim: int = 128

    @property
    def elements(self) -> int:
        """Numbers in the queries."""
        return self.tokens * self.heads * self.head_dim


HEADS = {"gla": 16, "kda": 64, "gated_delta_rule": 64}
"""For the delta rules those at which FLA publishes times of its context parallelism, at 32k tokens."""

LAYER_CASES = tuple(
    LayerCase(op, thousands * 1024, heads)
    for thousands in (32, 16, 128)
    for op, heads in HEADS.items()
)
"""What is timed, the most important first."""

PREPARED_ELEMENTS = 2**28
"""Larger cases are not run to compile kernels, which several processes do on one GPU."""


@dataclass(frozen=True)
class LayerSizes:
    """How much is timed.

    Attributes:
        cases: in this order.
        check_tokens: on each rank, of the comparison with one rank before.
        dtype: of inputs; gates are fp32.
        repetitions: of every time.
    """

    cases: Sequence[LayerCase] = LAYER_CASES
    check_tokens: int = 1024
    dtype: torch.dtype = torch.bfloat16
    repetitions: int = 5


def prepare_cases(team: Team, sizes: LayerSizes) -> None:
    """Compile the kernels of all cases, on one rank: what its neighbours bring is made up.

    Args:
        team: of one rank.
        sizes: the cases.
    """
    for case in sizes.cases:
        if case.elements > PREPARED_ELEMENTS:
            continue
        inputs, d_o = _make_inputs(case, case.tokens, sizes, 0, team.device)
        with fla_untuned(team):
            for call, options in _calls(team, case, inputs, d_o, {}).values():
                for run in call.runs(**options).values():
                    run()
        _free(team)


def prepare_peer(team: Team, sizes: LayerSizes) -> None:
    """Compile the peer's kernels for the first of the cases, on one rank.

    Args:
        team: of one rank.
        sizes: the cases, all of one operator and number of heads.
    """
    case = sizes.cases[0]
    if fla_cp.why_not(case.op, team.device) is None:
        inputs, d_o = _make_inputs(case, sizes.check_tokens, sizes, 0, team.device)
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        with fla_untuned(team):
            for run in _peer_call(team, case, leaves, d_o).runs().values():
                run()


def runs_fla(team: Team) -> bool:
    """Return whether FLA's kernels run here."""
    return fla_cp.why_not(fla_cp.OPERATORS[0], team.device) is None


def fla_untuned(team: Team) -> AbstractContextManager[None]:
    """Hold FLA's kernels to one setting each, whoever calls them, if they run here."""
    return one_setting_each() if runs_fla(team) else nullcontext()


def measure_layers(world: Team, told: Told, sizes: LayerSizes) -> dict[str, Any]:
    """Time all cases on all ranks and on each smaller power of two, all methods in turn.

    What differs from one rank on the same tokens isn't timed.

    Returns:
        ``rows``: one for each number of ranks and case, and ``complete``.
    """
    figures: dict[str, Any] = {"complete": False, "notes": [], "checks": [], "rows": []}
    dtype = str(sizes.dtype).removeprefix("torch.")
    figures |= {"dtype": dtype, "gates_dtype": "float32", "check_tokens": sizes.check_tokens}
    if runs_fla(world):
        figures["notes"].append("FLA's kernels are held to one setting each")
    with fla_untuned(world):
        _measure_rows(world, told, sizes, figures)
    return figures


def _measure_rows(world: Team, told: Told, sizes: LayerSizes, figures: dict[str, Any]) -> None:
    for team in teams(world):
        checked: dict[tuple[str, int, int], dict[str, str]] = {}
        for case in sizes.cases:
            if not world.has_time():
                return
            if team is not None:
                key = case.op, case.heads, case.head_dim
                if key not in checked:
                    check = _check(team, case, sizes)
                    figures["checks"].append(check)
                    checked[key] = check["left_out"]
                figures["rows"].append(_time(team, case, sizes, checked[key]))
                told(figures)
                _free(team)
            world.gather()
    figures["complete"] = True


def _contexts(team: Team) -> dict[str, SequenceParallel]:
    return {name: SequenceParallel(team.group, **how) for name, how in METHODS.items()}


def _make_inputs(
    case: LayerCase, tokens: int, sizes: LayerSizes, seed: int, device: torch.device
) -> tuple[dict[str, Tensor], Tensor]:
    """Return random inputs, drawn where they are used, and the gradient of the outputs."""
    setting = Setting(
        length=tokens,
        heads=case.heads,
        key_heads=case.heads,
        key_dim=case.head_dim,
        value_dim=case.head_dim,
    )
    generator = torch.Generator(device).manual_seed(seed)
    with device:
        inputs = CASES[case.op].make(setting, generator)
        d_o = torch.randn(1, tokens, case.heads, case.head_dim, generator=generator)
    return cast_inputs(inputs, sizes.dtype, torch.float32), d_o.to(sizes.dtype)


def _calls(
    team: Team, case: LayerCase, inputs: dict[str, Tensor], d_o: Tensor, left_out: dict[str, str]
) -> dict[str, tuple[Call, dict[str, Any]]]:
    """Return every method's call and its further options."""
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    ours = Call(CASES[case.op].operator, leaves, d_o)
    found: dict[str, tuple[Call, dict[str, Any]]] = {NONE: (ours, {})}
    if team.size == 1:
        found[MIDDLE] = ours, {"sp": middle_rank(ours.outputs, ours.gradients)}
        return found
    for name, sp in _contexts(team).items():
        if name == "ulysses" and case.heads % team.size:
            left_out[name] = f"{case.heads} heads, {team.size} ranks"
        elif name not in left_out:
            found[name] = ours, {"sp": sp}
    reason = left_out.get(PEER) or fla_cp.why_not(case.op, team.device)
    if reason is None:
        try:
            found[PEER] = _peer_call(team, case, leaves, d_o), {}
        except Exception as error:  # whatever stops the peer doesn't stop our own measurement
            reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        left_out[PEER] = reason
    return found


def _peer_call(team: Team, case: LayerCase, leaves: dict[str, Tensor], d_o: Tensor) -> Call:
    peer = fla_cp.FlaContextParallel(case.op, team.group, d_o.shape[1], team.device)
    return Call(peer, leaves, d_o, forward_only=peer.forward_only)


def _check(team: Team, case: LayerCase, sizes: LayerSizes) -> dict[str, Any]:
    """Compare outputs and gradients with one rank's on the whole sequence, and say what is wrong."""
    whole, d_o = _make_inputs(case, sizes.check_tokens * team.size, sizes, 0, team.device)
    mine = slice(team.rank * sizes.check_tokens, (team.rank + 1) * sizes.check_tokens)
    alone = Call(CASES[case.op].operator, {n: x.requires_grad_() for n, x in whole.items()}, d_o)
    expected = {n: x[:, mine] for n, x in _solve(alone, {}).items()}
    parts = {n: x[:, mine].detach().contiguous() for n, x in whole.items()}
    left_out: dict[str, str] = {}
    errors: dict[str, dict[str, float]] = {}
    for name, (call, options) in _calls(team, case, parts, d_o[:, mine], left_out).items():
        if name in (NONE, MIDDLE):  # it computes something else on all but the first rank
            continue
        try:
            found = _solve(call, options)
        except Exception as error:  # said beside the others' times
            left_out[name] = f"{type(error).__name__}: {error}"
            continue
        worst = team.worst([_relative(x, expected[n]) for n, x in found.items()])
        errors[name] = dict(zip(found, worst, strict=True))
        wrong = {n: e for n, e in errors[name].items() if not e <= _bound(n, sizes.dtype)}
        if wrong:
            left_out[name] = f"it differs from one rank: {wrong}"
        if call.forward_only is not None:
            left_out[f"{name}, {BOTH}"] = call.forward_only
    return {
        "op": case.op,
        "ranks": team.size,
        "heads": case.heads,
        "errors": errors,
        "left_out": left_out,
    }


def _solve(call: Call, options: dict[str, Any]) -> dict[str, Tensor]:
    if call.forward_only is not None:
        return {"o": call.forward(**options)}
    o = call.outputs(**options)
    gradients = call.gradients(o)
    names = [f"d_{name}" for name in call.leaves]
    return {"o": o.detach(), **dict(zip(names, gradients, strict=True))}


def _bound(result: str, dtype: torch.dtype) -> float:
    of_gate = result.removeprefix("d_") in GATES and result != "o"
    return BOUNDS[dtype] * (GATE_FACTOR if of_gate else 1.0)


def _relative(found: Tensor, expected: Tensor) -> float:
    """Return ‖x - ref‖ / ‖ref‖, infinite where that isn't a number."""
    error = float((found.float() - expected.float()).norm() / (expected.float().norm() + 1e-30))
    return error if error == error else float("inf")


def _time(
    team: Team, case: LayerCase, sizes: LayerSizes, left_out: dict[str, str]
) -> dict[str, Any]:
    """Time all methods on a case; ratios are to no sequence parallelism."""
    inputs, d_o = _make_inputs(case, case.tokens, sizes, team.rank, team.device)
    runs: dict[tuple[str, str], Callable[[], object]] = {}
    for name, (call, options) in _calls(team, case, inputs, d_o, left_out).items():
        for work, run in call.runs(**options).items():
            runs[name, work] = run
    host = {key: _host_ms(team, run) for key, run in runs.items()}
    times = team.times(runs, sizes.repetitions)
    row: dict[str, Any] = {"op": case.op, "ranks": team.size, "tokens_a_rank": case.tokens}
    row |= {"heads": case.heads, "head_dim": case.head_dim, "left_out": left_out, "times": []}
    figures = {key: spread(seconds) for key, seconds in times.items()}
    for (name, work), found in figures.items():
        over = found["median_ms"] / figures[NONE, work]["median_ms"]
        row["times"].append(
            {"method": name, "pass": work, **found, "over_none": round(over, 4)}
            | {"launches_ms": host[name, work]}
        )
    row["ratios"] = _ratios(figures)
    return row


def _host_ms(team: Team, run: Callable[[], object]) -> float:
    """Return how long the host is busy with a call; with waiting, if it waits for the GPU halfway."""
    run()
    synchronize(team.device)
    team.meet()
    start = time.perf_counter()
    run()
    took = (time.perf_counter() - start) * 1e3
    synchronize(team.device)
    return round(team.worst([took])[0], 3)


def _ratios(figures: dict[tuple[str, str], dict[str, Any]]) -> dict[str, float]:
    """Return what ZeCO, at its best scan, is to the others: below 1 it is faster."""
    found: dict[str, float] = {}
    for work in (FORWARD, BOTH):
        times = {n: f["median_ms"] for (n, w), f in figures.items() if w == work}
        ours = [t for n, t in times.items() if n.startswith("zeco")]
        if ours:
            found |= {
                f"{work}: zeco over {name}": round(min(ours) / t, 4)
                for name, t in times.items()
                if not name.startswith("zeco")
            }
    return found


def _free(team: Team) -> None:
    if team.on_gpu:
        torch.cuda.empty_cache()
