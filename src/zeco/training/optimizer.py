"""AdamW with decay on matrices only, warm-up and cosine, clipping by the whole model's norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeco.training.config import OptimizerConfig, ScheduleConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over the model's parameters; those of fewer than two dims don't decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


def learning_rate(step: int, *, peak: float, num_steps: int, schedule: ScheduleConfig) -> float:
    """Return the learning rate of a step, counted from 0.

    Warm-up is linear and reaches the peak at step ``warmup_steps - 1``; the last step has
    ``final_share`` of the peak.

    >>> at = dict(peak=1.0, num_steps=21, schedule=ScheduleConfig(10, 0.1))
    >>> [round(learning_rate(step, **at), 2) for step in (0, 9, 20)]
    [0.1, 1.0, 0.1]
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    # The peak itself is the last warm-up step, or step 0 without warm-up.
    start = max(schedule.warmup_steps - 1, 0)
    progress = min(1.0, (step - start) / max(1, num_steps - 1 - start))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (schedule.final_share + (1 - schedule.final_share) * cosine)


class FlatGradients:
    """All gradients of a model as views of one vector, so that one all-reduce sums them.

    The vector has ``num_extra`` numbers more at its end, for sums that travel along.

    Args:
        parameters: those to train; their ``grad`` becomes a view, which backward adds to.
        num_extra: further numbers.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, num_extra: int) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        size = sum(p.numel() for p in self.parameters)
        first = self.parameters[0]
        self.all = torch.zeros(size + num_extra, dtype=first.dtype, device=first.device)
        self.gradients, self.extra = self.all[:size], self.all[size:]
        offset = 0
        for p in self.parameters:
            p.grad = self.gradients[offset : offset + p.numel()].view_as(p)
            offset += p.numel()

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self.all.device

    def zero(self) -> None:
        """Start a new step."""
        self.all.zero_()

    def reduce(self, sums: Sequence[float]) -> list[float]:
        """Sum the gradients over all ranks, and with them ``num_extra`` numbers, which are returned."""
        self.extra.copy_(torch.tensor(sums, dtype=torch.float64))
        if dist.is_initialized():
            dist.all_reduce(self.all)
        return self.extra.tolist()

    def divide(self, divisor: float) -> None:
        """Divide all gradients."""
        self.gradients.div_(divisor)

    def clip(self, largest: float | None) -> Tensor:
        """Scale all gradients so that their common norm is at most ``largest``.

        Call it after the sum over ranks: a norm of partial gradients is no norm of the gradient.

        Returns:
            The norm before clipping.
        """
        norm = torch.linalg.vector_norm(self.gradients)
        if largest is not None:
            self.gradients.mul_((largest / (norm + 1e-6)).clamp(max=1.0))
        return norm
