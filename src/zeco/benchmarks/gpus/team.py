"""Ranks that measure together: a common start, the slowest one's time, one decision to stop."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zeco.benchmarks.device import WARM_UP_RUNS, KeyT, Run, synchronize, time_in_turn

Told = Callable[[dict[str, Any]], None]
"""Called with a part's figures whenever there are more of them."""

METHODS: dict[str, dict[str, Any]] = {
    "zeco, device_chain": {"method": "zeco", "algorithm": "device_chain"},
    "zeco, chain": {"method": "zeco", "algorithm": "chain"},
    "zeco": {"method": "zeco"},
    "lasp1": {"method": "lasp1"},
    "lasp2": {"method": "lasp2"},
    "ulysses": {"method": "ulysses"},
}
"""What is compared, as options of `zeco.SequenceParallel`. The first scans inside kernels, the second
with messages that the host launches, the third as the cost model chooses."""

LEAD_CYCLES = 20_000_000
"""About 10 ms of a GPU's clock, in which the host queues what is timed."""

REPLAY_LEAD_CYCLES = 2_000_000
"""The same where that is the replay of a graph."""


@dataclass(frozen=True, eq=False)
class Team:
    """This rank among those that measure together.

    Attributes:
        group: the ranks.
        device: this rank's.
        deadline: of `time.monotonic`, after which nothing new is to be started.
    """

    group: dist.ProcessGroup
    device: torch.device
    deadline: float = math.inf

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Ranks in the group, P."""
        return dist.get_world_size(self.group)

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks compute on GPUs."""
        return self.device.type == "cuda"

    def has_time(self, seconds: float = 0.0) -> bool:
        """Whether all ranks find so much time before the deadline; the same answer on all."""
        enough = time.monotonic() + seconds < self.deadline
        return self._reduced([float(enough)], dist.ReduceOp.MIN)[0] > 0

    def worst(self, values: Sequence[float]) -> list[float]:
        """Return every rank's largest value of each."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def least(self, values: Sequence[float]) -> list[float]:
        """Return every rank's smallest value of each."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def _reduced(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=how, group=self.group)
        return [float(x) for x in found]

    def gather(self) -> None:
        """Let the ranks begin what comes next together."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    def meet(self, lead_cycles: int = LEAD_CYCLES) -> None:
        """Let the ranks begin what comes next together; on a GPU not before the host has queued it.

        GPUs whose clocks differ spin for different times, so they meet behind that.
        """
        if self.on_gpu:
            torch.cuda._sleep(lead_cycles)  # pyright: ignore[reportPrivateUsage]
        self.gather()

    def times(
        self,
        runs: Mapping[KeyT, Run],
        repetitions: int,
        *,
        warm_up: int = WARM_UP_RUNS,
        lead_cycles: int = LEAD_CYCLES,
    ) -> dict[KeyT, list[float]]:
        """Return the seconds of the slowest rank in each repetition of every run.

        As `time_in_turn`, but every run begins on all ranks together, and on GPUs behind a kernel
        that spins, so that launches count only where a run waits for the GPU halfway.

        Args:
            runs: by name.
            repetitions: of each.
            warm_up: runs of each before any is timed.
            lead_cycles: for which GPUs spin.
        """
        own = time_in_turn(
            runs,
            self.device,
            repetitions,
            warm_up=warm_up,
            meet=lambda: self.meet(lead_cycles),
        )
        flat = self.worst([seconds for times in own.values() for seconds in times])
        return {name: flat[i * repetitions : (i + 1) * repetitions] for i, name in enumerate(own)}

    def row_us(
        self, call: Callable[[int], object], *, rounds: int, repetitions: int
    ) -> dict[str, Any]:
        """Return the microseconds of one of many calls, put into the queue one behind the other.

        Only for calls of which each must have ended on the last rank before the next can on the
        first.

        Args:
            call: queues the call of a number.
            rounds: calls in a row.
            repetitions: rows of them, after one more that isn't counted.

        Returns:
            ``us``: the median, and the extremes, the GPUs at rest until all calls are in the queue;
            ``launches_hidden``: whether they were. ``from_python_us``: the median with launches.
        """
        rows = [self._row(call, rounds) for _ in range(repetitions + 1)][1:]
        times = [took for took, _ in rows]
        eager = [self._row(call, rounds, self.gather)[0] for _ in range(repetitions + 1)][1:]
        return {
            "us": round(statistics.median(times), 3),
            "least_us": round(min(times), 3),
            "most_us": round(max(times), 3),
            "launches_hidden": all(hidden for _, hidden in rows),
            "from_python_us": round(statistics.median(eager), 3),
        }

    def _row(
        self,
        call: Callable[[int], object],
        rounds: int,
        meet: Callable[[], None] | None = None,
    ) -> tuple[float, bool]:
        """Return the microseconds of a call of a row, and whether the launches were hidden."""
        synchronize(self.device)
        (meet or self.meet)()
        if not self.on_gpu:
            start = time.perf_counter()
            for number in range(rounds):
                call(number)
            return self.worst([(time.perf_counter() - start) * 1e6 / rounds])[0], False
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for number in range(rounds):
            call(number)
        late = begin.query()
        end.record()
        end.synchronize()
        took = begin.elapsed_time(end) * 1e3 / rounds
        # GPUs wake up at different times; the one that did last has the time without others' sleep.
        hidden = self.least([math.inf if late else took])[0]
        return (hidden, True) if math.isfinite(hidden) else (self.worst([took])[0], False)


def new_group(num_ranks: int, device: torch.device) -> dist.ProcessGroup:
    """Return a group of the first ranks, of their own communicator; all ranks call this.

    A process that isn't in it gets what stands for no group.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    return dist.new_group(list(range(num_ranks)), backend=backend)  # type: ignore[return-value]


def team_sizes(num_ranks: int) -> list[int]:
    """Return the numbers of ranks to measure on: all, and each smaller power of two from 2 on.

    >>> team_sizes(8), team_sizes(6), team_sizes(1)
    ([8, 4, 2], [6, 4, 2], [1])
    """
    powers = [2**i for i in range(num_ranks.bit_length(), 0, -1) if 2**i < num_ranks]
    return [num_ranks, *powers]


def teams(world: Team) -> list[Team | None]:
    """Return the first so many ranks as teams, one for each of `team_sizes`; None in which it isn't.

    All ranks of the world call this.
    """
    found: list[Team | None] = []
    for size in team_sizes(world.size):
        group = world.group
        if size < world.size:
            made = new_group(size, world.device)
            if world.rank >= size:
                found.append(None)
                continue
            group = made
        found.append(Team(group, world.device, world.deadline))
    return found
