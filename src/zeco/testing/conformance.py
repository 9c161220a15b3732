"""An operator on P ranks against one rank and against its oracle: outputs, states, all gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zeco.collectives.groups import Group
from zeco.core.partition import default_shard_sizes, shard_bounds
from zeco.sequence_parallel import SequenceParallel
from zeco.testing.cases import Case, Inputs, Setting
from zeco.testing.ranks import run_ranks

Results = dict[str, Tensor]
Part = tuple[Tensor, Results]
"""A rank's tokens, as places in the whole sequence, and what it computed for them."""


class Problem:
    """A case in a setting: global inputs, states, and the gradients that outputs get.

    Args:
        case: the operator.
        setting: what it runs on.
        dtype: of the inputs.
        seed: of all of it; the same numbers on every device.
        device: where everything is.
    """

    def __init__(
        self,
        case: Case,
        setting: Setting,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        g = torch.Generator().manual_seed(seed + 1)
        self.case = case
        self.setting = setting
        self.inputs = {n: x.to(device) for n, x in case.inputs(setting, dtype, seed).items()}
        shape = case.state_shape(setting)
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        states = torch.randn(shape, generator=g, dtype=torch.float64).abs()
        self.initial = states.to(device, state_dtype) if setting.states else None
        s = setting
        self.d_o = torch.randn(s.batch, s.length, s.heads, s.value_dim, generator=g).to(
            device, dtype
        )
        self.d_final = torch.randn(shape, generator=g).to(device, state_dtype)
        self.cu_seqlens = (
            None if s.cu_seqlens is None else torch.tensor(s.cu_seqlens, device=device)
        )

    def solve(self, operator: Callable[..., Any], **options: Any) -> Results:
        """Run an operator on the whole sequence; return outputs, final state and gradients."""
        everything = torch.arange(self.setting.length)
        leaves, initial = self._leaves(everything)
        o, final = self._call(operator, leaves, initial, **options)
        return self._results(leaves, initial, o, final, everything, owns_final=True)

    def one_rank(self) -> Results:
        """Run the operator unsharded."""
        return self.solve(self.case.operator, output_final_state=True)

    def oracle(self) -> Results:
        """Run the oracle, whose inputs are widened to fp64."""
        return self.solve(self.case.oracle)

    def sharded(self, num_ranks: int, **options: Any) -> Results:
        """Run the operator on P in-process ranks and put the parts together.

        Args:
            num_ranks: P.
            options: of `zeco.SequenceParallel`.
        """
        return self.join(run_ranks(num_ranks, lambda group: self.on_rank(group, **options)))

    def on_rank(self, group: Group, **options: Any) -> Part:
        """Run the operator on this rank's tokens; return them and its part of the results."""
        setting = self.setting
        slots = SequenceParallel(group, layout=setting.layout).num_slots
        sp = SequenceParallel(
            group, shard_sizes=setting.shard_sizes(slots), layout=setting.layout, **options
        )
        spans = sp.spans(setting.length)
        tokens = torch.cat([torch.arange(start, stop) for start, stop in spans])
        leaves, initial = self._leaves(tokens)
        o, final = self._call(self.case.operator, leaves, initial, output_final_state=True, sp=sp)
        ends_here = sp.num_slots - 1 in sp.slots_of(sp.rank)
        owns_final = ends_here or self.cu_seqlens is not None
        return tokens, self._results(leaves, initial, o, final, tokens, owns_final=owns_final)

    def join(self, parts: Sequence[Part]) -> Results:
        """Put the ranks' results together: tokens in their places, the rest summed."""
        order = torch.cat([tokens for tokens, _ in parts]).argsort()
        joined: Results = {}
        for name in parts[0][1]:
            values = [results[name] for _, results in parts]
            in_sequence = name == "o" or name.removeprefix("d_") in self._sequence_names()
            joined[name] = (
                torch.cat(values, 1)[:, order] if in_sequence else torch.stack(values).sum(0)
            )
        return joined

    def _sequence_names(self) -> set[str]:
        return set(self.inputs) - set(self.case.whole)

    def _leaves(self, tokens: Tensor) -> tuple[Inputs, Tensor | None]:
        leaves = {
            name: (x if name in self.case.whole else x[:, tokens]).clone().requires_grad_()
            for name, x in self.inputs.items()
        }
        initial = None if self.initial is None else self.initial.clone().requires_grad_()
        return leaves, initial

    def _call(
        self, operator: Callable[..., Any], leaves: Inputs, initial: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        return operator(
            **leaves,
            **dict(self.case.options),
            initial_state=initial,
            cu_seqlens=self.cu_seqlens,
            **options,
        )

    def _results(
        self,
        leaves: Inputs,
        initial: Tensor | None,
        o: Tensor,
        final: Tensor,
        tokens: Tensor,
        *,
        owns_final: bool,
    ) -> Results:
        loss = (o * self.d_o[:, tokens]).sum()
        if self.setting.states and owns_final:
            loss = loss + (final * self.d_final).sum()
        loss.backward()
        results = {"o": o.detach()}
        if self.setting.states:
            results["final_state"] = final.detach() * (1.0 if owns_final else 0.0)
        for name, leaf in {**leaves, "initial_state": initial}.items():
            if leaf is not None:
                results[f"d_{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return results


SMALLEST_SCALE = 1e-4
"""Gradients of gates under strong decay are differences of terms of order 1; where what is left of
them is smaller than this, errors are measured against this."""


def relative_errors(found: Results, expected: Results) -> dict[str, float]:
    """Return, for every result, the largest difference over the largest expected value."""
    errors: dict[str, float] = {}
    for name, wanted in expected.items():
        difference = (found[name].double() - wanted.double()).abs()
        if difference.numel() == 0:
            errors[name] = 0.0
            continue
        scale = max(float(wanted.double().abs().max()), SMALLEST_SCALE)
        error = float(difference.max())
        # A NaN must never look like a small error.
        errors[name] = float("inf") if math.isnan(error) else error / scale
    return errors


def on_chunk_boundaries(length: int, num_ranks: int, chunk: int) -> tuple[int, ...]:
    """Return shard sizes that are whole chunks, but for the last.

    >>> on_chunk_boundaries(300, 3, 64)
    (128, 128, 44)
    """
    chunks = default_shard_sizes(-(-length // chunk), num_ranks)
    ends = [min(length, shard_bounds(chunks, rank)[1] * chunk) for rank in range(num_ranks)]
    return tuple(b - a for a, b in zip([0, *ends], ends, strict=False))
