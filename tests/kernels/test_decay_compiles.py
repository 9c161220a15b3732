"""The decay kernels, compiled for Hopper without a GPU.

Triton's interpreter lets pass what its compiler or a GPU refuses: a name whose type changes in a loop,
more shared memory than there is. Here the launchers are given tensors without memory, and what they
launch is compiled in place of being started.
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass, replace

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the package triton is missing; install zeco-sp[gpu]",
)

MULTIPROCESSORS = 132  # of an H200


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return where compiled kernels are kept, so that what is launched again isn't compiled again.

    It starts empty: nothing stale hides a failure.
    """
    return tmp_path_factory.mktemp("triton")


@pytest.fixture
def launched(cache, monkeypatch, compile_for_hopper):
    """Compile kernels in place of launching them; return the list that their names are added to."""
    from zeco.kernels.decay import plan
    from zeco.kernels.launch import launch

    names: list[str] = []
    parameters = inspect.signature(launch)

    def compile_instead(*given, **named):
        call = parameters.bind(*given, **named)
        call.apply_defaults()
        found = call.arguments
        options = {name: found[name] for name in ("num_warps", "num_stages")}
        compile_for_hopper(found["kernel"], found["arguments"], found["constants"] | options)
        names.append(found["kernel"].__name__)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    launchers = ("decay.passes", "decay.gradients", "scalar.passes", "scalar.gradients")
    for module in (*launchers, "chunkwise.passes", "chunkwise.rows"):
        monkeypatch.setattr(f"zeco.kernels.{module}.launch", compile_instead)
    monkeypatch.setattr(plan, "_multiprocessors", lambda device: MULTIPROCESSORS)
    plan._plan.cache_clear()
    yield names
    plan._plan.cache_clear()


@dataclass(frozen=True)
class Case:
    """What kernels are compiled for.

    Attributes:
        K, V: dims.
        dtype: of q, k and v.
        gates: dtype of the gates; None without.
        group: heads of v that share one of q, k and diagonal gates.
        weighted: whether tokens have steps and skips.
        T: tokens; with those of one chunk, numbers are 1 that Triton then makes constants.
        documents: whether several are packed, and start from given states.
        continues: whether a state enters, and one that leaves has a gradient.
        fixed: whether the gates have no gradient.
    """

    K: int
    V: int
    dtype: torch.dtype = torch.bfloat16
    gates: torch.dtype | None = torch.float32
    group: int = 1
    weighted: bool = False
    T: int = 16384
    documents: bool = False
    continues: bool = True
    fixed: bool = False


def long(name, *values):
    return pytest.param(*values, id=name, marks=pytest.mark.long)


def empty(*size, dtype=torch.float32):
    return torch.empty(size, dtype=dtype, device="meta")


class Call:
    """The tensors of a call, and its plan.

    Attributes:
        q, k, v, d_o, g: inputs and the gradient of the outputs.
        plan: sizes and launch settings.
        entering: the state that enters and the gradient of the one that leaves; None for zeros.
        inner: states after breaks, or their gradients; None without documents.
    """

    def __init__(self, case: Case, *, diagonal: bool) -> None:
        from zeco.kernels.decay.plan import chunk_of, make_plan

        B, T, H, K, V = 1, case.T, 4, case.K, case.V
        shared = H // case.group
        self.q, self.k = (empty(B, T, shared, K, dtype=case.dtype) for _ in range(2))
        self.v, self.d_o = (empty(B, T, H, V, dtype=case.dtype) for _ in range(2))
        size = (B, T, shared, K) if diagonal else (B, T, H)
        self.g = None if case.gates is None else empty(*size, dtype=case.gates)
        last = -(-T // chunk_of(case.dtype, K))
        ranges = ((0, 1), (1, 40), (40, last)) if case.documents else None
        self.plan = make_plan(self.q, self.v, self.g, ranges=ranges)
        self.entering = empty(B, H, K, V) if case.continues else None
        self.inner = empty(2, B, H, K, V) if case.documents else None


DIAGONAL = (
    ["state_fwd", "segment_scan", "output_walk", "strong_pairs_fwd"],
    [
        *["state_fwd", "segment_scan", "gradient_walk", "output_walk", "gradient_walk"],
        *["strong_pairs_bwd", "gate_gradient"],
    ],
)
WIDE_DIAGONAL = (
    [
        *[
            "chunkwise_rows",
            "chunkwise_states",
            "segment_scan",
            "chunkwise_rows",
            "chunkwise_states",
            "chunkwise_output",
        ],
        "strong_pairs_fwd",
    ],
    [
        # The rows of queries are scaled for the adjoint's state pass, those of keys were.
        *[
            "chunkwise_rows",
            "chunkwise_states",
            "segment_scan",
            "chunkwise_states",
            "chunkwise_gradient",
        ],
        *[
            "chunkwise_states",
            "chunkwise_output",
            "chunkwise_gradient",
            "strong_pairs_bwd",
            "chunkwise_gate_gradient",
        ],
    ],
)
SCALAR = (
    ["scalar_state_fwd", "segment_scan", "scalar_output_walk"],
    [
        *["scalar_state_fwd", "segment_scan", "scalar_gradient_walk", "scalar_output_walk"],
        "scalar_gradient_walk",
    ],
)
WIDE_SCALAR = (
    ["chunkwise_states", "segment_scan", "chunkwise_states", "chunkwise_output"],
    [
        *["chunkwise_states", "segment_scan", "chunkwise_states", "chunkwise_gradient"],
        *["chunkwise_states", "chunkwise_output", "chunkwise_gradient"],
    ],
)


def kernels(*names):
    return [f"{name}_kernel" for name in names]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        pytest.param(Case(128, 128), DIAGONAL, id="gla"),
        long("gates in bf16", Case(64, 64, gates=torch.bfloat16, documents=True), DIAGONAL),
        # V = 512, of which each head's four slices share its queries, keys and gates.
        long("four slices", Case(128, 128, group=4), DIAGONAL),
        long("fp16", Case(128, 128, torch.float16, group=2, continues=False), DIAGONAL),
        long("fp32", Case(128, 128, torch.float32, group=2), DIAGONAL),
        long("one chunk", Case(64, 64, T=64), DIAGONAL),
        pytest.param(Case(256, 512), WIDE_DIAGONAL, id="wide"),
        long(
            "wide, gates in bf16",
            Case(192, 128, gates=torch.bfloat16, group=2, documents=True),
            WIDE_DIAGONAL,
        ),
        long("wide in fp16", Case(136, 264, torch.float16, continues=False), WIDE_DIAGONAL),
        long("one wide chunk", Case(256, 256, T=64), WIDE_DIAGONAL),
    ],
)
def test_kernels_of_diagonal_decays_compile(case, expected, launched):
    from zeco.kernels.decay import gradients as decay_gradients
    from zeco.kernels.decay import passes as decay

    call = Call(case, diagonal=True)
    plan, q, k, v, g, d_o = call.plan, call.q, call.k, call.v, call.g, call.d_o
    states, chunks = decay.state_pass(plan, k, v, g, call.inner)
    known = {"scale": 0.1, "states": states, "chunks": chunks, "entering": call.entering}
    decay.output_pass(plan, q, k, v, g, **known)
    assert launched == kernels(*expected[0])
    launched.clear()
    adjoints, _ = decay.adjoint_state_pass(plan, q, d_o, g, call.inner, scale=0.1)
    queries = decay_gradients.query_pass(plan, q, k, v, d_o, **known)
    known |= {"adjoints": adjoints, "d_leaving": call.entering, "queries": queries}
    decay_gradients.gradient_passes(plan, q, k, v, g, d_o, **known)
    assert launched == kernels(*expected[1])


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        pytest.param(
            Case(128, 64, group=4, weighted=True), SCALAR, id="steps, skips and shared keys"
        ),
        long("one decay a head", Case(128, 128), SCALAR),
        pytest.param(Case(128, 128, fixed=True), SCALAR, id="fixed decays"),
        long("no gates", Case(64, 64, gates=None, group=2, documents=True), SCALAR),
        long("fp16", Case(128, 128, torch.float16, continues=False), SCALAR),
        long("fp32", Case(128, 128, torch.float32, group=2, weighted=True), SCALAR),
        long("one chunk", Case(64, 64, weighted=True, T=64), SCALAR),
        pytest.param(Case(256, 512, group=4, weighted=True), WIDE_SCALAR, id="wide"),
        long("wide with fixed decays", Case(256, 512, fixed=True), WIDE_SCALAR),
        long("wide without gates", Case(256, 512, gates=None, documents=True), WIDE_SCALAR),
        long("wide in fp16", Case(136, 72, torch.float16, continues=False), WIDE_SCALAR),
    ],
)
def test_kernels_of_one_decay_a_head_compile(case, expected, launched):
    from zeco.kernels.scalar import gradients as scalar_gradients
    from zeco.kernels.scalar import passes as scalar

    call = Call(case, diagonal=False)
    plan, q, k, v, g, d_o = call.plan, call.q, call.k, call.v, call.g, call.d_o
    weights = (g, g) if case.weighted else (None, None)
    sums = scalar.chunk_sums(plan, g, *weights)
    states = scalar.state_pass(plan, k, v, sums, call.inner)
    known = {"scale": 0.1, "states": states, "entering": call.entering}
    scalar.output_pass(plan, q, k, v, sums, **known)
    gated = g is not None
    assert launched == kernels(*["scalar_sums"] * gated, *expected[0])
    launched.clear()
    known["sums"] = sums
    adjoints = scalar.adjoint_state_pass(plan, q, d_o, sums, call.inner, scale=0.1)
    wanted = gated and not case.fixed
    queries = scalar_gradients.query_pass(plan, q, k, v, d_o, **known, pulls=wanted)
    known |= {"adjoints": adjoints, "d_leaving": call.entering, "queries": queries}
    g, step, skip = (g, *weights) if wanted else (None, None, None)
    scalar_gradients.gradient_passes(plan, q, k, v, g, d_o, step=step, skip=skip, **known)
    assert launched == kernels(*expected[1], *["scalar_gate_gradient"] * wanted)


def test_too_much_shared_memory_is_found(launched):
    from zeco.kernels.decay import passes as decay

    call = Call(Case(128, 128), diagonal=True)
    plan = replace(call.plan, cuts=replace(call.plan.cuts, state_stages=5))
    with pytest.raises(AssertionError, match=r"state_fwd_kernel with \{'K': 128.*shared memory"):
        decay.state_pass(plan, call.k, call.v, call.g)


def test_a_name_that_changes_its_type_is_found(cache, monkeypatch, compile_for_hopper):
    import triton

    @triton.jit
    def changing_kernel(count, START):
        total = START
        for _ in range(count):
            total = total + 0.5

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    compile_for_hopper(changing_kernel, (3,), {"START": 0.0})
    with pytest.raises(triton.CompilationError, match=r"changing_kernel with \{'START': 0\}"):
        compile_for_hopper(changing_kernel, (3,), {"START": 0})
