"""The object a user holds: which ranks share a sequence, and by which method."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zeco.collectives.agreement import check_agreement
from zeco.collectives.groups import Group, transport_of
from zeco.collectives.ledger import Ledger
from zeco.collectives.mirrored import MirroredTransport
from zeco.collectives.recompute import take_slot
from zeco.collectives.scan import ALGORITHMS, can_scan_in_kernels
from zeco.core.costs import explain_plan
from zeco.core.documents import Pieces, check_cu_seqlens, local_pieces, whole
from zeco.core.errors import ArgumentError, UnsupportedError, unknown_name
from zeco.core.fabric import Fabric
from zeco.core.fabric_file import read_fabric
from zeco.core.partition import (
    check_nodes,
    check_shard_sizes,
    default_shard_sizes,
    shard_bounds,
    zigzag_slots,
)
from zeco.core.schedule import DEVICE_CHAIN
from zeco.operators.segment import Gradients, Outcome, Segment
from zeco.sequence_parallel.methods import Lasp1, Local, Method, Scanned
from zeco.sequence_parallel.methods.method import do_nothing
from zeco.sequence_parallel.methods.ulysses import Ulysses, ask_spans, check_heads

METHODS = ("zeco", "lasp1", "lasp2", "ulysses", "local")
LAYOUTS = ("contiguous", "zigzag")


class SequenceParallel:
    """Ranks that share one sequence, each holding a contiguous part of its tokens.

    Args:
        group: a 1-D device mesh, a process group, or None for the default group (a single rank
            where torch.distributed isn't initialised).
        method: ``"zeco"``; the baselines ``"lasp1"`` (serial), ``"lasp2"`` (all-gather) and
            ``"ulysses"`` (tokens for heads, which must divide by the ranks); or ``"local"``, a control
            that exchanges nothing and so computes something else.
        algorithm: the scan of ``"zeco"``, see `zeco.all_scan`; ``"auto"`` asks the cost model.
        num_blocks: pipeline blocks of its scan; None lets the cost model choose.
        overlap: whether ranks go on computing while a scan of ``"zeco"`` or ``"lasp2"`` is in flight.
        shard_sizes: tokens of every rank (of each of the 2P slots with layout "zigzag"); None means
            L // P, one more on the first L % P ranks (slots). Method ``"ulysses"`` asks all ranks for
            their tokens at every call unless they are given.
        layout: ``"contiguous"``, or ``"zigzag"``: of 2P slots rank r holds slots r and 2P - 1 - r, for
            hybrids whose softmax layers need balance. The state then passes twice through each rank.
        nodes: ranks on each node, in the order of the ranks, for the scans that know nodes and for
            the cost model; None means one node, or what an earlier context of this group was given.
        fabric: what messages cost, for the cost model: a `Fabric`, or the file that ``zeco calibrate
            --out FILE`` wrote, the same on all ranks; None keeps what is assumed of such a group, or
            what an earlier context of it was given.
        check: whether every call compares shapes, dtypes and options between the ranks and looks
            for NaN; None means on in torch.distributed's debug mode (TORCH_DISTRIBUTED_DEBUG).

    Raises:
        ArgumentError: a name that doesn't exist, options that don't go together, wrong shard sizes.
        GroupError: this process isn't in the group.

    >>> import zeco
    >>> zeco.SequenceParallel(method="zeco").size
    1
    """

    def __init__(
        self,
        group: Group = None,
        *,
        method: str = "zeco",
        algorithm: str = "auto",
        num_blocks: int | None = None,
        overlap: bool = True,
        shard_sizes: Sequence[int] | None = None,
        layout: str = "contiguous",
        nodes: Sequence[int] | None = None,
        fabric: Fabric | str | Path | None = None,
        check: bool | None = None,
    ) -> None:
        self.transport = transport_of(group)
        if nodes is not None:
            self.transport.nodes = check_nodes(nodes, self.transport.size)
        if fabric is not None:
            is_file = isinstance(fabric, (str, Path))
            self.transport.fabric = read_fabric(Path(fabric)) if is_file else fabric
        if layout not in LAYOUTS:
            raise ArgumentError(unknown_name("layout", layout, LAYOUTS))
        if num_blocks is not None and num_blocks < 1:
            raise ArgumentError(f"num_blocks={num_blocks}, but must be at least 1, or None")
        self.method_name = method
        self.method = _make_method(method, algorithm, num_blocks, overlap)
        self.layout = layout
        zigzag = layout == "zigzag"
        self.num_slots = 2 * self.transport.size if zigzag else self.transport.size
        self.shard_sizes = None
        if shard_sizes is not None:
            what = "slot" if zigzag else "rank"
            self.shard_sizes = check_shard_sizes(shard_sizes, self.num_slots, what)
        self.check = _debugging() if check is None else check
        self._is_mirrored = False
        self._meanwhile: Callable[[], None] = do_nothing

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """Ranks that share the sequence, P."""
        return self.transport.size

    @property
    def group(self) -> Group:
        """What `zeco.all_scan` and torch's collectives take as group; None for a single rank."""
        return self.transport.as_group()

    @property
    def ledger(self) -> Ledger:
        """Messages, bytes and waiting time of this rank."""
        return self.transport.ledger

    @property
    def exposed_wait_s(self) -> float:
        """Seconds that this rank has stood still for scans since the ledger was cleared."""
        return self.transport.ledger.wait_s

    def sizes(self, total: int) -> tuple[int, ...]:
        """Return the tokens of each rank, or slot, of a sequence of ``total``."""
        if self.shard_sizes is None:
            return self._default_sizes(total, self.num_slots)
        if sum(self.shard_sizes) != total:
            raise ArgumentError(
                f"shard_sizes={self.shard_sizes} sum to {sum(self.shard_sizes)}, but the sequence "
                f"has {total} tokens; make them sum to it, or leave them out"
            )
        return self.shard_sizes

    def slots_of(self, rank: int) -> tuple[int, ...]:
        """Return the slots that a rank holds, in the order of its tokens."""
        return zigzag_slots(rank, self.size) if self.layout == "zigzag" else (rank,)

    def spans(self, total: int, rank: int | None = None) -> tuple[tuple[int, int], ...]:
        """Return where a rank's slots lie in a sequence of ``total``: first token, one past the last.

        Args:
            total: tokens of the whole sequence.
            rank: whose; None means this rank.
        """
        sizes = self.sizes(total)
        slots = self.slots_of(self.rank if rank is None else rank)
        return tuple(shard_bounds(sizes, slot) for slot in slots)

    def bounds(self, total: int) -> tuple[int, int]:
        """Return this rank's first token of a sequence of ``total``, and one past its last."""
        if self.layout != "contiguous":
            raise UnsupportedError(
                f"layout {self.layout!r} gives a rank several spans of tokens; use spans()"
            )
        return self.spans(total)[0]

    def explain(
        self,
        shape: tuple[int, int, int, int],
        kind: str = "diagonal",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> str:
        """Say which scan ``algorithm="auto"`` takes, and what every candidate would take.

        A rank may ask alone.

        Args:
            shape: [B, H, K, V] of the states.
            kind: of the transitions: "identity", "scalar", "diagonal" or "dense".
            dtype: of the states.
            device: where the states are; None means where the group's messages go: the GPU with NCCL,
                else the CPU.

        Returns:
            One line a candidate with its predicted time, the choice first.
        """
        device = self.transport.home if device is None else torch.device(device)
        ranked = explain_plan(
            self.size,
            shape,
            kind,
            dtype.itemsize,
            nodes=self.transport.nodes,
            fabric=self.transport.fabric,
            on_device=can_scan_in_kernels(self.transport, shape, kind, device),
        )
        if self.transport.scans_only_in_kernels(device):
            ranked = tuple(item for item in ranked if item[0].algorithm == DEVICE_CHAIN)
        lines = [
            f"{plan.algorithm:<20} {plan.num_blocks or 'own':>4} blocks "
            f"{seconds * 1e3:>10.3f} ms predicted"
            for plan, seconds in ranked
        ]
        return "\n".join([f"chosen: {lines[0]}", *(f"        {line}" for line in lines[1:])])

    def meanwhile(self, work: Callable[[], None]) -> SequenceParallel:
        """Return the context for one operator call that does other work while its scan is in flight.

        Args:
            work: called in the call's forward pass, once for each exchange of it; not with method
                ``"ulysses"``, whose operators run on whole sequences. Recomputation in the backward
                pass calls it at the same place.
        """
        busy = copy.copy(self)
        busy._meanwhile = work
        return busy

    # What follows is the exchange that operators see: `zeco.operators.segment.Exchange`.

    def mirrored(self) -> SequenceParallel:
        """Return the context of the reversed sequence, each rank's tokens reversed where they are.

        A contiguous sequence then starts on the last rank; in the layout "zigzag" every rank's two
        slots have changed places.
        """
        mirror = copy.copy(self)
        if self.layout == "contiguous" and self.size > 1:
            mirror.transport = MirroredTransport(self.transport)
        if self.shard_sizes is not None:
            mirror.shard_sizes = self.shard_sizes[::-1]
        mirror._is_mirrored = not self._is_mirrored
        return mirror

    def is_first(self) -> bool:
        """Whether the sequence starts on this rank."""
        return self.rank == 0

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one raised, so that none waits for it."""
        self.transport.report_failure(error)

    def locate(self, num_tokens: int, cu_seqlens: Tensor | None, batch: int) -> tuple[Pieces, ...]:
        """Return, for each slot, the pieces of documents among this rank's tokens.

        Args:
            num_tokens: tokens on this rank.
            cu_seqlens: global document boundaries, or None.
            batch: the batch size.

        Raises:
            ArgumentError: boundaries that don't fit, or another number of tokens than this rank's.
        """
        slots = self.slots_of(self.rank)
        if cu_seqlens is None:
            if self.shard_sizes is None:
                return tuple(whole(n) for n in self._default_sizes(num_tokens, len(slots)))
            sizes = [self.shard_sizes[slot] for slot in slots]
            if num_tokens != sum(sizes):
                raise ArgumentError(
                    f"this rank has {num_tokens} tokens, but shard_sizes gives rank {self.rank} "
                    f"{sum(sizes)}; cut batches with zeco.shard_batch"
                )
            return tuple(whole(n) for n in sizes)
        total = int(cu_seqlens[-1]) if cu_seqlens.numel() else 0
        bounds = check_cu_seqlens(cu_seqlens, total, batch)
        spans = self.spans(total)
        held = sum(stop - start for start, stop in spans)
        if held != num_tokens:
            raise ArgumentError(
                f"cu_seqlens ends at {total}, of which rank {self.rank} of {self.size} holds {held} "
                f"tokens, but got {num_tokens}; give global boundaries, and shard_sizes if the "
                "shards are uneven"
            )
        return tuple(local_pieces(bounds, start, stop) for start, stop in spans)

    @property
    def takes_none(self) -> bool:
        """Whether None may stand for the gradients of finals that nobody uses."""
        return getattr(self.method, "takes_none", False)

    def swap_heads(
        self, num_tokens: int, cu_seqlens: Tensor | None, num_heads: int, device: torch.device
    ) -> Ulysses | None:
        """Return how tokens are swapped for heads if the method is ``"ulysses"``, else None."""
        if self.method_name != "ulysses":
            return None
        check_heads(self.transport, num_heads)
        if self.shard_sizes is not None:  # `locate` has compared them with the tokens
            total = sum(self.shard_sizes)
            spans = [self.spans(total, rank) for rank in range(self.size)]
        else:
            spans_of = None if self.layout == "contiguous" else self.spans
            spans = ask_spans(num_tokens, self.transport, device, spans_of)
        return Ulysses(self.transport, spans)

    def forward(
        self, segments: Sequence[Segment], initial: Tensor, initials: Sequence[Tensor | None]
    ) -> Outcome:
        """Find the entering states, in recomputation without asking any other rank."""
        slot = take_slot()
        kept = None if slot is None else slot.read()
        if kept is not None:
            self._meanwhile()
            found = Outcome([], [], list(kept))
            for i, segment in enumerate(segments):
                o, finals = segment.output(kept[i], initials[i])
                found.o.append(o)
                found.finals.append(finals)
            return found
        if self.check:
            self._check_call(segments[0], initial)
        found = self.method.forward(self.transport, segments, initial, initials, self._meanwhile)
        if slot is not None:
            slot.write(*found.entering)
        return found

    def backward(
        self,
        segments: Sequence[Segment],
        entering: Sequence[Tensor],
        initials: Sequence[Tensor | None],
        d_o: Sequence[Tensor],
        d_finals: Sequence[Tensor],
    ) -> list[Gradients]:
        """Return all gradients, slot by slot."""
        return self.method.backward(self.transport, segments, entering, initials, d_o, d_finals)

    def _default_sizes(self, total: int, num_slots: int) -> tuple[int, ...]:
        sizes = default_shard_sizes(total, num_slots)
        return sizes[::-1] if self._is_mirrored else sizes

    def _check_call(self, segment: Segment, initial: Tensor) -> None:
        fields: dict[str, object] = {
            "operator": type(segment).__name__,
            "method": f"{self.method_name} {self.method}",
            "nodes": self.transport.nodes,
            "fabric": _digest(self.transport.fabric),
            "state shape [B, H, K, V]": list(initial.shape),
            "state dtype": initial.dtype,
        }
        check_agreement(self.transport, "sequence-parallel operator", fields)


def _make_method(method: str, algorithm: str, num_blocks: int | None, overlap: bool) -> Method:
    """Build the method and refuse options that it would have to ignore."""
    if method not in METHODS:
        raise ArgumentError(unknown_name("method", method, METHODS))
    if algorithm not in ALGORITHMS:
        raise ArgumentError(unknown_name("algorithm", algorithm, ALGORITHMS))
    if method == "zeco":
        return Scanned(algorithm, num_blocks, overlap)
    if algorithm != "auto" or num_blocks is not None:
        raise ArgumentError(
            f"method={method!r} has a scan of its own: algorithm={algorithm!r} and "
            f"num_blocks={num_blocks} go with method='zeco' only; leave them out"
        )
    if method == "lasp2":
        return Scanned("gather", None, overlap)
    if not overlap:
        raise ArgumentError(
            f"overlap=False goes with methods 'zeco' and 'lasp2'; {method!r} overlaps nothing"
        )
    return Lasp1() if method == "lasp1" else Local()  # "ulysses" runs each head locally


def _debugging() -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_debug_level() != dist.DebugLevel.OFF


def _digest(fabric: Fabric) -> str:
    """Return a short name for a fabric, as ranks that disagree on it can be told apart."""
    return hashlib.sha256(repr(fabric).encode()).hexdigest()[:12]
