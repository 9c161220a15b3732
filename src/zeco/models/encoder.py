"""A bidirectional encoder, trained to fill in masked tokens, on one device or over many."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco.core.errors import ArgumentError
from zeco.core.shapes import check_shapes
from zeco.models.backbone import Backbone
from zeco.sequence_parallel import SequenceParallel, cross_entropy
from zeco.sequence_parallel.batches import IGNORE_INDEX


class Encoder(Backbone):
    """Tokens to logits of themselves: the blocks of `CausalLM`, with mixers that look both ways.

    Any layer list serves. Short convolutions and the token shifts of RWKV look back only, here too;
    set ``conv_width=0`` for layers without.

    Args:
        config: sizes and mixers.
        seed: of the initial parameters; None draws them from torch's global generator.

    Source: Devlin et al., BERT, arXiv:1810.04805, for its masked language model alone.

    >>> from zeco.models import ModelConfig
    >>> encoder = Encoder(ModelConfig(width=16, num_layers=1, num_heads=2), seed=0)
    >>> encoder(torch.zeros(1, 5, dtype=torch.int64)).shape
    torch.Size([1, 5, 256])
    """

    def forward(
        self,
        input_ids: Tensor,
        *,
        sp: SequenceParallel | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of each of this rank's tokens, [B, T, vocab_size].

        Args:
            input_ids: [B, T], integers below ``vocab_size``.
            sp: the sequence-parallel context when the sequence is split over ranks, else None.
            position_ids: positions [B, T] or [T] in the whole sequence; by default 0, 1, …, where
                the sequence is whole (only mixers with positions use them).
            cu_seqlens: global boundaries [N+1] of packed documents (B = 1), or None.

        Raises:
            ArgumentError: a shape or dtype doesn't fit.
        """
        logits, _ = self.run(
            input_ids,
            sp=sp,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            bidirectional=True,
        )
        return logits


def mask_tokens(
    input_ids: Tensor,
    *,
    mask_id: int,
    vocab_size: int,
    rate: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Hide tokens at random, for `masked_lm_loss`.

    Of the tokens picked 8 in 10 become ``mask_id``, 1 in 10 a random token, and 1 in 10 stay.

    Args:
        input_ids: whole sequences [B, L], before they are cut, so that all ranks agree.
        mask_id: the token that stands for a hidden one.
        vocab_size: random tokens are below it.
        rate: the share of tokens picked, in 0..1.
        generator: of the draws, on the tokens' device, seeded alike on every rank; None for torch's
            global one.

    Returns:
        The inputs [B, L], and the labels [B, L]: the hidden tokens, -100 elsewhere. `shard_batch`
        cuts both; the encoder's loss takes its ``"labels"``, not its ``"shift_labels"``.

    Raises:
        ArgumentError: a rate outside of 0..1, a mask_id outside of the vocabulary, or another shape.

    Source: Devlin et al., BERT, arXiv:1810.04805, section 3.1.

    >>> ids, labels = mask_tokens(torch.ones(1, 3, dtype=torch.int64), mask_id=0, vocab_size=2, rate=0)
    >>> ids.tolist(), labels.tolist()
    ([[1, 1, 1]], [[-100, -100, -100]])
    """
    check_shapes("mask_tokens", {"input_ids": (input_ids, "B L")})
    if not 0 <= rate <= 1:
        raise ArgumentError(f"mask_tokens: rate={rate}, but must be in 0..1")
    if not 0 <= mask_id < vocab_size:
        raise ArgumentError(
            f"mask_tokens: mask_id={mask_id}, but must be a token, in 0..{vocab_size - 1}"
        )
    shape, device = input_ids.shape, input_ids.device
    picked = torch.rand(shape, generator=generator, device=device) < rate
    kind = torch.rand(shape, generator=generator, device=device)
    others = torch.randint(
        vocab_size, shape, generator=generator, device=device, dtype=input_ids.dtype
    )
    changed = torch.where(kind < 0.8, torch.full_like(input_ids, mask_id), others)
    inputs = torch.where(picked & (kind < 0.9), changed, input_ids)
    return inputs, input_ids.masked_fill(~picked, IGNORE_INDEX)


def masked_lm_loss(logits: Tensor, labels: Tensor, sp: SequenceParallel | None = None) -> Tensor:
    """Return the cross entropy over the hidden tokens of all ranks, the same value on each.

    Args:
        logits: of this rank's tokens [B, T, vocab_size].
        labels: this rank's part of the labels of `mask_tokens` [B, T], *not* shifted.
        sp: the ranks that share the sequence, or None.

    Returns:
        A scalar, 0 if no token is hidden; gradients as in `zeco.cross_entropy`.
    """
    return cross_entropy(logits, labels, sp)
