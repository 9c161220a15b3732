from __future__ import annotations

import gc
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import zeco
from zeco import SequenceParallel
from zeco.collectives import halo
from zeco.collectives.groups import Group
from zeco.collectives.scan import ScanHandle
from zeco.layers import GatedLinearAttention, Mamba2
from zeco.layers.deferred import Deferred
from zeco.sequence_parallel.methods import scanned
from zeco.testing import run_ranks

CPU = torch.device("cpu")
RANKS = 3


def make_layer(dtype: torch.dtype = torch.float64) -> GatedLinearAttention:
    torch.manual_seed(0)
    return GatedLinearAttention(16, 2, conv_width=4).to(dtype)


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 21, 16, generator=generator, dtype=torch.float64).to(dtype)


def note_events(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, starting: str
) -> dict[int, list[str]]:
    """Have every rank note when it starts an exchange by a function of a module, and waits for it."""
    events: dict[int, list[str]] = {rank: [] for rank in range(RANKS)}
    start = getattr(module, starting)

    def started(transport: Any, *args: Any, **kwargs: Any) -> Any:
        handle = start(transport, *args, **kwargs)
        wait = handle.wait
        events[transport.rank].append("start")
        handle.wait = lambda: (events[transport.rank].append("wait"), wait())[1]
        return handle

    monkeypatch.setattr(module, starting, started)
    return events


@pytest.mark.parametrize("can_be_held_up", [False, True])
def test_the_gate_is_computed_while_the_scan_is_in_flight(
    can_be_held_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not where a scan is many kernels on a GPU, which a matrix product would keep waiting."""
    monkeypatch.setattr(ScanHandle, "can_be_held_up", can_be_held_up)
    events = note_events(monkeypatch, scanned, "start_scan")

    def on_rank(group: Group) -> None:
        sp = SequenceParallel(group)
        layer = make_layer()
        layer.gate.register_forward_hook(lambda *_: events[sp.rank].append("gate"))
        layer(tokens().tensor_split(RANKS, 1)[sp.rank], sp=sp)

    run_ranks(RANKS, on_rank)
    order = ["start", "wait", "gate"] if can_be_held_up else ["start", "gate", "wait"]
    assert all(found == order for found in events.values())


def test_the_decays_are_computed_while_the_halo_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And their gradients while the halo's are."""
    events = note_events(monkeypatch, halo, "_start_passing")

    def on_rank(group: Group) -> None:
        sp = SequenceParallel(group)
        layer = make_layer()
        layer.decay_up.register_forward_hook(lambda *_: events[sp.rank].append("decays"))
        layer.decay_up.register_full_backward_hook(lambda *_: events[sp.rank].append("d_decays"))
        x = tokens().tensor_split(RANKS, 1)[sp.rank].requires_grad_()
        layer(x, sp=sp)[0].sum().backward()

    run_ranks(RANKS, on_rank)
    forward, backward = ["start", "decays", "wait"], ["start", "d_decays", "wait"]
    assert all(found == forward + backward for found in events.values())


@pytest.mark.parametrize(
    "options",
    [
        {"method": "zeco"},
        {"method": "zeco", "overlap": False},
        {"method": "zeco", "layout": "zigzag"},
        {"method": "lasp1"},
        {"method": "ulysses"},
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["plain", "zeco.checkpoint", "torch's checkpoint"])
def test_gradients_are_those_of_one_rank(options: dict[str, Any], how: str) -> None:
    P = 2
    expected, *layers = (make_layer() for _ in range(1 + P))
    expected(tokens())[0].square().sum().backward()

    def run(layer: GatedLinearAttention, x: Tensor, sp: SequenceParallel) -> Tensor:
        if how == "plain":
            return layer(x, sp=sp)[0]
        if how == "zeco.checkpoint":
            return zeco.checkpoint(lambda y: layer(y, sp=sp)[0], x)
        return torch_checkpoint(lambda y: layer(y, sp=sp)[0], x, use_reentrant=False)

    def on_rank(group: Group) -> list[Tensor]:
        sp = SequenceParallel(group, **options)
        layer = layers[sp.rank]
        parts = [tokens()[:, start:stop] for start, stop in sp.spans(21)]
        x = torch.cat(parts, 1).requires_grad_()
        run(layer, x, sp).square().sum().backward()
        return [p.grad for p in layer.parameters() if p.grad is not None]

    ranks = run_ranks(P, on_rank)
    wanted = [p.grad for p in expected.parameters()]
    assert len(ranks[0]) == len(wanted)
    for grads, want in zip(zip(*ranks, strict=True), wanted, strict=True):
        torch.testing.assert_close(sum(grads), want, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own norm
def test_autocast_reaches_the_gate() -> None:
    found: dict[int, list[torch.dtype]] = {}

    def on_rank(group: Group) -> None:
        sp = SequenceParallel(group)
        layer = make_layer(torch.float32)
        dtypes = found.setdefault(sp.rank, [])
        layer.gate.register_forward_hook(lambda _m, _i, y: dtypes.append(y.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            layer(tokens(torch.float32), sp=sp)

    run_ranks(2, on_rank)
    assert found == {0: [torch.bfloat16], 1: [torch.bfloat16]}


def test_an_error_in_the_work_reaches_every_rank() -> None:
    def on_rank(group: Group) -> None:
        sp = SequenceParallel(group)
        layer = make_layer()
        if sp.rank == 0:
            layer.gate.register_forward_hook(lambda *_: 1 / 0)
        y, _ = layer(tokens(), sp=sp)
        if sp.rank == 1:
            zeco.cross_entropy(y, torch.zeros(1, 21, dtype=torch.long), sp)

    with pytest.raises(ZeroDivisionError):
        run_ranks(2, on_rank)


def test_without_autograd_nothing_is_recorded() -> None:
    with torch.no_grad():
        y, _ = Mamba2(16, 2).double()(tokens(), sp=SequenceParallel())
    assert not y.requires_grad


def test_nothing_is_kept_once_it_was_asked_for() -> None:
    x = torch.randn(3, requires_grad=True)
    deferred = Deferred(lambda: x * 2, CPU)
    deferred.run()
    deferred.run()
    value = deferred.result()
    gone = weakref.ref(value)
    del value
    gc.collect()
    assert gone() is None
    with pytest.raises(RuntimeError, match="asked for twice"):
        deferred.result()
