"""All-Scan's kernels, interpreted on the CPU, and what the compiler makes of them.

The cases run in a process of their own: see the fixture.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

NOTE = "st.relaxed.sys.global.s64"
"""The store of what the host shall find."""

CASES = Path(__file__).with_name("device_scan_cases.py")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the package triton is missing; install zeco-sp[gpu]",
)


@pytest.mark.parametrize("part", ["elementwise", "dense", "failures"])
def test_interpreted_kernels(part, run_interpreted):
    run_interpreted(CASES, part)


@pytest.mark.parametrize("scope", ["gpu", "sys"])
@pytest.mark.parametrize(
    "kind,channels",
    [("identity", 128), ("scalar", 128), ("diagonal", 128), ("dense", 128), ("dense", 40)],
)
def test_every_word_is_received_once(kind, channels, scope, compile_for_hopper):
    """Compiled for Hopper, without a GPU; words in the ring's scope, notes for the host in the system's.

    Triton may copy an operation whose result it wants in several layouts, even one that waits.
    """
    from zeco.kernels.device.scan import UNROLL, choose_kernel, make_layout

    shape = (1, 32, channels, 128)
    options = {"max_programs": 16, "tensor_cores": True, "scope": scope}
    layout = make_layout(shape, torch.float32, kind, **options)
    kernel, constants = choose_kernel(layout, interpreted=False)
    dtypes = {"inbox": torch.int32, "outbox": torch.int32}
    places = ("room", "room_before", "epochs", "status", "broken")
    dtypes |= dict.fromkeys(places, torch.int64)
    states = ("update", "log_decay", "matrix", "initial", "entering", "leaving")
    dtypes |= dict.fromkeys(states, torch.float32)
    arguments = [
        torch.empty(1, dtype=dtypes[name], device="meta") if name in dtypes else 7  # any number
        for name in kernel.arg_names
        if name not in constants
    ]
    made = compile_for_hopper(kernel, arguments, constants | {"num_warps": layout.num_warps})
    ptx = made.asm["ptx"]
    # The loop is unrolled, and what is left of it follows.
    copies = 1 if kind == "dense" else UNROLL + 1
    pack = layout.words // (32 * layout.num_warps)
    assert ptx.count(f"ld.relaxed.{scope}.global.v4") == copies * pack
    assert ptx.count(NOTE) > 0
    words = re.findall(r"(ld|st)\.(relaxed|acquire|release)\.(\w+)", ptx.replace(NOTE, ""))
    ways = {("ld", "relaxed"), ("st", "relaxed"), ("ld", "acquire"), ("st", "release")}
    assert set(words) == {(*way, scope) for way in ways}
    if kind != "dense":
        assert (
            made.metadata.shared == 0
        )  # nothing is exchanged between threads: each waits by itself


@pytest.mark.parametrize("kind", ["identity", "scalar", "diagonal", "dense"])
def test_every_launch_of_a_layout_takes_the_same_kernel(kind, monkeypatch):
    """Triton compiles again for other types, and for some values; meanwhile ranks would wait."""
    from zeco.core.transitions import Dense, Diagonal, Identity, Reset, Scalar
    from zeco.kernels.device import scan as device_scan

    shape = (1, 2, 16, 16)
    layout = device_scan.make_layout(shape, torch.float32, kind, max_programs=2)
    kernel, constants = device_scan.choose_kernel(layout, interpreted=False)
    assert set(constants) <= set(kernel.arg_names)
    unspecialised = {p.name for p in kernel.params if p.do_not_specialize}
    seen = []

    class Recorder:
        def __getitem__(self, grid):
            def launch(*arguments, **_):
                seen.append(dict(zip(kernel.arg_names, arguments, strict=False)))

            return launch

    monkeypatch.setattr(device_scan, "choose_kernel", lambda *_, **__: (Recorder(), {}))
    state, number = torch.zeros(shape), torch.zeros(2, dtype=torch.int64)
    bits = torch.zeros(layout.inbox_elements, dtype=layout.bits)
    ports = device_scan.Ports(bits, bits, number, number, number, number, number)
    own = {
        "identity": Identity(),
        "scalar": Scalar(torch.zeros(1, 2)),
        "diagonal": Diagonal(torch.zeros(1, 2, 16)),
        "dense": Dense(torch.zeros(1, 2, 16, 16)),
    }[kind]
    for rank, timeout_s in ((0, 0.5), (1, 3.0), (2, 1800.0)):
        role = device_scan.Role(rank, first=rank == 0, last=rank == 2)
        for transition in (own, Reset(kind)):
            for initial in (None, state):
                for leaving in (None, state):
                    device_scan.launch_scan(
                        layout, ports, role, state, transition, initial, timeout_s=timeout_s,
                        entering=state, leaving=leaving,
                    )  # fmt: skip

    def compiled_for(name, value):
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16
        return -(2**31) <= value < 2**31, None if name in unspecialised else value

    keys = [{name: compiled_for(name, value) for name, value in call.items()} for call in seen]
    assert len(keys) == 24
    assert all(key == keys[0] for key in keys)
