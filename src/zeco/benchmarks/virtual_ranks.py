"""P virtual ranks on one device: what sequence parallelism adds to a rank's own work.

The ranks run one after the other, so that every scan has arrived when it is asked for: what is left
of its cost on the rank's own stream is the state pass before it and the injection of what it brought.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zeco.core.maps import AffineMap
from zeco.operators.segment import Gradients, Outcome, Segment
from zeco.operators.single_device import SingleDevice
from zeco.sequence_parallel.methods.method import add_to_last
from zeco.testing.conformance import Problem, Results


class VirtualRank(SingleDevice):
    """The exchange of a rank whose scans have arrived.

    Args:
        is_first: whether the sequence starts here; ``entering`` isn't used then.
        entering: the state [B, H, K, V] that the scan has brought.
        arrived: the adjoint [B, H, K, V] that the reverse scan has brought; None on the last rank.

    Attributes:
        own: the rank's map, once its forward pass has run.
        own_adjoint: the map that the reverse scan applies, once its backward pass has run.
    """

    takes_none = True
    """As `zeco.sequence_parallel.methods.scanned.Scanned` does."""

    def __init__(
        self, *, is_first: bool, entering: Tensor | None = None, arrived: Tensor | None = None
    ) -> None:
        self._is_first = is_first
        self.entering = entering
        self.arrived = arrived
        self.own: AffineMap | None = None
        self.own_adjoint: AffineMap | None = None

    def is_first(self) -> bool:
        """Whether the sequence starts here."""
        return self._is_first

    def forward(
        self, segments: Sequence[Segment], initial: Tensor, initials: Sequence[Tensor | None]
    ) -> Outcome:
        """State pass, whose map is kept for the next rank; output pass with what has arrived."""
        (segment,) = segments
        self.own = segment.summarize(initials[0])
        if self.entering is None:
            self.entering = initial
        segment.prepare()
        o, finals = segment.output(self.entering, initials[0])
        return Outcome([o], [finals], [self.entering])

    def backward(
        self,
        segments: Sequence[Segment],
        entering: Sequence[Tensor],
        initials: Sequence[Tensor | None],
        d_o: Sequence[Tensor],
        d_finals: Sequence[Tensor | None],
    ) -> list[Gradients]:
        """Adjoint state pass, whose map is kept for the rank before; then all gradients."""
        (segment,) = segments
        d_leaving = d_finals[0]
        d_entering = segment.adjoint(d_o[0], d_leaving)
        own = AffineMap(d_entering, segment.transition())
        self.own_adjoint = own.adjoint(d_entering, None if d_leaving is None else d_leaving[-1])
        segment.replay(entering[0], initials[0])
        if self.arrived is not None:
            d_leaving = add_to_last(d_leaving, self.arrived)
        elif d_leaving is None:
            d_leaving = torch.zeros_like(entering[0]).unsqueeze(0)
        return [segment.backward(d_o[0], d_leaving)]


def solve_on_ranks(
    problem: Problem, num_ranks: int, **options: Any
) -> tuple[Results, list[VirtualRank]]:
    """Run a problem on virtual ranks; return the joined results and the ranks, states arrived.

    Args:
        problem: with states, not packed.
        num_ranks: P.
        options: of the operator.
    """
    shares = torch.arange(problem.setting.length).tensor_split(num_ranks)
    ranks: list[VirtualRank] = []
    calls: list[_RankCall] = []
    entering: Tensor | None = None
    for number, tokens in enumerate(shares):
        rank = VirtualRank(is_first=number == 0, entering=entering)
        calls.append(_RankCall(problem, tokens, rank, options))
        ranks.append(rank)
        if rank.own is None or rank.entering is None:
            raise RuntimeError("an operator did not run the forward pass of its exchange")
        entering = rank.own(rank.entering).detach()
    arrived: Tensor | None = None
    for number in reversed(range(num_ranks)):
        rank = ranks[number]
        rank.arrived = arrived
        calls[number].backward(is_last=number == num_ranks - 1)
        if rank.own_adjoint is None:
            raise RuntimeError("an operator did not run the backward pass of its exchange")
        zeros = torch.zeros_like(rank.own_adjoint.update)
        arrived = rank.own_adjoint(zeros if arrived is None else arrived)
    return problem.join([(call.tokens, call.results(problem)) for call in calls]), ranks


class _RankCall:
    """A rank's call of the operator, between its forward and its backward pass."""

    def __init__(
        self, problem: Problem, tokens: Tensor, rank: VirtualRank, options: dict[str, Any]
    ) -> None:
        whole = problem.case.whole
        self.tokens = tokens
        self.leaves = {
            n: (x if n in whole else x[:, tokens]).clone().requires_grad_()
            for n, x in problem.inputs.items()
        }
        initial = problem.initial
        self.initial = None if initial is None else initial.clone().requires_grad_()
        self.o, self.final = problem.case.operator(
            **self.leaves,
            **dict(problem.case.options),
            initial_state=self.initial,
            output_final_state=True,
            sp=rank,
            **options,
        )
        self.d_o, self.d_final = problem.d_o[:, tokens], problem.d_final
        self.is_last = False

    def backward(self, *, is_last: bool) -> None:
        self.is_last = is_last
        gradient = self.d_final if is_last else torch.zeros_like(self.final)
        torch.autograd.backward([self.o, self.final], [self.d_o, gradient])

    def results(self, problem: Problem) -> Results:
        found: Results = {"o": self.o.detach()}
        if problem.setting.states:
            found["final_state"] = self.final.detach() * float(self.is_last)
        for name, leaf in {**self.leaves, "initial_state": self.initial}.items():
            if leaf is not None:
                found[f"d_{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return found


def middle_rank(call: Callable[..., Tensor], backward: Callable[[Tensor], object]) -> VirtualRank:
    """Return a middle rank, made from a call's own states: its neighbours hold the same tokens.

    Args:
        call: the operator on the rank's tokens; takes ``sp``.
        backward: runs the backward pass of its outputs.
    """
    first = VirtualRank(is_first=True)
    backward(call(sp=first))
    if first.own is None or first.own_adjoint is None or first.entering is None:
        raise RuntimeError("an operator did not run the passes of its exchange")
    return VirtualRank(
        is_first=False,
        entering=first.own(first.entering).detach(),
        arrived=first.own_adjoint(torch.zeros_like(first.entering)).detach(),
    )
