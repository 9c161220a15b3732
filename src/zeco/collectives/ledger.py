"""What a rank sent and how long it waited: counted where it happens, on every run."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Messages of one kind.

    Attributes:
        messages: how many this rank sent.
        bytes: their payload.
    """

    messages: int = 0
    bytes: int = 0


@dataclass
class Ledger:
    """A rank's account of its own communication.

    Attributes:
        sent: traffic by purpose, such as ``"forward"``, ``"backward"`` or ``"halo"``.
        scans: how many scans were started, by purpose.
        wait_s: seconds that the rank stood still for a scan: the exposed communication.
    """

    sent: dict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    scans: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    wait_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count_sent(self, purpose: str, num_bytes: int, messages: int = 1) -> None:
        """Add messages to the account."""
        with self._lock:
            traffic = self.sent[purpose]
            traffic.messages += messages
            traffic.bytes += num_bytes

    def count_scan(self, purpose: str) -> None:
        """Add a scan to the account."""
        with self._lock:
            self.scans[purpose] += 1

    def count_wait(self, seconds: float) -> None:
        """Add time spent waiting."""
        with self._lock:
            self.wait_s += seconds

    @property
    def sent_bytes(self) -> int:
        """Bytes sent in all."""
        return sum(t.bytes for t in self.sent.values())

    @property
    def sent_messages(self) -> int:
        """Messages sent in all."""
        return sum(t.messages for t in self.sent.values())

    def clear(self) -> None:
        """Start again from nothing."""
        with self._lock:
            self.sent.clear()
            self.scans.clear()
            self.wait_s = 0.0
