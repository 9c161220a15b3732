from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from zeco.benchmarks import op, op_gate
from zeco.benchmarks.device import pick_device, time_in_turn
from zeco.benchmarks.floors import DECAY_PRODUCTS, floors
from zeco.benchmarks.op_report import draw_times, tables
from zeco.benchmarks.peers import OTHERS, PEERS, find_peer, why_no_peer
from zeco.benchmarks.virtual_ranks import solve_on_ranks
from zeco.core.errors import ArgumentError
from zeco.testing.cases import CASES, Case, Setting

SMALL = Setting(length=70, heads=2, key_heads=2, key_dim=8, value_dim=8, states=False)
CPU = torch.device("cpu")


def spec_of(case: Case, **more: Any) -> op.OpSpec:
    given: dict[str, Any] = {
        "setting": SMALL,
        "dtype": torch.float32,
        "gates_dtype": torch.float32,
        "backend": "auto",
        "device": CPU,
        "repetitions": 2,
        "hows": (op.EAGER,),
        "peer": "auto",
        "check_tokens": 4096,
        **more,
    }
    return op.OpSpec(case, **given)


@pytest.mark.parametrize("name", CASES)
def test_every_operator_is_checked_and_timed(name: str) -> None:
    figures = op.measure_op(spec_of(CASES[name]))
    assert figures["gate"]["wrong"] == []
    assert figures["backend_used"] == "torch"
    assert [(row["pass"], row["how"]) for row in figures["rows"]] == [
        (op.FORWARD, op.EAGER),
        (op.BOTH, op.EAGER),
    ]
    assert all(row["median_ms"] > 0 and row["runs"] == 2 for row in figures["rows"])
    assert [note.partition(":")[0] for note in figures["notes"]] == ["no peer", "on a CPU"]
    assert len(list(tables(figures))) == 2


def _wrong(factor: float) -> Case:
    """An operator whose outputs are off by a factor."""
    right = CASES["gla"]

    def operator(*args: Any, **kwargs: Any) -> Any:
        o, final = right.operator(*args, **kwargs)
        return (o, final) if kwargs["backend"] == "torch" else (o * factor, final)

    return replace(right, operator=operator)


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_wrong_operator_is_not_timed(factor: float) -> None:
    figures = op.measure_op(spec_of(_wrong(factor)))
    assert "o is off by" in figures["refused"]
    assert "rows" not in figures
    assert len(list(tables(figures))) == 1


def test_a_wrong_reference_is_found() -> None:
    right = CASES["gla"]
    wrong = replace(right, oracle=lambda *a, **kw: right.oracle(*a, scale=1.0, **kw))
    figures = op.measure_op(spec_of(wrong))
    assert "the torch form in fp64 is off the oracle in o" in figures["refused"]


@pytest.mark.parametrize("name", ["gla", "simple_gla", "ssd", "rwkv6", "kda"])
def test_virtual_ranks_compute_what_one_rank_does(name: str) -> None:
    dtype = torch.float64
    problem = op_gate.make_problem(CASES[name], SMALL, CPU, dtype, dtype)
    joined, ranks = solve_on_ranks(problem, 3, backend="torch")
    errors = op_gate.norm_errors(joined, op_gate.exact_results(problem))
    assert max(errors.values()) < 1e-10
    assert [rank.is_first() for rank in ranks] == [True, False, False]


def test_what_a_middle_rank_adds() -> None:
    figures = op.measure_op(spec_of(CASES["gla"], num_ranks=3))
    added = figures["added_by_a_middle_rank"]
    assert set(added["added_share"]) == {"forward, eager", "forward_backward, eager"}
    assert {row["name"] for row in added["rows"]} == {op.PLAIN, op.RANK}
    assert max(figures["gate"]["errors"]["virtual ranks"].values()) < 1e-5
    assert len(list(tables(figures))) == 3


def test_gates_keep_their_own_dtype() -> None:
    problem = op_gate.make_problem(CASES["gla"], SMALL, CPU, torch.bfloat16, torch.float32)
    dtypes = {name: x.dtype for name, x in problem.inputs.items()}
    assert dtypes.pop("g") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    g = problem.inputs["g"]
    assert not torch.equal(g, g.bfloat16().float())


@pytest.mark.parametrize(
    "more, message",
    [
        ({"hows": (op.GRAPH,)}, "CUDA graphs need a CUDA device"),
        ({"num_ranks": 2}, "2 virtual ranks have no middle one"),
        ({"peer": "fla"}, "--peer fla: .* need a CUDA device"),
        ({"backend": "triton"}, "backend 'triton' can't run here"),
    ],
)
def test_what_cannot_be_measured_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError if "backend" not in more else Exception, match=message):
        op.measure_op(spec_of(CASES["gla"], **more))


def test_floors_count_bytes_and_products() -> None:
    x = torch.zeros(1, 64, 2, 16, dtype=torch.bfloat16)
    found = floors("gla", [x, x], x, 16, copy_bytes_per_s=1e9, matmul_flops_per_s=1e9)
    assert found["forward"]["bytes"] == 3 * x.numel() * 2
    assert found["forward_backward"]["bytes"] == 8 * x.numel() * 2
    # Two heads of one chunk: two products with 64x64, two with 16x16 outputs.
    assert found["forward"]["flops"] == 2 * (2 * 2 * 64 * 64 * 16 + 2 * 2 * 64 * 16 * 16)
    assert found["forward_backward"]["flops"] == 3 * found["forward"]["flops"]
    assert found["forward"]["floor_ms"] == found["forward"]["flops_ms"]
    delta = floors("kda", [x, x], x, 16, copy_bytes_per_s=1e9, matmul_flops_per_s=1e9)
    assert delta["forward"]["flops"] > found["forward"]["flops"]
    assert len(DECAY_PRODUCTS) == 4


def test_runs_take_turns() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    times = time_in_turn(runs, CPU, 2)
    assert order[-4:] == ["b", "a", "a", "b"]
    assert {name: len(t) for name, t in times.items()} == {"a": 2, "b": 2}


def test_unknown_devices() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'cuda'"):
        pick_device("cudda")
    assert pick_device("cpu") == CPU


def test_peers() -> None:
    assert PEERS.keys() | OTHERS.keys() <= CASES.keys()
    assert find_peer("ssd") is OTHERS["ssd"]
    assert "mamba_ssm need a CUDA device" in str(why_no_peer("ssd", CPU, grouped=True))
    assert "there is no peer" in str(why_no_peer("lightning_attention", CPU, grouped=False))
    cuda = torch.device("cuda")
    assert why_no_peer("gla", cuda, grouped=False) is None
    assert "grouped" in str(why_no_peer("gla", cuda, grouped=True))


def test_a_chart_of_times(tmp_path: Path) -> None:
    figures = op.measure_op(spec_of(CASES["retention"]))
    path = tmp_path / "new" / "times.png"
    draw_times(path, figures)
    assert path.read_bytes().startswith(b"\x89PNG")
