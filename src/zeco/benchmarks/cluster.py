"""Hosts emulated on one machine: a network namespace each, with shaped links to a bridge.

    one node                         nodes, links inside and between
    rank 0 ─ eth0 ┐                  rank 0 ─ eth0 ─ bridge of its node
    rank 1 ─ eth0 ┼ bridge                  └ rail0 ─ bridge between nodes
    rank 2 ─ eth0 ┘                  (static routes send a rank of another node through rail0)

The bridges lie in a namespace of their own, so the machine's own network isn't touched, and to remove
the namespaces removes all. Both ends of a link have a token bucket (`tc tbf`), so its rate holds both
ways. The names carry the owner's process and its start, so what a killed process has left behind is
known for what it is, and is removed by the next one.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from zeco.core.errors import GroupError
from zeco.core.topology import Nodes, check_nodes, node_of_ranks

PREFIX = "zeco"
COMMAND_TIMEOUT_S = 30.0

# A burst is sent unshaped, so it should be small; but TCP hands segments of 64 KiB to a link, and those
# above the burst are cut into packets by the processor, which 16 hosts on few cores don't bear.
BURST_BYTES = 72 << 10
# Room for what many senders send to one receiver at once: a real switch would pause them, and drops
# would measure TCP's timeouts instead.
QUEUE_BYTES = 64 << 20

SYSCTLS = (
    # Links are idle while ranks compute; a fabric for training doesn't start slowly after that.
    "net.ipv4.tcp_slow_start_after_idle=0",
    # The same algorithm everywhere, and one that has no pace of its own.
    "net.ipv4.tcp_congestion_control=reno",
    # Windows that don't have to grow first: acknowledgements queue behind a rank's own data.
    "net.ipv4.tcp_rmem=4096 4194304 8388608",
    "net.ipv4.tcp_wmem=4096 4194304 8388608",
)


@dataclass(frozen=True)
class ClusterSpec:
    """What to emulate.

    Attributes:
        num_ranks: hosts, one for every rank.
        rate_bits_per_s: of every rank's link; with nodes, of its link to other nodes (its rail).
        nodes: ranks of every node, in the order of the ranks; None means no nodes.
        inside_bits_per_s: of a rank's link inside its node.
        latency_s: added to every message between nodes (between all ranks without nodes).
    """

    num_ranks: int
    rate_bits_per_s: float
    nodes: Nodes | None = None
    inside_bits_per_s: float = 2e9
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        check_nodes(self.nodes, self.num_ranks)
        if self.num_ranks > 200:
            raise GroupError(f"{self.num_ranks} emulated hosts, but at most 200 have addresses")

    @property
    def node_of(self) -> list[int]:
        """Return every rank's node."""
        return node_of_ranks(check_nodes(self.nodes, self.num_ranks))


def check_able() -> None:
    """Raise a `GroupError` that says what is missing, if hosts can't be emulated here."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise GroupError(
            f"emulated hosts need {' and '.join(missing)}, not found on PATH; install iproute2"
        )
    if os.geteuid() != 0:
        raise GroupError(
            "emulated hosts need root, for network namespaces; run this command with sudo"
        )


@contextmanager
def emulated(spec: ClusterSpec) -> Generator[list[str]]:
    """Lay a cluster, yield its ranks' namespaces, and remove it however the block ends.

    SIGTERM and SIGHUP leave the block as exceptions, as Ctrl-C does. After a kill that can't be
    handled the ranks end themselves, and the next call removes the namespaces.

    Raises:
        GroupError: no root, no tools, or a command that failed.
    """
    check_able()
    sweep()
    own = f"{PREFIX}-{os.getpid()}-{_start_of(os.getpid())}"
    atexit.register(_remove, own)
    with _termination_raised():
        try:
            yield _lay(spec, own)
        finally:
            with _undisturbed():
                _remove(own)
            atexit.unregister(_remove)


def sweep() -> list[str]:
    """Remove the namespaces of processes that are gone; return their names."""
    found: list[str] = []
    for name in _namespaces():
        parts = name.split("-")
        if parts[0] != PREFIX or len(parts) != 4 or not parts[1].isdigit():
            continue
        if _start_of(int(parts[1])) != parts[2]:
            _delete(name)
            found.append(name)
    return found


def _lay(spec: ClusterSpec, own: str) -> list[str]:
    hub = f"{own}-hub"
    _run(["ip", "netns", "add", hub])
    names = [f"{own}-r{rank}" for rank in range(spec.num_ranks)]
    node_of = spec.node_of
    bridges = [f"node{node}" for node in range(max(node_of) + 1)]
    if spec.nodes is not None:
        bridges.append("between")
    _ip(hub, [f"link add {b} type bridge\nlink set {b} up" for b in bridges])
    inside = spec.rate_bits_per_s if spec.nodes is None else spec.inside_bits_per_s
    for rank, name in enumerate(names):
        _run(["ip", "netns", "add", name])
        _ip(name, ["link set lo up"])
        _run(["ip", "netns", "exec", name, "sysctl", "-qw", *SYSCTLS])
        _link(hub, name, f"in{rank}", "eth0", f"node{node_of[rank]}", inside)
        _ip(name, [f"addr add {_address(rank)}/16 dev eth0"])
        if spec.nodes is None:
            continue
        _link(hub, name, f"out{rank}", "rail0", "between", spec.rate_bits_per_s)
        routes = [f"addr add {_rail_address(rank)}/16 dev rail0"]
        routes += [
            f"route add {_address(peer)}/32 via {_rail_address(peer)} dev rail0 src {_address(rank)}"
            for peer in range(spec.num_ranks)
            if node_of[peer] != node_of[rank]
        ]
        _ip(name, routes)
    return names


def _link(hub: str, name: str, there: str, here: str, bridge: str, bits_per_s: float) -> None:
    """Connect a rank to a bridge, with a token bucket at both ends."""
    _ip(
        hub,
        [
            f"link add {there} type veth peer name {here} netns {name}",
            f"link set {there} master {bridge} up",
        ],
    )
    _ip(name, [f"link set {here} up"])
    shape = f"root tbf rate {bits_per_s:.0f}bit burst {BURST_BYTES} limit {QUEUE_BYTES}".split()
    _run(["tc", "-n", hub, "qdisc", "add", "dev", there, *shape])
    _run(["tc", "-n", name, "qdisc", "add", "dev", here, *shape])


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _rail_address(rank: int) -> str:
    return f"10.78.0.{rank + 1}"


def _remove(own: str) -> None:
    for name in _namespaces():
        if name.startswith(f"{own}-"):
            _delete(name)


def _delete(name: str) -> None:
    """End what still runs in a namespace, then remove it."""
    held = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
    )
    for pid in held.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run(["ip", "netns", "del", name])


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line]


def _ip(namespace: str, commands: Sequence[str]) -> None:
    _run(["ip", "-n", namespace, "-batch", "-"], "\n".join(commands) + "\n")


def _run(command: list[str], given: str | None = None) -> str:
    # In a session of its own, so that Ctrl-C doesn't end a command halfway.
    done = subprocess.run(
        command,
        input=given,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        start_new_session=True,
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).replace("\n", "; ")
        raise GroupError(
            f"'{' '.join(command)}' failed: {said}; emulated hosts need root with the right to make "
            "network namespaces, and the kernel's veth, bridge and tbf"
        )
    return done.stdout


def _start_of(pid: int) -> str | None:
    """Return when a process started, in the kernel's ticks; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


@contextmanager
def _termination_raised() -> Generator[None]:
    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    with _handled((signal.SIGTERM, signal.SIGHUP), leave):
        yield


@contextmanager
def _undisturbed() -> Generator[None]:
    """Leave signals unheeded while things are tidied up."""
    with _handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN):
        yield


@contextmanager
def _handled(signums: Sequence[signal.Signals], handler: object) -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.signal(s, handler) for s in signums}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for signum, previous in before.items():
            signal.signal(signum, previous)
