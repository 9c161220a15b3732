"""``zeco bench op``: one operator on one device, checked and then timed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console

from zeco.benchmarks.device import pick_device
from zeco.benchmarks.fla_settings import compiled_side_by_side, one_setting_each
from zeco.benchmarks.op import EAGER, GRAPH, OpSpec, measure_op
from zeco.benchmarks.op_gate import GATES
from zeco.benchmarks.op_report import draw_times, tables
from zeco.core.errors import ArgumentError, unknown_name
from zeco.testing.cases import CASES, Case, Setting

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class OpArguments:
    """Check an operator against fp64, then time it beside Flash Linear Attention and its floors.

    Attributes:
        op: the public operator, such as gla.
        batch: B.
        tokens: T.
        heads: value heads H.
        key_heads: heads of queries and keys; left out, as many as value heads.
        key_dim: K.
        value_dim: V.
        dtype: of the inputs: bfloat16, float16, float32 or float64.
        gates_dtype: of the inputs that decays are made of; left out, float32 (float64 for float64
            inputs).
        backend: of our operator: auto, torch, triton or fla.
        strong: whether every token decays by exp(-20) or more.
        lower_bound: of the decays, which are kept above it; for rwkv7, that may then take chunks of
            another length.
        repetitions: of every time, of which the median is told.
        device: auto, cuda or cpu.
        timing: eager calls, replays of CUDA graphs, or both; auto is both on CUDA and eager on a CPU.
        passes: forward alone, or both: forward, and forward with backward.
        peer: fla for Flash Linear Attention's operator, mamba_ssm for the one that ssd has there, with
            default settings; none for none. auto takes it where it runs, and says where it doesn't.
        fla_tuning: default, where the settings of a peer's kernels are compiled side by side and its
            autotuning takes its choice of all; or off: one for each of FLA's, whoever calls them.
        check_tokens: on which results are checked before anything is timed.
        one_gpu_ranks: P virtual ranks on this device, for the cost that a middle one adds.
        out: JSON file for the figures; a chart goes beside it, as PNG.
    """

    op: Annotated[str, tyro.conf.Positional]
    batch: int = 1
    tokens: int = 16384
    heads: int = 16
    key_heads: int | None = None
    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    gates_dtype: str | None = None
    backend: str = "auto"
    strong: bool = False
    lower_bound: float | None = None
    repetitions: int = 30
    device: str = "auto"
    timing: Literal["auto", "both", "eager", "graph"] = "auto"
    passes: Literal["both", "forward"] = "both"
    peer: Literal["auto", "fla", "mamba_ssm", "none"] = "auto"
    fla_tuning: Literal["default", "off"] = "default"
    check_tokens: int = 4096
    one_gpu_ranks: int | None = None
    out: Path | None = None


def run_op(given: OpArguments) -> dict[str, Any]:
    """Measure, print the tables, draw the chart; return the figures.

    Raises:
        ArgumentError: an argument that doesn't exist, doesn't fit the operator or the device.
    """
    spec = make_spec(given)
    with one_setting_each() if given.fla_tuning == "off" else compiled_side_by_side():
        figures = measure_op(spec)
    figures["fla_tuning"] = given.fla_tuning
    if given.fla_tuning == "off":
        figures["notes"].append("FLA's kernels untuned: one setting each")
    console = Console()
    for table in tables(figures):
        console.print(table)
    for note in figures["notes"]:
        console.print(note, markup=False, highlight=False)
    if "refused" in figures:
        console.print(f"not timed: {figures['refused']}", markup=False, highlight=False)
    elif given.out is not None:
        draw_times(given.out.with_suffix(".png"), figures)
    return figures


def make_spec(given: OpArguments) -> OpSpec:
    """Turn the arguments into what is measured."""
    sizes = ("batch", "tokens", "heads", "key_dim", "value_dim", "check_tokens")
    for name in sizes:
        if getattr(given, name) < 1:
            option = name.replace("_", "-")
            raise ArgumentError(f"--{option} {getattr(given, name)}: give at least 1")
    if given.op not in CASES:
        raise ArgumentError(unknown_name("operator", given.op, CASES))
    case = CASES[given.op]
    device = pick_device(given.device)
    dtype = _dtype("dtype", given.dtype)
    timing = given.timing
    if timing == "auto":
        timing = "both" if device.type == "cuda" else "eager"
    setting = Setting(
        given.op,
        batch=given.batch,
        length=given.tokens,
        heads=given.heads,
        key_heads=given.heads if given.key_heads is None else given.key_heads,
        key_dim=given.key_dim,
        value_dim=given.value_dim,
        decay="strong" if given.strong else "mild",
        states=False,
    )
    names = case.make(Setting(heads=1, key_heads=1, length=1), torch.Generator()).keys()
    if not names & GATES:
        for option, value in (("gates-dtype", given.gates_dtype), ("strong", given.strong)):
            if value:
                raise ArgumentError(f"--{option}: {given.op} has no decay among its inputs")
    return OpSpec(
        case=case if given.lower_bound is None else _bounded(case, given.lower_bound, given.strong),
        setting=setting,
        dtype=dtype,
        gates_dtype=_gates_dtype(given, dtype),
        backend=given.backend,
        device=device,
        repetitions=given.repetitions,
        hows=(EAGER, GRAPH) if timing == "both" else (timing,),
        peer=given.peer,
        check_tokens=given.check_tokens,
        num_ranks=given.one_gpu_ranks,
        forward_only="that is what was asked for" if given.passes == "forward" else None,
    )


def _bounded(case: Case, lower_bound: float, strong: bool) -> Case:
    """Return RWKV-7 with decays kept above a bound, of which its operator is told."""
    option = f"--lower-bound {lower_bound}"
    if case.name != "rwkv7":
        raise ArgumentError(f"{option}: {case.name} takes none; leave it out")
    if strong or not lower_bound < 0:
        raise ArgumentError(f"{option}: give one below 0, and no --strong beside it")

    def make(setting: Setting, generator: torch.Generator) -> dict[str, torch.Tensor]:
        inputs = case.make(setting, generator)
        return {**inputs, "w": inputs["w"].clamp_min(lower_bound)}

    def oracle(*, lower_bound: float, **given: Any) -> Any:
        del lower_bound  # it changes no number
        return case.oracle(**given)

    return replace(case, make=make, oracle=oracle, options=(("lower_bound", lower_bound),))


def _dtype(option: str, name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ArgumentError(f"--{option}: " + unknown_name("dtype", name, DTYPES))
    return DTYPES[name]


def _gates_dtype(given: OpArguments, dtype: torch.dtype) -> torch.dtype:
    if given.gates_dtype is not None:
        return _dtype("gates-dtype", given.gates_dtype)
    return torch.float64 if dtype == torch.float64 else torch.float32
