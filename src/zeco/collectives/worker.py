"""A thread that drives a rank's scans while the layer computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from zeco.collectives.transport import Transport

ResultT = TypeVar("ResultT")

POLL_S = 0.2
"""How often a waiting rank looks whether another one has failed."""


class WorkerTask(Generic[ResultT]):
    """A program given to a worker.

    Args:
        program: what to run.
        transport: asked, while the caller waits, whether another rank has failed.
    """

    def __init__(self, program: Callable[[], ResultT], transport: Transport) -> None:
        self._program = program
        self._transport = transport
        self._done = threading.Event()
        self._result: ResultT | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the program and keep its result or error."""
        try:
            self._result = self._program()
        except BaseException as error:  # handed to whoever waits
            self._error = error
        self._done.set()

    def wait(self) -> ResultT:
        """Block until the program has ended; return its result or raise its error."""
        while not self._done.wait(POLL_S):
            self._transport.look_for_failure()
        if self._error is not None:
            # The peers' own word for what went wrong, where they left one, says more than ours.
            self._transport.look_for_failure()
            self._transport.broken = str(self._error)
            raise self._error
        return self._result  # type: ignore[return-value]


class Worker:
    """A daemon thread that runs tasks in the order in which they come; started by the first.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[WorkerTask[object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: WorkerTask[ResultT]) -> WorkerTask[ResultT]:
        """Put a task into the queue."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        self._tasks.put(task)  # type: ignore[arg-type]
        return task

    def stop(self) -> None:
        """End the thread once it has run what is in the queue."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread = None

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()
