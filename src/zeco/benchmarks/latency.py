"""A group whose messages leave late: latency for emulated links, whose token buckets have none."""

from __future__ import annotations

import queue
import threading
import time

import torch.distributed as dist

from zeco.collectives.process_group import ProcessGroupTransport
from zeco.collectives.transport import Message, Request
from zeco.core.topology import Nodes, check_nodes, node_of_ranks

POST_TIMEOUT_S = 60.0


class _Late:
    """A message that isn't posted yet."""

    def __init__(self, message: Message, leaves: float) -> None:
        self.message = message
        self.leaves = leaves
        self.posted = threading.Event()
        self.request: Request | None = None
        self.error: BaseException | None = None

    def wait(self) -> object:
        """Block until the message is out."""
        if not self.posted.wait(POST_TIMEOUT_S):
            raise TimeoutError("a delayed message was never posted")
        if self.error is not None:
            raise self.error
        return None if self.request is None else self.request.wait()


class LatentTransport(ProcessGroupTransport):
    """A gloo group each of whose messages is posted a while after it was sent.

    The sender isn't held up, and messages stay in order: to the receiver the link is just longer.

    Args:
        group: the group.
        latency_s: added to messages between nodes; without nodes, to all.
        nodes: ranks of every node, in the order of the ranks, or None.
    """

    def __init__(self, group: dist.ProcessGroup, latency_s: float, nodes: Nodes | None) -> None:
        super().__init__(group)
        self.nodes = nodes
        node_of = node_of_ranks(check_nodes(nodes, self.size))
        mine = node_of[self.rank]
        self._far = [nodes is None or node != mine for node in node_of]
        self._latency_s = latency_s
        self._late: queue.SimpleQueue[_Late] = queue.SimpleQueue()
        if latency_s:
            threading.Thread(target=self._post_late, name="zeco-latency", daemon=True).start()

    def post(self, sends: list[Message], receives: list[Message]) -> list[Request]:
        # Receives first: gloo would queue the word that there is room behind what is sent.
        incoming = super().post([], receives)
        found: list[Request] = []
        leaves = time.monotonic() + self._latency_s
        for message in sends:
            if self._latency_s and self._far[message.peer]:
                late = _Late(message, leaves)
                self._late.put(late)
                found.append(late)
            else:
                found += super().post([message], [])
        return found + incoming

    def _post_late(self) -> None:
        while True:
            late = self._late.get()
            time.sleep(max(0.0, late.leaves - time.monotonic()))
            try:
                (late.request,) = super().post([late.message], [])
            except BaseException as error:  # handed to whoever waits
                late.error = error
            late.posted.set()
