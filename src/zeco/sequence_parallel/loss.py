"""The loss of a sharded sequence: the mean over all valid tokens of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from zeco.collectives.transport import Transport
from zeco.core.errors import ArgumentError, unknown_name
from zeco.sequence_parallel.batches import IGNORE_INDEX
from zeco.sequence_parallel.context import SequenceParallel

REDUCTIONS = ("mean", "sum")


class _GlobalValueFunction(torch.autograd.Function):
    """Forward: the sum over ranks. Backward: this rank's share alone, the identity.

    A rank's loss is a term of the global one. Each rank starts its own backward pass from 1, so the
    term's gradient is passed on as it is; summing parameters' gradients over the ranks then gives the
    gradient of the global loss, once.
    """

    @staticmethod
    def forward(ctx: Any, transport: Transport, share: Tensor) -> Tensor:
        return transport.all_reduce(share)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Any, ...]:
        return None, d_total


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    sp: SequenceParallel | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross entropy over the tokens of all ranks, the same value on each.

    The gradient on a rank is that of the global loss with respect to its own logits. Parameters then
    hold partial gradients: *sum* them over the ranks of ``sp`` (don't average).

    Args:
        logits: this rank's [B, T, vocabulary].
        labels: this rank's shifted labels [B, T] (``"shift_labels"`` of `shard_batch`).
        sp: the ranks that share the sequence, or None for one device.
        ignore_index: label of tokens that don't count.
        reduction: ``"mean"`` over the valid tokens of all ranks, or ``"sum"``.

    Returns:
        A scalar, fp32 at least; 0 with zero gradients if no token of any rank counts.

    Raises:
        ArgumentError: shapes that don't fit, or another reduction.

    >>> import zeco
    >>> logits, labels = torch.zeros(1, 2, 4), torch.tensor([[1, -100]])
    >>> float(zeco.cross_entropy(logits, labels).exp().round())
    4.0
    """
    if reduction not in REDUCTIONS:
        raise ArgumentError(unknown_name("reduction", reduction, REDUCTIONS))
    if logits.ndim != 3 or tuple(labels.shape) != tuple(logits.shape[:2]):
        raise ArgumentError(
            f"cross_entropy: logits {list(logits.shape)} and labels {list(labels.shape)}, but they "
            "must be [B, T, vocabulary] and [B, T]"
        )
    logits = logits.float() if logits.element_size() < 4 else logits
    total = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=ignore_index, reduction="sum"
    )
    if reduction == "mean":
        count = (labels != ignore_index).sum().to(total.dtype)
        if sp is not None and sp.size > 1:
            count = sp.transport.all_reduce(count)
        total = total / count.clamp(min=1)
    if sp is None or sp.size == 1:
        return total
    return _GlobalValueFunction.apply(sp.transport, total)
