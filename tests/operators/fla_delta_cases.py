"""Cases of test_fla_delta.py: run with TRITON_INTERPRET=1, one argument, the operator."""

from __future__ import annotations

import builtins
import importlib
import sys

import numpy as np
import pytest
import torch
import triton.language as tl
from torch.nn import functional as F
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

from zeco.core.documents import local_pieces, whole
from zeco.core.errors import BackendError
from zeco.kernels.delta import run_maps as delta_run_maps
from zeco.kernels.delta.maps import (
    adjoints_through,
    apply_maps,
    compose_adjoints,
    compose_maps,
    states_through,
)
from zeco.operators.delta.call import DeltaRuleOperator
from zeco.operators.fla import check as fla_check
from zeco.operators.fla import runs as fla_runs
from zeco.operators.fla import segment as fla_delta
from zeco.operators.fla.dplr_passes import DplrPasses, dplr_passes
from zeco.operators.fla.passes import Passes
from zeco.operators.rwkv7 import RWKV7Operator

MODULES = (
    "fla.ops.common.chunk_delta_h",
    "fla.ops.common.chunk_o",
    "fla.ops.gated_delta_rule.chunk",
    "fla.ops.generalized_delta_rule.dplr.chunk",
    "fla.ops.gla.chunk",
    "fla.ops.kda.chunk",
)


def let_numpy_index():
    """Let the interpreter's scalars, arrays of one number, bound loops."""
    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_index


def tensors(*bounds):
    """Count like ``range``, in tensors: FLA's kernels cast what they count with."""
    for i in builtins.range(*(b.__index__() for b in bounds)):
        handle = interpreter.TensorHandle(np.array([i], np.int32), tl.int32)
        yield tl.core.tensor(handle, tl.int32)


def interpret_fla():
    """Make FLA's kernels run on a CPU, without timing their settings."""
    for name in MODULES:
        importlib.import_module(name)
    dplr = "fla.ops.generalized_delta_rule.dplr"
    for name in ("fla.ops.common.chunk_delta_h", f"{dplr}.chunk_h_fwd", f"{dplr}.chunk_h_bwd"):
        sys.modules[name].range = tensors
    for name in ("chunk_A_fwd", "chunk_A_bwd"):  # an imported gather isn't interpreted
        sys.modules[f"{dplr}.{name}"].IS_GATHER_SUPPORTED = False
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for x in list(vars(module).values()):
                while x is not None and not isinstance(x, Autotuner):
                    x = getattr(x, "fn", None) if hasattr(x, "run") else None
                if x is not None:
                    x.configs = [min(x.configs, key=width)]


def width(config):
    return sum(x for x in config.kwargs.values() if isinstance(x, int))


def relative(found, expected):
    return float((found.double() - expected).norm() / (expected.norm() + 1e-30))


def make(name, B, T, H, K, V, decay=0.3):
    torch.manual_seed(0)
    q, k = torch.randn(B, T, H, K), F.normalize(torch.randn(B, T, H, K), dim=-1)
    v, beta = torch.randn(B, T, H, V), torch.rand(B, T, H)
    g = -decay * torch.rand(B, T, H, K)
    if name == "rwkv7":
        a = F.normalize(torch.randn(B, T, H, K), dim=-1)
        return q, g, k, v, -a, a * torch.rand(B, T, H, K)
    gate = {"delta_rule": None, "gated_delta_rule": g[..., 0].contiguous(), "kda": g}[name]
    return q, k, v, gate, beta


def make_operator(name, backend, lower_bound=None):
    if name == "rwkv7":
        return RWKV7Operator(0.4, backend, lower_bound)
    return DeltaRuleOperator(name, 0.4, backend)


def run(operator, inputs, pieces, initials, entering, d_o, d_finals):
    """Go through the contract as an exchange would, and through the plain pass."""
    call = operator.segment(inputs, pieces)
    own = call.summarize(initials)
    o, finals = call.output(entering, initials)
    back = operator.segment(inputs, pieces)
    back.recall(call.keep())
    adjoint = back.adjoint(d_o, d_finals)
    carried = back.transition().transpose()(d_finals[-1])
    back.replay(entering, initials)
    found = back.backward(d_o, d_finals)
    plain = operator.segment(inputs, pieces)
    plain.replay(entering, initials)
    again = plain.backward(d_o, d_finals)
    gradients = [found.entering, found.initials, *found.inputs]
    plainly = [again.entering, again.initials, *again.inputs]
    return [own.update, own(entering), o, finals, adjoint, carried, *gradients, *plainly]


def check(name, B, T, H, pieces, *, decay=0.3, given=True, uncut=1000, lower_bound=None):
    """``uncut``: up to how many chunks the plain pass goes uncut; the one with maps is always cut."""
    K, V = 16, 32
    fla_delta._UNCUT_CHUNKS = uncut
    inputs = make(name, B, T, H, K, V, decay)
    states = torch.randn(1 + len(pieces.documents), B, H, K, V)
    initials = torch.randn(len(pieces.fresh), B, H, K, V) if pieces.fresh and given else None
    tensors = (initials, states[0], torch.randn(B, T, H, V), states[1:])
    wide = tuple(None if x is None else x.double() for x in inputs)
    expected = run(
        make_operator(name, "torch"),
        wide,
        pieces,
        *(None if x is None else x.double() for x in tensors),
    )
    found = run(make_operator(name, "fla", lower_bound), inputs, pieces, *tensors)
    # FLA sums gates from a chunk's start, in fp32: -2,000 there leaves 1e-4 of exp(g). For bounded
    # gates it inverts in fp16.
    bound = 1e-5 if decay < 1 else 1e-4
    if lower_bound is not None:
        bound = 2e-3
    for place, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert (x is None) == (y is None), place
        if x is not None and y is not None:
            assert x.shape == y.shape, place
            assert x.dtype == torch.float32
            assert relative(x, y) < bound, (name, pieces, place, relative(x, y))


def segments(name):
    """The segment agrees with the torch segment through the whole contract."""
    check(name, 1, 30, 1, local_pieces([0, 3, 3, 60], 2, 32))
    check(name, 1, 0, 2, whole(0))
    check(name, 2, 0, 1, whole(0))
    check(name, 1, 70, 1, whole(70))
    if name in ("gated_delta_rule", "rwkv7"):
        check(name, 1, 130, 1, whole(130), uncut=1)
        check(name, 2, 70, 1, whole(70))
        check(name, 1, 150, 1, local_pieces([0, 140, 141, 141, 220], 10, 160))
        check(name, 1, 70, 1, local_pieces([0, 70], 0, 70), given=False, decay=40.0)
    if name == "rwkv7":
        bounded_decays_get_longer_chunks()
        check(name, 1, 70, 1, whole(70), lower_bound=-0.3)
        check(name, 1, 150, 1, local_pieces([0, 140, 141, 141, 220], 10, 160), lower_bound=-0.3)


def forgetting(name):
    """Once a transition is zero neither it nor the walk back goes on, and nothing is missed."""
    Passes.PROGRAMS = DplrPasses.PROGRAMS = delta_run_maps.LOOK = 1
    T = 130 if name == "rwkv7" else 200
    check(name, 1, T, 1, whole(T), decay=8.0)
    call = make_operator(name, "fla").segment(make(name, 1, T, 1, 16, 32, 8.0), whole(T))
    call.summarize()
    assert 1 <= call._passes.reach.max() < -(-T // call.kind.CHUNK)


def chains():
    """States, adjoints and maps through maps; more than 128 channels lie in two blocks."""
    for B, r, H, K, V in ((2, 3, 2, 16, 40), (1, 2, 1, 144, 16)):
        maps, start = torch.randn(B * r, H, K, V + K) / K**0.5, torch.randn(B, H, K, V)
        own = torch.randn(B * r, H, K, V)
        wide = maps.double().unflatten(0, (B, r))
        U, M = wide[..., :V], wide[..., V:]
        total = torch.eye(K).double().expand(B, H, K, K)
        state, d_state, update = start.double(), start.double(), torch.zeros(B, H, K, V).double()
        states, d_states = [], []
        for j in range(r):
            states.append(state)
            state, update = M[:, j] @ state + U[:, j], M[:, j] @ update + U[:, j]
            total = M[:, j] @ total
        for j in reversed(range(r)):
            d_states.insert(0, d_state)
            d_state = M[:, j].mT @ d_state + own.double().unflatten(0, (B, r))[:, j]
        for found, expected in (
            (compose_maps(maps, B)[0], update),
            (compose_maps(maps, B)[1], total),
            (states_through(maps, start)[0], torch.stack(states, 1).flatten(0, 1)),
            (states_through(maps, start)[1], state),
            (adjoints_through(maps, own, start)[0], torch.stack(d_states, 1).flatten(0, 1)),
            (adjoints_through(maps, own, start)[1], d_state),
            (apply_maps(compose_maps(maps, B)[2], start), torch.stack(states, 1).flatten(0, 1)),
            (
                apply_maps(compose_adjoints(maps, own, B)[1], start),
                torch.stack(d_states, 1).flatten(0, 1),
            ),
            (compose_adjoints(maps, own, B)[0], adjoints_through(maps, own, 0 * start)[1].double()),
        ):
            assert found.shape == expected.shape
            assert relative(found, expected) < 1e-6


def bounded_decays_get_longer_chunks():
    """Where rows fit into shared memory and the bound keeps them in range, and Triton compiles it."""
    utils = sys.modules["fla.utils"]
    utils.TRITON_ABOVE_3_4_0 = True
    assert [dplr_passes(128, bound).CHUNK for bound in (None, -0.6, -30.0)] == [16, 64, 16]
    assert dplr_passes(256, -0.6).CHUNK == 16
    utils.TRITON_ABOVE_3_4_0 = False
    assert dplr_passes(128, -0.6).CHUNK == 16
    utils.TRITON_ABOVE_3_4_0 = True


def self_check(name):
    """What a wrong kernel gives is noticed at the first use, and only then looked for."""
    zeros = torch.zeros(1, 1, 16, 16)
    call = make_operator(name, "fla").segment(make(name, 1, 20, 1, 16, 16), whole(20))
    module = sys.modules["fla.ops.common.chunk_delta_h"]
    kernel, run_maps = module.chunk_gated_delta_rule_fwd_h, delta_run_maps.run_maps

    def wrong_states(*args, **kwargs):
        return kernel(*args, **{**kwargs, "w": kwargs["w"] * 1.5})

    def wrong_maps(*args, **kwargs):
        maps, reach = run_maps(*args, **kwargs)
        return maps * 1.5, reach

    for place, function, right, wrong, act in (
        (module, "chunk_gated_delta_rule_fwd_h", kernel, wrong_states, call.output),
        (delta_run_maps, "run_maps", run_maps, wrong_maps, lambda *_: call.fresh().summarize()),
    ):
        setattr(place, function, wrong)
        with pytest.raises(BackendError, match=r"fla-core .* triton .* backend='torch'"):
            act(zeros, None)
        setattr(place, function, right)
        act(zeros, None)
        setattr(place, function, wrong)
        act(zeros, None)
        setattr(place, function, right)


if __name__ == "__main__":
    let_numpy_index()
    interpret_fla()
    fla_runs.MIN_CHUNKS = 1
    Passes.PROGRAMS = DplrPasses.PROGRAMS = 10**6
    fla_check._TOKENS = 70
    segments(sys.argv[1])
    if sys.argv[1] != "delta_rule":
        forgetting(sys.argv[1])
    else:
        chains()
        self_check("delta_rule")
    names = {"maps", "outputs", "adjoints", "gradients"}
    assert {part for _, part, *_ in fla_check._confirmed} == names
