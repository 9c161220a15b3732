"""The passes of the delta family on Flash Linear Attention's kernels, fla-core 0.6.0.

Everything that this package knows of FLA's functions for these operators is here; `fla_check` holds
them to a version and to the torch backend's numbers. They are not FLA's public operators, which
join all passes in one autograd function and leave no room for an exchange between them.

FLA's conventions: tensors [1, T, H, width], sequences one behind the other as ``cu_seqlens`` says;
cumulative gates in base 2; states [N, H, K, V] fp32, one a sequence, which here is a run
(`zeco.operators.fla.runs`). Its names: w and u are the WY rows (u - w S is what a chunk's tokens
write), A the inverse of their overlaps, h the state that enters each chunk.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

from torch import Tensor

from zeco.operators.fla.runs import Runs
from zeco.operators.segment import Inputs

GivenT = TypeVar("GivenT")

_DeltaInputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]

PER_LN2 = 1 / math.log(2)


@dataclass(frozen=True, eq=False)
class PassGradients:
    """Gradients of what a call was given.

    Attributes:
        inputs: one for each of the operator's tensors, None for none.
        starts: of the states that enter the runs [N, H, K, V].
    """

    inputs: Inputs
    starts: Tensor


class Passes(ABC):
    """The passes over one call's runs; what several of them need is kept.

    Args:
        inputs: the operator's tensors [1, T, H, ...], contiguous, in its own order.
        scale: factor of the queries.
        runs: how the T tokens are cut.
    """

    CHUNK: ClassVar[int]
    """Tokens a chunk."""

    PROGRAMS: ClassVar[int] = 128
    """Programs at once of a pass that carries a state, from which on more runs gain nothing."""

    NUM_KEPT: ClassVar[int]
    """How many tensors `keep` returns."""

    def __init__(self, inputs: Inputs, *, scale: float, runs: Runs) -> None:
        self.inputs = inputs
        self.scale = scale
        self.runs = runs
        self.where: dict[str, Any] = {
            "cu_seqlens": runs.cu_seqlens,
            "chunk_indices": runs.chunk_indices,
        }
        self._replayed: tuple[Tensor, Tensor] | None = None
        self.reach: Tensor | None = None
        """How far into each run what enters it reaches, as `maps` of all runs finds it."""

    @abstractmethod
    def maps(self, first: int, stop: int) -> Tensor:
        """Return the maps of some runs, update beside transition: fp32 [stop - first, H, K, V + K]."""

    def _with_reach(self, maps: Tensor, reach: Tensor) -> Tensor:
        """Keep how far what enters the runs reaches, if it is known of all; return their maps."""
        if len(maps) == self.runs.num_runs:
            self.reach = reach
        return maps

    @abstractmethod
    def outputs(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [1, T, H, V] and the states that leave the runs [N, H, K, V].

        Args:
            starts: the states that enter the runs [N, H, K, V].
        """

    @abstractmethod
    def adjoints(self, d_o: Tensor) -> Tensor:
        """Return the gradients [N, H, K, V] that the runs' own outputs send to what enters them.

        Args:
            d_o: gradient of the outputs [1, T, H, V].
        """

    @abstractmethod
    def replay(self, starts: Tensor) -> None:
        """Recompute the states inside the runs, and keep them for `gradients`."""

    @abstractmethod
    def gradients(self, d_o: Tensor, d_ends: Tensor) -> PassGradients:
        """Return all gradients; `replay` must have run.

        Args:
            d_o: gradient of the outputs [1, T, H, V].
            d_ends: gradient of the states that leave the runs [N, H, K, V].
        """

    @abstractmethod
    def keep(self) -> tuple[Tensor, ...]:
        """Return what FLA's own operators keep for their backward pass, and it isn't cheap to redo."""

    @abstractmethod
    def recall(self, kept: tuple[Tensor, ...]) -> None:
        """Take what `keep` of passes over the same tensors gave."""


class DeltaPasses(Passes):
    """The passes of the delta rules; inputs are q, k, v, g, beta, with g None for no gate."""

    CHUNK = 64

    def __init__(self, inputs: Inputs, *, scale: float, runs: Runs) -> None:
        super().__init__(inputs, scale=scale, runs=runs)
        self.q, self.k, self.v, self.g, self.beta = cast("_DeltaInputs", inputs)
        self._offsets: Any = runs.chunk_offsets
        self._decay = self._cumulative()

    def _cumulative(self) -> Tensor | None:
        """Sum the gates within chunks, in base 2."""
        if self.g is None:
            return None
        return call_fla(
            "ops.utils",
            "chunk_local_cumsum",
            self.g,
            chunk_size=self.CHUNK,
            scale=PER_LN2,
            **self.where,
        )

    def _maps(self, k: Tensor, w: Tensor, u: Tensor, first: int, stop: int) -> Tensor:
        from zeco.kernels.delta.run_maps import run_maps

        cuts = self.runs.cu_seqlens
        found = run_maps(k, w, u, self._decay, cu_seqlens=cuts, first=first, stop=stop)
        return self._with_reach(*found)

    def _own_adjoints(
        self,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        d_o: Tensor,
        *,
        inner: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> Tensor:
        """Return what `adjoints` does; see `zeco.kernels.delta.adjoints.run_adjoints`."""
        from zeco.kernels.delta.adjoints import run_adjoints

        return run_adjoints(
            q,
            k,
            w,
            d_o,
            self._decay,
            inner=inner,
            scores=scores,
            scale=self.scale,
            cu_seqlens=self.runs.cu_seqlens,
            reach=self.reach,
        )

    def _states(
        self, k: Tensor, w: Tensor, u: Tensor, starts: Tensor, **gate: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state that enters each chunk, what the tokens write, and the runs' ends."""
        h, written, ends = call_fla(
            "ops.common.chunk_delta_h",
            "chunk_gated_delta_rule_fwd_h",
            k=k,
            w=w,
            u=u,
            initial_state=starts,
            output_final_state=True,
            chunk_size=self.CHUNK,
            chunk_offsets=self._offsets,
            **self.where,
            **gate,
        )
        return h, taken(written), taken(ends)

    def _adjoints(
        self,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        d_o: Tensor,
        d_written: Tensor,
        d_ends: Tensor,
        **gate: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the states that leave the chunks, of those that enter the runs,
        and of what the tokens write.

        Args:
            q: queries, decayed if the gates are per channel.
            k: keys, decayed likewise.
            w: WY rows.
            d_o: gradient of the outputs.
            d_written: what it sends to what the tokens of the same chunk write.
            d_ends: gradient of the states that leave the runs.
            gate: ``g`` or ``gk``.
        """
        dh, d_starts, d_written = call_fla(
            "ops.common.chunk_delta_h",
            "chunk_gated_delta_rule_bwd_dhu",
            q=q,
            k=k,
            w=w,
            do=d_o,
            dv=d_written,
            h0=d_ends,  # only its shape counts: FLA asks for it to return the gradient of one
            dht=d_ends,
            scale=self.scale,
            chunk_size=self.CHUNK,
            chunk_offsets=self._offsets,
            **self.where,
            **gate,
        )
        return dh, d_starts, d_written


def call_fla(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    """Call a function of FLA, imported now; its own annotations miss some of what it takes."""
    return getattr(importlib.import_module(f"fla.{module}"), function)(*args, **kwargs)


def taken(x: GivenT | None) -> GivenT:
    """Return what an earlier pass left."""
    if x is None:
        raise RuntimeError("a pass of the delta rules was called before the one that it needs")
    return x


def in_one_row(x: Tensor) -> Tensor:
    """Return [B, T, ...] as [1, B*T, ...]."""
    return x.contiguous().flatten(0, 1).unsqueeze(0)
