"""The delta family on Flash Linear Attention's kernels: a `Segment` like that of `delta.segment`.

FLA joins forward and backward in one autograd function, and its own context parallelism gathers
every rank's map. Here its passes (`fla_passes`) are called one by one, so that the rank's map is
known before the outputs are, and any scan may find the state that enters.

A long piece of a document may be cut into runs (`fla_runs`) whose maps are computed side by side;
they make up the rank's map, and the states that enter them let the passes of all runs run at once.
That takes a few launches more, so a call that goes without the map is cut only when it is long.
"""

from __future__ import annotations

from functools import cached_property, reduce
from typing import cast

import torch
from torch import Tensor

from zeco.core.captures import hold
from zeco.core.documents import Pieces
from zeco.core.maps import AffineMap
from zeco.core.transitions import Dense, Reset, Transition
from zeco.operators.delta.segment import DeltaFamilyOperator
from zeco.operators.fla.check import ROWS, confirm
from zeco.operators.fla.passes import Passes, in_one_row, taken
from zeco.operators.fla.runs import Runs, chunks_per_run, make_runs
from zeco.operators.segment import Gradients, Inputs, Segment

# Value channels of a program of the passes that carry a state; there is one for each head and run.
_VALUES = 64

# Chunks up to which a call that needs no map goes uncut: launches cost more than the GPU gains.
_UNCUT_CHUNKS = 64


class FlaDeltaSegment(Segment):
    """One call of an operator of the family on the passes of its kind.

    A *group* is a piece of a document, in all B sequences of the batch at once: B·r runs, the first
    sequence's r first.
    """

    def __init__(
        self, operator: DeltaFamilyOperator, inputs: Inputs, pieces: Pieces, kind: type[Passes]
    ) -> None:
        super().__init__(inputs, pieces)
        self.operator = operator
        self.kind = kind
        self.B, self.H, self.K, self.V = operator.state_shape(inputs)
        first = cast("Tensor", inputs[0])
        self.T, self.dtype, self.device = first.shape[1], first.dtype, first.device
        self._found_maps: dict[int, Tensor] = {}
        self._found_total: tuple[Tensor | None, Tensor] | None = None
        self._before: Tensor | None = None
        self._after: Tensor | None = None
        self._found_starts: Tensor | None = None
        self._recalled_starts: Tensor | None = None
        self._kept: tuple[Tensor, ...] = ()
        self._recalled_reach: Tensor | None = None
        self._mapped = False
        self._own_adjoints: Tensor | None = None
        self._ready = False
        self._has_initials = False

    @property
    def _empty(self) -> bool:
        return self.B * self.T * self.H == 0

    @cached_property
    def _runs(self) -> Runs:
        chunk = self.kind.CHUNK
        length = chunks = -(-self.T // chunk)
        if self._mapped or chunks > _UNCUT_CHUNKS:
            programs = self.B * self.H * -(-self.V // _VALUES)
            length = chunks_per_run(chunks, programs, self.kind.PROGRAMS)
        bounds = self.pieces.bounds
        if self.B > 1:
            bounds = tuple(b * self.T for b in range(self.B + 1))
        return hold(make_runs(bounds, max(1, length), chunk, self.device), self.device)

    @cached_property
    def _passes(self) -> Passes:
        # The kernels take one dtype for all rows; on a GPU a call comes with one.
        named = dict(zip(self.operator.input_names, self.inputs, strict=True))
        rows = {name: x for name, x in named.items() if name in ROWS and x is not None}
        dtype = reduce(torch.promote_types, (x.dtype for x in rows.values()))
        named |= {name: x.to(dtype) for name, x in rows.items()}
        inputs = tuple(None if x is None else in_one_row(x) for x in named.values())
        passes = self.kind(inputs, scale=self.operator.scale, runs=self._runs)
        if self._kept:
            passes.recall(self._kept)
        passes.reach = self._recalled_reach
        return passes

    def _confirm(self, part: str) -> None:
        confirm(self.operator, part, self._passes)

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

    def _total(self) -> tuple[Tensor | None, Tensor]:
        """Return the map of a rank on which no document starts: update and transition.

        The update [B, H, K, V] is None when it isn't known any more.
        """
        if self._found_total is None:
            from zeco.kernels.delta.maps import compose_maps

            maps = self._maps(0)
            if self._is_cut(0):
                *total, self._before = compose_maps(maps, self.B)
                self._found_total = total[0], total[1]
            else:
                update, transition = maps.split([self.V, self.K], -1)
                self._found_total = update.contiguous(), transition.contiguous()
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
        from zeco.kernels.delta.maps import apply_maps, states_through

        if self._before is not None:  # there is one group
            return apply_maps(self._before, state), None
        return states_through(self._maps(group), state)

    def _back_through(self, group: int, d_end: Tensor, d_o: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the states that leave a group's runs, and of what enters it, if
        that isn't known already."""
        from zeco.kernels.delta.maps import adjoints_through, apply_maps

        if self._after is not None:  # there is one group
            return apply_maps(self._after, d_end), None
        own = self._adjoints(d_o)[slice(*self._range(group))]
        return adjoints_through(self._maps(group), own, d_end)

    def _adjoints(self, d_o: Tensor) -> Tensor:
        """Return what the runs' own outputs send to the states that enter them [N, H, K, V]."""
        if self._own_adjoints is None:
            self._own_adjoints = self._passes.adjoints(self._row(d_o))
            self._confirm("adjoints")
        return self._own_adjoints

    def _row(self, d_o: Tensor) -> Tensor:
        return in_one_row(d_o.to(cast("Tensor", self._passes.inputs[0]).dtype))

    # The contract.

    def summarize(self, initials: Tensor | None = None) -> AffineMap:
        """Return the rank's map; ``initials`` count when the last piece starts from one of them."""
        self._mapped = True
        if self._empty:
            update = self._zero_state() if initials is None else initials[-1]
            return AffineMap(update, self.transition())
        if not self.pieces.resets:
            return AffineMap(taken(self._total()[0]), self.transition())
        from zeco.kernels.delta.maps import states_through

        start = self._zero_state() if initials is None else initials[-1]
        _, update = states_through(self._maps(len(self.pieces.documents) - 1), start)
        return AffineMap(update, self.transition())

    def transition(self) -> Transition:
        """Return the product of the runs' transitions."""
        if self.pieces.resets:
            return Reset(among="dense")
        if self._empty:
            identity = torch.eye(self.K, device=self.device)
            return Dense(identity.repeat(self.B, self.H, 1, 1))
        return Dense(self._total()[1])

    def _zero_state(self) -> Tensor:
        return torch.zeros(self.B, self.H, self.K, self.V, device=self.device)

    def output(self, entering: Tensor, initials: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the pass over all runs at once."""
        starts = self._found_starts = self._starts(entering, initials)
        if self._empty:
            o = torch.empty(self.B, self.T, self.H, self.V, dtype=self.dtype, device=self.device)
            return o, starts.unflatten(0, (-1, self.B))
        o, ends = self._passes.outputs(starts)
        self._confirm("outputs")
        return o.to(self.dtype).view(self.B, self.T, self.H, self.V), self._of_pieces(ends, -1)

    def _of_pieces(self, states: Tensor, place: int) -> Tensor:
        """Take the states of every piece's first run, place 0, or last, -1: [n, B, H, K, V]."""
        ranges = [self._range(group) for group in range(len(self.pieces.documents))]
        groups = [states[first:stop].unflatten(0, (self.B, -1)) for first, stop in ranges]
        if len(groups) == 1 and (place == 0 or not self._is_cut(0)):
            return groups[0][:, place].unsqueeze(0)
        # Copied: a caller who keeps the last run's state shouldn't keep all runs'.
        return torch.stack([group[:, place] for group in groups])

    def keep(self) -> tuple[Tensor, ...]:
        """Return what the passes keep; and of a sequence that isn't packed the runs' maps, how far
        what enters them reaches, their transition together, or nothing in its place, and the states
        that entered them."""
        if self._empty:
            return ()
        maps, total = self._found_maps, self._found_total
        if not maps or len(self.pieces.documents) > 1 or self._found_starts is None:
            return self._passes.keep()
        transition = maps[0].new_empty(0) if total is None else total[1]
        reach = taken(self._passes.reach)
        return (maps[0], reach, transition, self._found_starts, *self._passes.keep())

    def recall(self, kept: tuple[Tensor, ...]) -> None:
        """Take what `keep` gave, in place of solving the chunks' systems and of a state pass."""
        if self._empty:
            return
        count = len(kept) - self.kind.NUM_KEPT
        own, self._kept = kept[:count], kept[count:]
        if own:
            self._mapped = True
            maps, self._recalled_reach, transition, self._recalled_starts = own
            self._found_maps[0] = maps
            if transition.numel():
                self._found_total = None, transition

    def adjoint(self, d_o: Tensor, d_finals: Tensor | None) -> Tensor:
        """Return the gradient of the entering state, from all inputs but v, and d_o."""
        self._mapped = True
        if not self.pieces.continued:
            return self._zero_state()
        is_whole = len(self.pieces.documents) == 1
        if self._empty:
            return self._zero_state() if is_whole or d_finals is None else d_finals[0]
        if not is_whole:
            d_end = self._zero_state() if d_finals is None else d_finals[0]
            return taken(self._back_through(0, d_end, d_o)[1])
        own = self._adjoints(d_o)
        if self._is_cut(0):
            from zeco.kernels.delta.maps import compose_adjoints

            own, self._after = compose_adjoints(self._maps(0), own, self.B)
        return own

    def replay(self, entering: Tensor, initials: Tensor | None) -> None:
        """Recompute the states that the gradients need."""
        self._ready, self._has_initials = True, initials is not None
        if not self._empty:
            starts = self._recalled_starts
            self._passes.replay(self._starts(entering, initials) if starts is None else starts)

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
            for x, d in zip(self.inputs, found.inputs, strict=True)
        )
        return self._as_gradients(inputs, self._of_pieces(found.starts, 0))

    def _as_gradients(self, inputs: Inputs, d_starts: Tensor) -> Gradients:
        """Sort the gradients of the pieces' starts [n, B, H, K, V]."""
        fresh = d_starts[1:] if self.pieces.continued else d_starts
        entering = d_starts[0] if self.pieces.continued else self._zero_state()
        return Gradients(inputs, entering, fresh if self._has_initials else None)

    def fresh(self, inputs: Inputs | None = None) -> FlaDeltaSegment:
        """Return a segment over other inputs, with nothing kept."""
        inputs = self.inputs if inputs is None else inputs
        return FlaDeltaSegment(self.operator, inputs, self.pieces, self.kind)
