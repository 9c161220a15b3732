"""Operators on P ranks under every method, beside no sequence parallelism and a peer's own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zeco.benchmarks.fla_settings import compiled_side_by_side, one_setting_each
from zeco.benchmarks.gpus import fla_cp
from zeco.benchmarks.gpus.layer_times import MIDDLE, NONE, free, time_methods
from zeco.benchmarks.gpus.team import METHODS, Team, Told, team_sizes, teams
from zeco.benchmarks.op import BOTH, Call
from zeco.benchmarks.op_gate import BOUNDS, GATES, cast_inputs
from zeco.benchmarks.virtual_ranks import middle_rank
from zeco.sequence_parallel import SequenceParallel
from zeco.testing.cases import CASES, Setting

PEER = "fla cp"
GATE_FACTOR = 4.0
"""Gradients of what decays are made of are sums in which large terms cancel."""

MARGIN = 1.5
"""Of the time that a smaller case of its operator lets expect of one, in which it must fit."""


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

LARGE_ELEMENTS = 2**28
"""Larger cases are not run to compile kernels, which several processes do on one GPU, and take so long
that the host's launches don't show: they are timed less often."""


@dataclass(frozen=True)
class LayerSizes:
    """How much is timed.

    Attributes:
        cases: in this order.
        check_tokens: on each rank, of the comparison with one rank before.
        dtype: of inputs; gates are fp32.
        repetitions: of every time; at most three of a large case.
        fla_tuning: ``"default"``: FLA's kernels take what its autotuning finds; ``"off"``: one setting
            each, whoever calls them.
        methods: that are compared with none.
    """

    cases: Sequence[LayerCase] = LAYER_CASES
    check_tokens: int = 1024
    dtype: torch.dtype = torch.bfloat16
    repetitions: int = 5
    fla_tuning: str = "off"
    methods: Sequence[str] = (*METHODS, PEER)

    def repetitions_of(self, case: LayerCase) -> int:
        """Return how often a case is timed."""
        return min(self.repetitions, 3) if case.elements > LARGE_ELEMENTS else self.repetitions


def cases_to_prepare(sizes: LayerSizes, num_ranks: int) -> list[LayerCase]:
    """Return whatever a rank computes on, each once, but for large cases."""
    small = [replace(case, tokens=sizes.check_tokens) for case in sizes.cases]
    found: list[LayerCase] = []
    for case in [*sizes.cases, *small]:  # autotuning keeps what it finds at the first call
        if case.elements > LARGE_ELEMENTS:
            continue
        found.append(case)
        for P in team_sizes(num_ranks):
            longer = replace(case, tokens=P * case.tokens)
            if case in small:  # the whole sequence, to compare with
                found.append(longer)
            if "ulysses" in sizes.methods and case.heads % P == 0:
                found.append(replace(longer, heads=case.heads // P))
    return list(dict.fromkeys(found))


def peers_to_prepare(sizes: LayerSizes) -> list[LayerCase]:
    """Return a case, not a large one, for each operator that the peer has."""
    found: dict[str, LayerCase] = {}
    for case in sizes.cases:
        if PEER in sizes.methods and case.op in fla_cp.OPERATORS:
            small = replace(case, tokens=sizes.check_tokens)
            found.setdefault(case.op, small if case.elements > LARGE_ELEMENTS else case)
    return list(found.values())


def prepare_cases(team: Team, sizes: LayerSizes) -> None:
    """Compile the kernels of cases, on one rank: what its neighbours bring is made up.

    Args:
        team: of one rank.
        sizes: the cases.
    """
    for case in sizes.cases:
        inputs, d_o = _make_inputs(case, case.tokens, sizes, 0, team.device)
        with fla_settings(team, sizes):
            for call, options in _calls(team, case, inputs, d_o, sizes.methods, {}).values():
                for run in call.runs(**options).values():
                    run()
        free(team)


def prepare_peer(team: Team, case: LayerCase, sizes: LayerSizes) -> None:
    """Compile the peer's kernels for a case, on one rank.

    Args:
        team: of one rank.
        case: at whose tokens its kernels are tuned, if they are.
        sizes: of what is measured.
    """
    if fla_cp.why_not(case.op, team.device) is None:
        inputs, d_o = _make_inputs(case, case.tokens, sizes, 0, team.device)
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        with fla_settings(team, sizes):
            for run in _peer_call(team, case, leaves, d_o).runs().values():
                run()


def runs_fla(team: Team) -> bool:
    """Return whether FLA's kernels run here."""
    return fla_cp.why_not(fla_cp.OPERATORS[0], team.device) is None


def fla_settings(team: Team, sizes: LayerSizes) -> AbstractContextManager[None]:
    """Give FLA's kernels their settings, if they run here."""
    if not runs_fla(team):
        return nullcontext()
    return one_setting_each() if sizes.fla_tuning == "off" else compiled_side_by_side()


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
        tuned = "take what its autotuning finds", "are held to one setting each"
        figures["notes"].append(f"FLA's kernels {tuned[sizes.fla_tuning == 'off']}")
    with fla_settings(world, sizes):
        _measure_rows(world, told, sizes, figures)
    return figures


def _measure_rows(world: Team, told: Told, sizes: LayerSizes, figures: dict[str, Any]) -> None:
    left: list[str] = []
    for team in teams(world):
        checked: dict[tuple[str, int, int], dict[str, str]] = {}
        took: dict[str, tuple[float, int]] = {}
        for case in sizes.cases:
            seconds, elements = took.get(case.op, (0.0, case.elements))
            if not world.has_time(MARGIN * seconds * case.elements / elements):
                left.append(f"{case.op}, {case.tokens} tokens a rank")
                continue
            if team is not None:
                begun = time.monotonic()
                key = case.op, case.heads, case.head_dim
                if key not in checked:
                    check = _check(team, case, sizes)
                    figures["checks"].append(check)
                    checked[key] = check["left_out"]
                row = _time(team, case, sizes, checked[key])
                free(team)
                row["seconds"] = round(time.monotonic() - begun, 1)
                figures["rows"].append(row)
                told(figures)
                took[case.op] = row["seconds"], case.elements
            world.gather()
    if left:
        figures["notes"].append(f"no time was left for {'; '.join(left)}")
    figures["complete"] = not left


def _contexts(team: Team, tokens: int, methods: Sequence[str]) -> dict[str, SequenceParallel]:
    """Return the methods' contexts; the one that would ask for the others' tokens is told them."""
    told: dict[str, dict[str, Any]] = {"ulysses": {"shard_sizes": [tokens] * team.size}}
    return {
        name: SequenceParallel(team.group, **how, **told.get(name, {}))
        for name, how in METHODS.items()
        if name in methods
    }


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
    team: Team,
    case: LayerCase,
    inputs: dict[str, Tensor],
    d_o: Tensor,
    methods: Sequence[str],
    left_out: dict[str, str],
) -> dict[str, tuple[Call, dict[str, Any]]]:
    """Return every method's call and its further options."""
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    ours = Call(CASES[case.op].operator, leaves, d_o)
    found: dict[str, tuple[Call, dict[str, Any]]] = {NONE: (ours, {})}
    if team.size == 1:
        found[MIDDLE] = ours, {"sp": middle_rank(ours.outputs, ours.gradients)}
        return found
    for name, sp in _contexts(team, d_o.shape[1], methods).items():
        if name == "ulysses" and case.heads % team.size:
            left_out[name] = f"{case.heads} heads, {team.size} ranks"
        elif name not in left_out:
            found[name] = ours, {"sp": sp}
    if PEER not in methods:
        return found
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
    for name, (call, options) in _calls(
        team, case, parts, d_o[:, mine], sizes.methods, left_out
    ).items():
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
    """Time all methods on a case."""
    inputs, d_o = _make_inputs(case, case.tokens, sizes, team.rank, team.device)
    left_out = dict(left_out)
    runs = {
        (name, work): run
        for name, (call, options) in _calls(
            team, case, inputs, d_o, sizes.methods, left_out
        ).items()
        for work, run in call.runs(**options).items()
    }
    row: dict[str, Any] = {"op": case.op, "ranks": team.size, "tokens_a_rank": case.tokens}
    row |= {"heads": case.heads, "head_dim": case.head_dim, "left_out": left_out}
    return row | time_methods(team, runs, sizes.repetitions_of(case), left_out)
