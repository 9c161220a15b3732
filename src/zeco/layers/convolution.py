"""Short causal convolutions, channel by channel, across ranks and within documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zeco.core.errors import ArgumentError, unknown_name
from zeco.core.shapes import check_shapes
from zeco.layers.history import read_history
from zeco.operators.row_convolution import convolve_rows
from zeco.sequence_parallel import SequenceParallel
from zeco.sequence_parallel.methods.method import do_nothing

Activation = Literal["silu", "none"]


class ShortConvolution(nn.Module):
    """A depthwise causal convolution over a few tokens: ``y_t = φ(Σ_j w[:, W-1-j] x_{t-j} + b)``.

    A rank receives the last W-1 tokens before its own from its predecessor (or from several, when
    these hold few), and a token sees none of earlier documents.

    Args:
        channels: D.
        kernel_width: W, at least 1.
        activation: φ, ``"silu"`` or ``"none"``.
        bias: whether b is there.

    Raises:
        ArgumentError: an unusable width or activation.

    >>> ShortConvolution(8, 4)(torch.zeros(1, 5, 8))[0].shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self,
        channels: int,
        kernel_width: int,
        *,
        activation: Activation = "silu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        if kernel_width < 1:
            raise ArgumentError(
                f"ShortConvolution: kernel_width is {kernel_width}, but must be at least 1"
            )
        if activation not in ("silu", "none"):
            raise ArgumentError(
                "ShortConvolution: " + unknown_name("activation", activation, ("silu", "none"))
            )
        self.channels = channels
        self.kernel_width = kernel_width
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(channels, kernel_width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.initialize(None)

    def initialize(self, generator: torch.Generator | None) -> None:
        """Draw the weights uniformly from ±W**-0.5, which keeps variances near one third."""
        bound = self.kernel_width**-0.5
        with torch.no_grad():
            self.weight.uniform_(-bound, bound, generator=generator)
            if self.bias is not None:
                self.bias.zero_()

    def forward(
        self,
        x: Tensor,
        *,
        sp: SequenceParallel | None = None,
        cu_seqlens: Tensor | None = None,
        state: Tensor | None = None,
        output_state: bool = False,
        sizes: Sequence[int] | None = None,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> tuple[Any, Tensor | None]:
        """Convolve this rank's tokens.

        Args:
            x: [B, T, D]; T may be 0, and smaller than W-1.
            sp: the sequence-parallel context, or None.
            cu_seqlens: global boundaries [N+1] of packed documents, or None.
            state: the W-1 tokens before the first, [B, W-1, D], used on the first rank; with
                ``cu_seqlens`` those before each document, [N, W-1, D], the same on every rank.
                Zeros by default.
            output_state: whether to return the second value.
            sizes: channels of parts, as queries, keys and values are, that are wanted one by one.
            meanwhile: work to do while the tokens before the first are under way.

        Returns:
            y [B, T, D], or with ``sizes`` a tuple of its parts, and the last W-1 tokens that this rank
            has seen, shaped as ``state``; with ``cu_seqlens`` zero but for the documents that end here.
        """
        check_shapes("ShortConvolution", {"x": (x, "B T D")}, D=self.channels)
        history = read_history(
            x,
            self.kernel_width - 1,
            sp=sp,
            cu_seqlens=cu_seqlens,
            state=state,
            meanwhile=meanwhile,
        )
        parts = convolve_rows(
            history.context,
            history.others,
            self.weight,
            self.bias,
            silu=self.activation == "silu",
            sizes=sizes,
        )
        parts = tuple(history.merge(part) for part in parts)
        return parts[0] if sizes is None else parts, history.leaving if output_state else None
