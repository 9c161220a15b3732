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
    from zeco.kernels import decay, decay_gradients, decay_plan, scalar, scalar_gradients
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
    for module in (decay, decay_gradients, scalar, scalar_gradients):
        monkeypatch.setattr(module, "launch", compile_instead)
    monkeypatch.setattr(decay_plan, "_multiprocessors", lambda device: MULTIPROCESSORS)
    decay_plan._plan.cache_clear()
    yield names
    decay_plan._plan.cache_clear()


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


def long(name, case):
    return pytest.param(case, id=name, marks=pytest.mark.long)


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
        from zeco.kernels.decay_plan import chunk_of, make_plan

        B, T, H, K, V = 1, case.T, 4, case.K, case.V
        shared = H // case.group
        self.q, self.k = (empty(B, T, shared, K, dtype=case.dtype) for _ in range(2))
        self.v, self.d_o = (empty(B, T, H, V, dtype=case.dtype) for _ in range(2))
        size = (B, T, shared, K) if diagonal else (B, T, H)
        self.g = None if case.gates is None else empty(*size, dtype=case.gates)
        last = -(-T // chunk_of(case.dtype))
        ranges = ((0, 1), (1, 40), (40, last)) if case.documents else None
        self.plan = make_plan(self.q, self.v, self.g, ranges=ranges)
        self.entering = empty(B, H, K, V) if case.continues else None
        self.inner = empty(2, B, H, K, V) if case.documents else None


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(128, 128), id="gla"),
        long("gates in bf16", Case(64, 64, gates=torch.bfloat16, documents=True)),
        # V = 512, of which each head's two halves share its queries, keys and gates.
        long("wide", Case(256, 256, group=2)),
        long("four slices", Case(256, 256, group=4)),
        long("fp16", Case(128, 128, torch.float16, group=2, continues=False)),
        long("fp32", Case(128, 128, torch.float32, group=2)),
        long("one chunk", Case(64, 64, T=64)),
    ],
)
def test_kernels_of_diagonal_decays_compile(case, launched):
    from zeco.kernels import decay, decay_gradients

    call = Call(case, diagonal=True)
    plan, q, k, v, g, d_o = call.plan, call.q, call.k, call.v, call.g, call.d_o
    states, chunks = decay.state_pass(plan, k, v, g, call.inner)
    known = {"scale": 0.1, "states": states, "chunks": chunks, "entering": call.entering}
    decay.output_pass(plan, q, k, v, g, **known)
    assert launched == [
        "state_fwd_kernel",
        "segment_scan_kernel",
        "output_walk_kernel",
        "strong_pairs_fwd_kernel",
    ]
    launched.clear()
    adjoints, _ = decay.adjoint_state_pass(plan, q, d_o, g, call.inner, scale=0.1)
    queries = decay_gradients.query_pass(plan, q, k, v, d_o, **known)
    known |= {"adjoints": adjoints, "d_leaving": call.entering, "queries": queries}
    decay_gradients.gradient_passes(plan, q, k, v, g, d_o, **known)
    assert launched == [
        "state_fwd_kernel",
        "segment_scan_kernel",
        "gradient_walk_kernel",
        "output_walk_kernel",
        "gradient_walk_kernel",
        "strong_pairs_bwd_kernel",
        "gate_gradient_kernel",
    ]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(128, 64, group=4, weighted=True), id="steps, skips and shared keys"),
        long("one decay a head", Case(128, 128)),
        long("wide", Case(256, 128, group=4, weighted=True)),
        long("no gates", Case(64, 64, gates=None, group=2, documents=True)),
        long("fp16", Case(128, 128, torch.float16, continues=False)),
        long("fp32", Case(128, 128, torch.float32, group=2, weighted=True)),
        long("one chunk", Case(64, 64, weighted=True, T=64)),
    ],
)
def test_kernels_of_one_decay_a_head_compile(case, launched):
    from zeco.kernels import scalar, scalar_gradients

    call = Call(case, diagonal=False)
    plan, q, k, v, g, d_o = call.plan, call.q, call.k, call.v, call.g, call.d_o
    weights = (g, g) if case.weighted else (None, None)
    sums = scalar.chunk_sums(plan, g, *weights)
    states = scalar.state_pass(plan, k, v, sums, call.inner)
    known = {"scale": 0.1, "states": states, "entering": call.entering}
    scalar.output_pass(plan, q, k, v, sums, **known)
    gated = g is not None
    assert launched == [
        *["scalar_sums_kernel"] * gated,
        "scalar_state_fwd_kernel",
        "segment_scan_kernel",
        "scalar_output_walk_kernel",
    ]
    launched.clear()
    known["sums"] = sums
    adjoints = scalar.adjoint_state_pass(plan, q, d_o, sums, call.inner, scale=0.1)
    queries = scalar_gradients.query_pass(plan, q, k, v, d_o, **known)
    known |= {"adjoints": adjoints, "d_leaving": call.entering, "queries": queries}
    step, skip = weights
    scalar_gradients.gradient_passes(plan, q, k, v, g, d_o, step=step, skip=skip, **known)
    assert launched == [
        "scalar_state_fwd_kernel",
        "segment_scan_kernel",
        "scalar_gradient_walk_kernel",
        "scalar_output_walk_kernel",
        "scalar_gradient_walk_kernel",
        *["scalar_gate_gradient_kernel"] * gated,
    ]


def test_too_much_shared_memory_is_found(launched):
    from zeco.kernels import decay

    call = Call(Case(128, 128), diagonal=True)
    plan = replace(call.plan, state_stages=5)
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
