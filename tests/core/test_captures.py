from __future__ import annotations

import gc
import weakref

import pytest
import torch

from zeco.core import captures


@pytest.mark.parametrize("capturing", [False, True])
def test_what_a_capture_has_seen_stays(capturing, monkeypatch):
    monkeypatch.setattr(captures, "_held", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    x = torch.zeros(3)
    kept = weakref.ref(x)
    assert captures.hold(x, torch.device("cuda")) is x
    assert captures.hold(x, torch.device("cuda")) is x
    assert len(captures._held) == capturing
    del x
    gc.collect()
    assert (kept() is not None) == capturing
