"""The exchange of a sequence that lies whole on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeco.core.documents import Pieces, check_cu_seqlens, local_pieces, whole
from zeco.operators.segment import Gradients, Outcome, Segment


class SingleDevice:
    """The exchange of a sequence that lies whole on one device: there is none."""

    check = False

    def report_failure(self, error: BaseException) -> None:
        """Do nothing: no other rank waits."""

    def mirrored(self) -> SingleDevice:
        """Return this: reversed, the sequence lies whole on this device too."""
        return self

    def is_first(self) -> bool:
        """Return True: the sequence starts here."""
        return True

    def locate(self, num_tokens: int, cu_seqlens: Tensor | None, batch: int) -> tuple[Pieces, ...]:
        """Return the documents among the tokens, which are the whole sequence."""
        if cu_seqlens is None:
            return (whole(num_tokens),)
        bounds = check_cu_seqlens(cu_seqlens, num_tokens, batch)
        return (local_pieces(bounds, 0, num_tokens),)

    def swap_heads(
        self, num_tokens: int, cu_seqlens: Tensor | None, num_heads: int, device: torch.device
    ) -> None:
        """Return None: all heads of all tokens are here."""

    def forward(
        self, segments: Sequence[Segment], initial: Tensor, initials: Sequence[Tensor | None]
    ) -> Outcome:
        """Run the pass from the initial state."""
        (segment,) = segments
        o, finals = segment.output(initial, initials[0])
        return Outcome([o], [finals], [initial])

    def backward(
        self,
        segments: Sequence[Segment],
        entering: Sequence[Tensor],
        initials: Sequence[Tensor | None],
        d_o: Sequence[Tensor],
        d_finals: Sequence[Tensor],
    ) -> list[Gradients]:
        """Replay the pass and take its gradients."""
        (segment,) = segments
        segment.replay(entering[0], initials[0])
        return [segment.backward(d_o[0], d_finals[0])]
