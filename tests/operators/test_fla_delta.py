"""The delta rules on Flash Linear Attention's kernels, interpreted on the CPU, and their choice.

The cases run in a process of their own: see the fixture.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from zeco import ops
from zeco.core import captures
from zeco.core.errors import ArgumentError, UnsupportedError
from zeco.operators import backends
from zeco.operators.backends import choose_backend
from zeco.operators.fla import check as fla_check
from zeco.operators.fla.runs import make_runs

CASES = Path(__file__).with_name("fla_delta_cases.py")
CPU = torch.device("cpu")
bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
needs_fla = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "fla")),
    reason="the packages triton and fla-core are missing; install zeco-sp[gpu]",
)


@needs_fla
@pytest.mark.parametrize("name", ["delta_rule", "gated_delta_rule", "kda", "rwkv7"])
def test_interpreted_kernels(name: str, run_interpreted: Callable[[Path, str], None]) -> None:
    run_interpreted(CASES, name)


@needs_fla
@pytest.mark.filterwarnings("ignore")  # of FLA, about what is missing here
def test_the_offsets_that_a_graph_reads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from fla.ops.utils import prepare_chunk_offsets

    from zeco.operators.fla import dplr_passes as fla_dplr_passes

    monkeypatch.setattr(captures, "_held", {})
    for module in (captures, fla_dplr_passes):
        monkeypatch.setattr(module, "is_capturing", lambda device: True)
    passes = fla_dplr_passes.DplrPasses.__new__(fla_dplr_passes.DplrPasses)
    passes.runs = make_runs((0, 300, 310), 2, passes.CHUNK, CPU)
    passes._hold_offsets()
    # What FLA's passes are given next is what was kept, not another tensor with the same numbers.
    (kept,) = captures._held.values()
    assert prepare_chunk_offsets(passes.runs.cu_seqlens, passes.CHUNK) is kept


@pytest.mark.parametrize("bounds", [(0, 1), (0, 0), (0, 64, 64, 1000, 1001), (0, 4096, 8192)])
@pytest.mark.parametrize("length", [1, 3, 1000])
def test_runs_cover_every_chunk_once(bounds: tuple[int, ...], length: int) -> None:
    runs = make_runs(bounds, length, 64, CPU)
    cuts = runs.cu_seqlens.tolist()
    assert len(cuts) == runs.num_runs + 1
    for (first, stop), start, end in zip(runs.ranges, bounds, bounds[1:], strict=False):
        assert (cuts[first], cuts[stop]) == (start, end)
        assert all((cut - start) % 64 == 0 for cut in cuts[first:stop])
    chunks = [-(-(stop - start) // 64) for start, stop in pairwise(cuts)]
    assert max(chunks) <= length
    assert runs.chunk_offsets.tolist() == [sum(chunks[:i]) for i in range(len(chunks) + 1)]
    expected = [[run, place] for run, count in enumerate(chunks) for place in range(count)]
    assert runs.chunk_indices.tolist() == expected


@pytest.mark.parametrize(
    "K, V, dtypes, word",
    [
        (128, 128, (bf16, bf16, bf16, None, bf16), None),
        (16, 256, (fp16, fp16, fp16, fp32, fp32), None),
        (128, 128, (fp32, fp32, fp32, None, fp32), "float32"),
        (128, 128, (bf16, bf16, fp16, None, bf16), "must all be"),
        (128, 128, (bf16, bf16, bf16, fp64, bf16), "float64"),
        (40, 128, (bf16, bf16, bf16, None, bf16), "multiples of 16"),
        (128, 272, (bf16, bf16, bf16, None, bf16), "up to 256"),
    ],
)
def test_calls_that_it_takes(
    K: int, V: int, dtypes: tuple[torch.dtype | None, ...], word: str | None
) -> None:
    named = dict(zip(("q", "k", "v", "g", "beta"), dtypes, strict=True))
    reason = fla_check.why_not_fla(K, V, **named)
    assert (reason is None) == (word is None)
    assert word is None or word in str(reason)


def test_an_unknown_release_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for installed, word in (("0.7.0", "0.7.0"), (None, "missing")):
        monkeypatch.setattr(fla_check, "_installed", lambda installed=installed: installed)
        reason = fla_check.why_not_installed(torch.device("cuda"))
        assert word in str(reason)
        assert "zeco-sp[gpu]" in str(reason)


def test_an_explicit_choice_on_a_cpu_is_refused() -> None:
    x, beta = torch.randn(1, 4, 1, 16).bfloat16(), torch.rand(1, 4, 1).bfloat16()
    with pytest.raises(UnsupportedError, match=r"'fla'.*inputs are on cpu"):
        ops.delta_rule(x, x, x, beta, backend="fla")
    with pytest.raises(UnsupportedError, match=r"'fla'.*inputs are on cpu"):
        ops.rwkv7(x, -x.exp(), x, x, x, x, backend="fla")
    with pytest.raises(UnsupportedError, match=r"'fla' isn't offered"):
        ops.gla(x, x, x, -x.exp(), backend="fla")
    assert ops.delta_rule(x, x, x, beta)[0].dtype == bf16


def test_a_lower_bound_must_hold_and_changes_no_number() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(1, 70, 1, 16), -0.6 * torch.rand(1, 70, 1, 16)
    bounded, _ = ops.rwkv7(x, w, x, x, -x / 8, x / 8, lower_bound=-0.6)
    assert torch.equal(bounded, ops.rwkv7(x, w, x, x, -x / 8, x / 8)[0])
    with pytest.raises(ArgumentError, match=r"w has values down to -0\.[56].*lower_bound -0\.3"):
        ops.rwkv7(x, w, x, x, -x / 8, x / 8, lower_bound=-0.3)
    with pytest.raises(ArgumentError, match=r"lower_bound is 0\.6, but must be below 0"):
        ops.rwkv7(x, w, x, x, -x / 8, x / 8, lower_bound=0.6)


def test_a_choice_is_logged_once_with_its_reasons(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="zeco.backends"):
        for _ in range(2):
            chosen = choose_backend("rule", "auto", CPU, ("torch", "fla"), {"fla": "too small"})
            assert chosen == "torch"
    assert [record.getMessage() for record in caplog.records] == [
        "rule: backend 'torch'; not 'fla': the inputs are on cpu; move them to a CUDA device or "
        "use backend='torch'"
    ]


def test_a_call_that_a_backend_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "why_not", lambda backend, device: None)
    refused = {"fla": "K=20 is odd; use backend='torch'"}
    assert choose_backend("rule", "auto", CPU, ("torch", "fla"), refused) == "torch"
    assert choose_backend("rule", "auto", CPU, ("torch", "fla"), {"fla": None}) == "fla"
    with pytest.raises(UnsupportedError, match=r"rule.*'fla'.*K=20 is odd.*'torch'"):
        choose_backend("rule", "fla", CPU, ("torch", "fla"), refused)
