"""One optimizer step, and an evaluation, of a model whose sequences are split over ranks.

A step wants the mean loss over *all* its tokens, whose number n differs between micro-batches m and
replicas d when labels are masked. Each rank's backward pass gives its own term of a sum:

    gradient = sum over m, d, ranks of (gradient of the summed loss)[m, d, rank] / sum over m, d of n

So every rank adds up sums, and one all-reduce over all ranks sums the gradients together with the
counts. No other communication between replicas happens in a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from zeco.core.errors import ArgumentError
from zeco.sequence_parallel import SequenceParallel, cross_entropy, shard_batch
from zeco.training.optimizer import FlatGradients
from zeco.training.sharding import ShardedGradients

Batch = dict[str, Tensor]
NUM_EXTRA = 4  # sums that travel with the gradients: loss, counted tokens, waited and elapsed time
_IGNORED = -100


@dataclass(frozen=True)
class StepResult:
    """What a step measured; the same on every rank, but for the time.

    Attributes:
        loss: mean over the step's counted tokens, in nats, before the update.
        gradient_norm: of the whole model, before clipping.
        num_tokens: counted in the loss.
        wait_share: time that ranks waited for scans, as a share of their time, mean over ranks.
        seconds: this rank's time for the step.
    """

    loss: float
    gradient_norm: float
    num_tokens: int
    wait_share: float
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """Means over the counted tokens of held-out sequences: loss in nats, share of right guesses."""

    loss: float
    accuracy: float
    num_tokens: int


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradients: FlatGradients | ShardedGradients,
    micro_batches: Sequence[Batch],
    sp: SequenceParallel,
    *,
    clip_norm: float | None,
) -> StepResult:
    """Update the parameters once.

    Args:
        model: called as ``model(input_ids, sp=sp, position_ids=...)``.
        optimizer: its learning rates set for this step.
        gradients: over the model's parameters, with ``num_extra=NUM_EXTRA`` or sharded.
        micro_batches: this replica's whole sequences, the same on all ranks that share them;
            tensors input_ids and labels [B, L].
        sp: the ranks that share sequences.
        clip_norm: largest norm of the gradient, or None.

    Raises:
        ArgumentError: no label of the step is to be counted.
    """
    started, waited = time.perf_counter(), sp.exposed_wait_s
    device = gradients.device
    gradients.zero()
    loss_sum = torch.zeros((), dtype=torch.float64)
    num_tokens = 0
    for whole in micro_batches:
        local = shard_batch(to_device(whole, device), sp)
        logits = model(local["input_ids"], sp=sp, position_ids=local["position_ids"])
        loss = cross_entropy(logits, local["shift_labels"], sp, reduction="sum")
        # With one GPU a rank, a second thread for its backward pass only costs the hand-over.
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        loss_sum += loss.detach().double().cpu()
        num_tokens += _count(whole["labels"])
    # All ranks of a sequence know its loss and count: one of them reports.
    reports = 1.0 if sp.rank == 0 else 0.0
    seconds = time.perf_counter() - started
    sums = [float(loss_sum) * reports, num_tokens * reports, sp.exposed_wait_s - waited, seconds]
    total_loss, total_tokens, total_waited, total_seconds = gradients.reduce(sums)
    if not total_tokens:
        raise ArgumentError("the step's labels are all -100, so there is nothing to learn from")
    gradients.divide(total_tokens)
    norm = gradients.clip(clip_norm)
    optimizer.step()
    return StepResult(
        loss=total_loss / total_tokens,
        gradient_norm=float(norm),
        num_tokens=round(total_tokens),
        wait_share=total_waited / total_seconds,
        seconds=time.perf_counter() - started,
    )


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], sp: SequenceParallel) -> Evaluation:
    """Measure a model on this replica's held-out batches; the result is that of all replicas.

    Args:
        model: called as in `train_step`.
        batches: whole sequences, the same on all ranks that share them.
        sp: the ranks that share sequences.

    Raises:
        ArgumentError: no label is to be counted.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for whole in batches:
        local = shard_batch(to_device(whole, device), sp)
        logits = model(local["input_ids"], sp=sp, position_ids=local["position_ids"])
        labels = local["shift_labels"]
        nats = F.cross_entropy(
            logits.flatten(0, 1).double(), labels.flatten(), ignore_index=_IGNORED, reduction="sum"
        )
        counted = labels != _IGNORED
        right = (logits.argmax(-1) == labels) & counted
        sums += torch.stack([nats, right.sum().double(), counted.sum().double()])
    model.train(training)
    if dist.is_initialized():
        dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    if not count:
        raise ArgumentError("no held-out label is counted (all are -100); evaluate on other data")
    return Evaluation(loss / count, right / count, round(count))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _count(labels: Tensor) -> int:
    """Return how many labels are predicted: the first of a sequence has nothing before it."""
    return int((labels[:, 1:] != _IGNORED).sum())
