"""Affine maps of recurrent states: what a rank's part of the sequence does to what enters it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zeco.core.transitions import Transition


@dataclass(frozen=True, eq=False)
class AffineMap:
    """``leaving = transition(entering) + update`` with update [B, H, K, V]."""

    update: Tensor
    transition: Transition

    def __call__(self, entering: Tensor) -> Tensor:
        """Apply the map to the state that enters."""
        return self.transition(entering) + self.update

    def adjoint(self, d_entering: Tensor, d_leaving: Tensor | None) -> AffineMap:
        """Return the map that the reverse scan applies to the adjoint that comes from the right.

        With X the gradient that all later ranks send to this rank's leaving state, the gradient
        of its entering state is ``transitionᵀ(X + d_leaving) + d_entering``: again affine in X.

        Args:
            d_entering: gradient [B, H, K, V] that this rank's outputs send to its entering state.
            d_leaving: gradient [B, H, K, V] that reaches this rank's leaving state directly
                (through ``final_state``), or None.
        """
        transposed = self.transition.transpose()
        update = d_entering if d_leaving is None else transposed(d_leaving) + d_entering
        return AffineMap(update, transposed)
