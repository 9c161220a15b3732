"""Sequence-parallel methods: a method is a choice of scan and of what runs while it is in flight.

| method | scan | while in flight |
| --- | --- | --- |
| `zeco` | All-Scan, by default the pipelined chain | intra-chunk work, recomputation |
| `lasp1` | one block; the whole local pass runs between receive and send | nothing |
| `lasp2` | all-gather of the maps | intra-chunk work (nothing with ``overlap=False``) |
| `ulysses` | none: tokens are swapped for heads and back | - |
| `local` | none: every rank starts from zero; a control that must fail | - |
"""

from __future__ import annotations

from zeco.sequence_parallel.methods.lasp1 import Lasp1
from zeco.sequence_parallel.methods.local import Local
from zeco.sequence_parallel.methods.method import Method
from zeco.sequence_parallel.methods.scanned import Scanned

__all__ = ["Lasp1", "Local", "Method", "Scanned"]
