"""The delta rules on Flash Linear Attention's kernels: a `Segment` like `zeco.operators.delta`'s.

FLA joins forward and backward in one autograd function, and its own context parallelism gathers
every rank's map. Here its passes (`fla_passes`) are called one by one, so that the rank's map is
known before the outputs are, and any scan may find the state that enters.

A long piece of a document may be cut into runs (`fla_runs`) whose maps are computed side by side;
they make up the rank's map, and the states that enter them let the passes of all runs run at once.
That takes a few launches more, so a call that goes without the map is cut only when it is long.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol, cast

import torch
from torch import Tensor

from zeco.core.documents import Pieces
from zeco.core.maps import AffineMap
from zeco.core.transitions import Dense, Reset, Transition
from zeco.operators.fla_channel_passes import ChannelPasses
from zeco.operators.fla_check import confirm
from zeco.operators.fla_head_passes import HeadPasses
from zeco.operators.fla_passes import DeltaPasses, in_one_row
from zeco.operators.fla_runs import CHUNK, Runs, chunks_per_run, make_runs
from zeco.operators.segment import Gradients, Inputs, Segment

# Programs at once that keep a large GPU busy. FLA's passes have one for each head and run, and this
# many value channels.
_PROGRAMS = 256
_VALUES = 64

# Chunks up to which a call that needs no map goes uncut: launches cost more than the GPU gains.
_UNCUT_CHUNKS = 256


class DeltaOptions(Protocol):
    """What the segment reads of `zeco.operators.delta_call.DeltaRuleOperator`."""

    @property
    def name(self) -> str:
        """The public name."""
        ...

    @property
    def scale(self) -> float:
        """Factor of the queries."""
        ...


class FlaDeltaSegment(Segment):
    """One call of a delta rule; inputs are q, k, v, g, beta, with g None for no gate.

    A *group* is a piece of a document, in all B sequences of the batch at once: B·r runs, the first
    sequence's r first.
    """

    def __init__(self, operator: DeltaOptions, inputs: Inputs, pieces: Pieces) -> None:
        super().__init__(inputs, pieces)
        self.operator = operator
        _, k, v, _, _ = cast("tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]", inputs)
        self.B, self.T, self.H, self.K = k.shape
        self.V = v.shape[3]
        self._found_maps: dict[int, Tensor] = {}
        self._found_total: Tensor | None = None
        self._kept: tuple[Tensor, ...] = ()
        self._mapped = False
        self._own_adjoints: Tensor | None = None
        self._ready = False
        self._has_initials = False

    @property
    def _empty(self) -> bool:
        return self.B * self.T * self.H == 0

    @cached_property
    def _runs(self) -> Runs:
        length = chunks = -(-self.T // CHUNK)
        if self._mapped or chunks > _UNCUT_CHUNKS:
            programs = self.B * self.H * -(-self.V // _VALUES)
            length = chunks_per_run(self.T, programs, _PROGRAMS)
        bounds = self.pieces.bounds
        if self.B > 1:
            bounds = tuple(b * self.T for b in range(self.B + 1))
        return make_runs(bounds, max(1, length), cast("Tensor", self.inputs[1]).device)

    @property
    def _kind(self) -> type[DeltaPasses]:
        g = self.inputs[3]
        return HeadPasses if g is None or g.ndim == 3 else ChannelPasses

    @cached_property
    def _passes(self) -> DeltaPasses:
        q, k, v, g, beta = cast("tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]", self.inputs)
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = (in_one_row(x.to(dtype)) for x in (q, k, v))
        g = None if g is None else in_one_row(g)
        scale, runs = self.operator.scale, self._runs
        passes = self._kind(q, k, v, g, in_one_row(beta), scale=scale, runs=runs)
        if self._kept:
            passes.recall(self._kept)
        return passes

    def _confirm(self, part: str) -> None:
        confirm(self.operator.name, part, self._passes)

    # Groups and their runs.

    def _range(self, group: int) -> tuple[int, int]:
        """Return the first run of a group and one past its last."""
        if len(self.pieces.documents) > 1:
            return self._runs.ranges[group]
        return 0, self._runs.num_runs

    def _is_cut(self, group: int) -> bool:
        first, stop = self._range(group)
        return stop - first > self.B

    def _maps(self, group: int) -> Tensor:
        """Return the maps of a group's runs, update beside transition [B·r, H, K, V + K]."""
        if group not in self._found_maps:
            self._found_maps[group] = self._passes.maps(*self._range(group))
            self._confirm("maps")
        return self._found_maps[group]

    def _total(self) -> Tensor:
        """Return the map of a rank on which no document starts [B, H, K, V + K]."""
        if self._found_total is None:
            from zeco.kernels.delta_maps import compose_maps

            maps = self._maps(0)
            self._found_total = compose_maps(maps, self.B) if self._is_cut(0) else maps
        return self._found_total

    def _starts(self, entering: Tensor, initials: Tensor | None) -> Tensor:
        """Return the states that enter the runs [N, H, K, V]."""
        pieces = self.pieces
        states = [entering] if pieces.continued else []
        zeros = torch.zeros_like(entering)
        states += [zeros if initials is None else initials[i] for i in range(len(pieces.fresh))]
        starts = [self._through(i, state)[0] for i, state in enumerate(states)]
        return starts[0] if len(starts) == 1 else torch.cat(starts)

    def _through(self, group: int, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the states that enter a group's runs, and the one that leaves if that is known."""
        if not self._is_cut(group):
            return state.contiguous(), None
        from zeco.kernels.delta_maps import states_through

        return states_through(self._maps(group), state)

    def _back_through(self, group: int, d_end: Tensor, d_o: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the states that leave a group's runs, and of what enters it."""
        from zeco.kernels.delta_maps import adjoints_through

        own = self._adjoints(d_o)[slice(*self._range(group))]
        return adjoints_through(self._maps(group), own, d_end)

    def _adjoints(self, d_o: Tensor) -> Tensor:
        """Return what the runs' own outputs send to the states that enter them [N, H, K, V]."""
        if self._own_adjoints is None:
            self._own_adjoints = self._passes.adjoints(self._row(d_o))
            self._confirm("adjoints")
        return self._own_adjoints

    def _row(self, d_o: Tensor) -> Tensor:
        return in_one_row(d_o.to(self._passes.q.dtype))

    # The contract.

    def summarize(self, initials: Tensor | None = None) -> AffineMap:
        """Return the rank's map; ``initials`` count when the last piece starts from one of them."""
        self._mapped = True
        if self._empty:
            update = self._zero_state() if initials is None else initials[-1]
            return AffineMap(update, self.transition())
        if not self.pieces.resets:
            return AffineMap(self._total()[..., : self.V].contiguous(), self.transition())
        from zeco.kernels.delta_maps import states_through

        start = self._zero_state() if initials is None else initials[-1]
        _, update = states_through(self._maps(len(self.pieces.documents) - 1), start)
        return AffineMap(update, self.transition())

    def transition(self) -> Transition:
        """Return the product of the runs' transitions."""
        if self.pieces.resets:
            return Reset(among="dense")
        if self._empty:
            identity = torch.eye(self.K, device=cast("Tensor", self.inputs[1]).device)
            return Dense(identity.repeat(self.B, self.H, 1, 1))
        return Dense(self._total()[..., self.V :].contiguous())

    def _zero_state(self) -> Tensor:
        k = cast("Tensor", self.inputs[1])
        return torch.zeros(self.B, self.H, self.K, self.V, device=k.device)

    def output(self, entering: Tensor, initials: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the pass over all runs at once."""
        q, _, v = self.inputs[:3]
        dtype = cast("Tensor", q).dtype
        starts = self._starts(entering, initials)
        if self._empty:
            return cast("Tensor", v).to(dtype), starts.unflatten(0, (-1, self.B))
        o, ends = self._passes.outputs(starts)
        self._confirm("outputs")
        return o.to(dtype).view(self.B, self.T, self.H, self.V), self._of_pieces(ends, -1)

    def _of_pieces(self, states: Tensor, place: int) -> Tensor:
        """Take the states of every piece's first run, place 0, or last, -1: [n, B, H, K, V]."""
        ranges = [self._range(group) for group in range(len(self.pieces.documents))]
        groups = [states[first:stop].unflatten(0, (self.B, -1)) for first, stop in ranges]
        return torch.stack([group[:, place] for group in groups])

    def keep(self) -> tuple[Tensor, ...]:
        """Return what the passes keep, and the maps of a sequence that isn't packed."""
        if self._empty:
            return ()
        maps = self._found_maps if len(self.pieces.documents) == 1 else {}
        total = () if self._found_total is None else (self._found_total,)
        return (*maps.values(), *(total if maps else ()), *self._passes.keep())

    def recall(self, kept: tuple[Tensor, ...]) -> None:
        """Take what `keep` gave, in place of solving the chunks' systems and of a state pass."""
        if not kept:
            return
        number = self._kind.NUM_KEPT
        maps, self._kept = kept[:-number], kept[-number:]
        if maps:
            self._mapped = True
            self._found_maps[0] = maps[0]
        if len(maps) > 1:
            self._found_total = maps[1]

    def adjoint(self, d_o: Tensor, d_finals: Tensor | None) -> Tensor:
        """Return the gradient of the entering state, from all inputs but v, and d_o."""
        self._mapped = True
        if not self.pieces.continued:
            return self._zero_state()
        d_end = self._zero_state()
        if d_finals is not None and len(d_finals) > 1:
            d_end = d_finals[0]
        elif not self._empty and not self._is_cut(0):
            return self._adjoints(d_o)
        return d_end if self._empty else self._back_through(0, d_end, d_o)[1]

    def replay(self, entering: Tensor, initials: Tensor | None) -> None:
        """Recompute the states that the gradients need."""
        self._ready, self._has_initials = True, initials is not None
        if not self._empty:
            self._passes.replay(self._starts(entering, initials))

    def backward(self, d_o: Tensor, d_finals: Tensor) -> Gradients:
        """Return all gradients; `replay` must have run."""
        if not self._ready:
            raise RuntimeError("Segment.backward was called before Segment.replay")
        self._ready = False
        if self._empty:
            zeros = tuple(None if x is None else torch.zeros_like(x) for x in self.inputs)
            return self._as_gradients(zeros, d_finals)
        d_ends = [
            self._back_through(i, d_end, d_o)[0] if self._is_cut(i) else d_end
            for i, d_end in enumerate(d_finals)
        ]
        d_end = d_ends[0].contiguous() if len(d_ends) == 1 else torch.cat(d_ends)
        found = self._passes.gradients(self._row(d_o), d_end)
        self._confirm("gradients")
        inputs = tuple(
            None if x is None or d is None else d.view_as(x).to(x.dtype)
            for x, d in zip(
                self.inputs, (found.q, found.k, found.v, found.g, found.beta), strict=True
            )
        )
        return self._as_gradients(inputs, self._of_pieces(found.starts, 0))

    def _as_gradients(self, inputs: Inputs, d_starts: Tensor) -> Gradients:
        """Sort the gradients of the pieces' starts [n, B, H, K, V]."""
        fresh = d_starts[1:] if self.pieces.continued else d_starts
        entering = d_starts[0] if self.pieces.continued else self._zero_state()
        return Gradients(inputs, entering, fresh if self._has_initials else None)

    def fresh(self, inputs: Inputs | None = None) -> FlaDeltaSegment:
        """Return a segment over other inputs, with nothing kept."""
        return FlaDeltaSegment(
            self.operator, self.inputs if inputs is None else inputs, self.pieces
        )
