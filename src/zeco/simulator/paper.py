"""The paper's cluster: link parameters fitted to its rows up to 64 GPUs, its larger rows predicted.

What is fitted, by least squares in seconds on rows of at most 64 GPUs:

| figure | form | fitted |
| --- | --- | --- |
| All-Scan | chain, best number of blocks, a hop holds its sender | latency, bandwidth |
| all-gather | recursive doubling: log2(P) latencies, P - 1 maps | latency, bandwidth |
| operator | fixed + number * collective (LASP-1: fixed + number of hops * pass) | both numbers |
| step without SP | fixed + log2(P) * growth | both numbers |
| step of a method | step without SP + fixed + 48 collectives | fixed |

All-Scan and all-gather have link parameters of their own: the paper's chain uses point-to-point
messages, its all-gather a library's collective over all links of a node. The paper tells neither its
interconnect nor its dtype; assumed are states of fp32, and for its 1B model 24 layers with one
scan forward and one backward each, whose state weighs 2 MiB as in the collective rows.
The forms are textbook ones without free constants; they were chosen in knowledge of all published rows,
the numbers in them were not fitted to the rows that are predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from zeco.core.costs import Plan, choose_plan, load_of, predict_s
from zeco.core.fabric import Fabric, Load, StateShape
from zeco.simulator.published import Series, series

FIT_UPTO = 64
"""The most GPUs of a row that is fitted to."""

COLLECTIVE_SHAPE: StateShape = (1, 32, 128, 128)
OPERATOR_SHAPE: StateShape = (1, 16, 128, 128)
KIND, ELEMENT_SIZE = "diagonal", 4
MODEL_LAYERS = 24
SCANS_A_STEP = 2 * MODEL_LAYERS
TOKENS_A_GPU = 32 * 1024
MAX_BLOCKS = 128


@dataclass(frozen=True)
class Row:
    """One published figure and what the simulator says.

    Attributes:
        figure: what was measured.
        gpus: on how many.
        published: the paper's figure.
        predicted: the simulator's.
        unit: of both.
        fitted: whether the simulator's parameters were fitted to this row.
    """

    figure: str
    gpus: int
    published: float
    predicted: float
    unit: str
    fitted: bool

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.published - 1


def paper_load(shape: StateShape = COLLECTIVE_SHAPE) -> Load:
    """Return what a state of the paper weighs."""
    return load_of(shape, KIND, ELEMENT_SIZE)


@lru_cache(maxsize=1)
def fit_fabric() -> Fabric:
    """Return the paper's links, from its All-Scan and all-gather rows up to 64 GPUs."""
    load = paper_load()
    scan = series("collective_ms", "all_scan").upto(FIT_UPTO)
    gather = series("collective_ms", "all_gather").upto(FIT_UPTO)
    latency_s, whole_s = _fit_chain(scan)
    rounds = [math.ceil(math.log2(g)) for g in gather.gpus]
    others = [g - 1 for g in gather.gpus]
    round_s, map_s = _least_squares([rounds, others], [v * 1e-3 for v in gather.values])
    return Fabric(
        latency_s,
        load.state_bytes / whole_s,
        overhead_s=0.0,
        # What compositions take is in the fitted hop.
        combine_bytes_per_s=math.inf,
        blocking_sends=True,
        grouped_calls=True,
        collective_gather=True,
        gather_latency_s=round_s,
        gather_bandwidth_bytes_per_s=(load.state_bytes + load.parameter_bytes) / map_s,
    )


def chain_s(gpus: int, latency_s: float, whole_s: float) -> float:
    """Return the time of a chain whose hops hold their senders, with the best number of blocks.

    Args:
        gpus: P.
        latency_s: of a hop.
        whole_s: that a whole state takes through a link.
    """
    counts = [1 << i for i in range(MAX_BLOCKS.bit_length())]
    return min((gpus + blocks - 2) * (latency_s + whole_s / blocks) for blocks in counts)


def _fit_chain(row: Series) -> tuple[float, float]:
    """Search latency and transfer time on ever finer grids; the best block counts make steps."""
    best = (5e-6, 1e-4)
    span = 20.0

    def misfit(parameters: tuple[float, float]) -> float:
        pairs = zip(row.gpus, row.values, strict=True)
        return sum((chain_s(g, *parameters) - v * 1e-3) ** 2 for g, v in pairs)

    while span > 1 + 1e-5:
        factors = [span ** (i / 8) for i in range(-8, 9)]
        best = min(((best[0] * a, best[1] * b) for a in factors for b in factors), key=misfit)
        span = math.sqrt(span)
    return best


def _least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    matrix = np.array(columns, dtype=float).T
    found = np.linalg.lstsq(matrix, np.array(values), rcond=None)[0]
    return [float(x) for x in found]


@lru_cache(maxsize=64)
def all_scan_s(gpus: int, shape: StateShape = COLLECTIVE_SHAPE) -> float:
    """Return the predicted time of the paper's All-Scan."""
    fabric = fit_fabric()
    plan = choose_plan(gpus, shape, KIND, ELEMENT_SIZE, algorithm="chain", fabric=fabric)
    return predict_s(plan, gpus, paper_load(shape), fabric)


@lru_cache(maxsize=64)
def all_gather_s(gpus: int, shape: StateShape = COLLECTIVE_SHAPE) -> float:
    """Return the predicted time of the paper's all-gather."""
    return predict_s(Plan("gather", 1), gpus, paper_load(shape), fit_fabric())


@lru_cache(maxsize=1)
def step_without_sp() -> Callable[[int], float]:
    """Return the step time of the 1B model without sequence parallelism, by the number of GPUs."""
    row = series("throughput_tokens_per_s_per_gpu", "no_sp").upto(FIT_UPTO)
    columns = [[1.0] * len(row.gpus), [math.log2(g) for g in row.gpus]]
    fixed, growth = _least_squares(columns, [TOKENS_A_GPU / v for v in row.values])
    return lambda gpus: fixed + growth * math.log2(gpus)


def extra_step_s(method: str) -> float:
    """Return what a method adds to every step beside its collectives, whatever the number of GPUs."""
    row = series("throughput_tokens_per_s_per_gpu", method).upto(FIT_UPTO)
    left = [
        TOKENS_A_GPU / v - step_without_sp()(g) - SCANS_A_STEP * _COLLECTIVE[method](g)
        for g, v in zip(row.gpus, row.values, strict=True)
    ]
    return sum(left) / len(left)


_COLLECTIVE: dict[str, Callable[[int], float]] = {"zeco": all_scan_s, "lasp2": all_gather_s}


def _operator(method: str) -> Callable[[int], float]:
    row = series("operator_ms", method).upto(FIT_UPTO)

    def collective(gpus: int) -> float:
        if method == "zeco":
            return all_scan_s(gpus, OPERATOR_SHAPE)
        if method == "lasp2":
            return all_gather_s(gpus, OPERATOR_SHAPE)
        return float(gpus - 1)

    columns = [[1.0] * len(row.gpus)]
    if method != "no_sp":
        columns.append([collective(g) for g in row.gpus])
    fitted = _least_squares(columns, [v * 1e-3 for v in row.values])
    return lambda gpus: fitted[0] + (fitted[1] * collective(gpus) if len(fitted) > 1 else 0.0)


def _throughput(method: str) -> Callable[[int], float]:
    step_s = step_without_sp()
    if method == "no_sp":
        return lambda gpus: TOKENS_A_GPU / step_s(gpus)
    extra_s, collective = extra_step_s(method), _COLLECTIVE[method]
    return lambda gpus: TOKENS_A_GPU / (step_s(gpus) + extra_s + SCANS_A_STEP * collective(gpus))


def predict_paper() -> list[Row]:
    """Return every published figure with what is predicted for it."""
    rows: list[Row] = []

    def add(
        figure: str, published: Series, predict: Callable[[int], float], scale: float, unit: str
    ) -> None:
        rows.extend(
            Row(figure, g, v, predict(g) * scale, unit, g <= FIT_UPTO)
            for g, v in zip(published.gpus, published.values, strict=True)
        )

    add("All-Scan", series("collective_ms", "all_scan"), all_scan_s, 1e3, "ms")
    add("all-gather", series("collective_ms", "all_gather"), all_gather_s, 1e3, "ms")
    for method in ("zeco", "lasp2", "lasp1", "no_sp"):
        add(f"operator, {method}", series("operator_ms", method), _operator(method), 1e3, "ms")
    table = "throughput_tokens_per_s_per_gpu"
    for method in ("zeco", "lasp2", "no_sp"):
        published = series(table, method)
        add(f"throughput, {method}", published, _throughput(method), 1.0, "tokens/s/GPU")
    return rows


def fitted_parameters() -> dict[str, float]:
    """Return the fitted numbers, units in their names."""
    fabric, step_s = fit_fabric(), step_without_sp()
    return {
        "scan_hop_latency_us": fabric.latency_s * 1e6,
        "scan_bandwidth_GB_per_s": fabric.bandwidth_bytes_per_s / 1e9,
        "gather_round_latency_us": (fabric.gather_latency_s or 0.0) * 1e6,
        "gather_bandwidth_GB_per_s": (fabric.gather_bandwidth_bytes_per_s or 0.0) / 1e9,
        "step_without_sp_1_gpu_ms": step_s(1) * 1e3,
        "step_growth_per_doubling_ms": (step_s(2) - step_s(1)) * 1e3,
        "extra_step_zeco_ms": extra_step_s("zeco") * 1e3,
        "extra_step_lasp2_ms": extra_step_s("lasp2") * 1e3,
    }
