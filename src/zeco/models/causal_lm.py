"""A causal language model of linear-attention blocks, on one device or over many."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeco.layers import MixerState
from zeco.models.backbone import Backbone, States
from zeco.sequence_parallel import SequenceParallel, gather_final_state


class CausalLM(Backbone):
    """Tokens to logits of the next token, through pre-norm blocks of a mixer and a gated MLP.

    Args:
        config: sizes and mixers.
        seed: of the initial parameters; None draws them from torch's global generator.

    >>> import torch
    >>> from zeco.models import ModelConfig
    >>> model = CausalLM(ModelConfig(width=16, num_layers=1, num_heads=2), seed=0)
    >>> model(torch.zeros(1, 5, dtype=torch.int64)).shape
    torch.Size([1, 5, 256])
    """

    def forward(
        self,
        input_ids: Tensor,
        *,
        sp: SequenceParallel | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        states: Sequence[MixerState] | None = None,
        output_states: bool = False,
    ) -> Tensor | tuple[Tensor, States]:
        """Return the logits of the token after each of this rank's.

        Args:
            input_ids: [B, T], integers below ``vocab_size``.
            sp: the sequence-parallel context when the sequence is split over ranks, else None.
            position_ids: positions [B, T] or [T] in the whole sequence; by default 0, 1, …, where
                the sequence is whole and starts here (only mixers with positions use them).
            cu_seqlens: global boundaries [N+1] of packed documents (B = 1), or None.
            states: what an earlier call's tokens have left; see `MixerState`.
            output_states: whether to return the second value too.

        Returns:
            Logits [B, T, vocab_size]; with ``output_states`` also the states that these leave.

        Raises:
            ArgumentError: a shape or dtype doesn't fit, or the states are another model's.
        """
        logits, leaving = self.run(
            input_ids,
            sp=sp,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            states=states,
            output_states=output_states,
        )
        return (logits, leaving) if output_states else logits


def gather_states(
    states: States, sp: SequenceParallel, *, cu_seqlens: Tensor | None = None
) -> States:
    """Give every rank the states with which the sequence ends, to decode or to read on.

    Args:
        states: what a sharded call left on this rank.
        sp: the ranks that share the sequence.
        cu_seqlens: the global document boundaries of that call, or None.
    """
    return tuple(
        MixerState(
            gather_final_state(state.recurrent, sp, cu_seqlens=cu_seqlens),
            tuple(gather_final_state(h, sp, cu_seqlens=cu_seqlens) for h in state.histories),
        )
        for state in states
    )
