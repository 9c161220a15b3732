"""Parameters, gradients and optimizer states cut over all ranks (FSDP2), with 16-bit arithmetic.

Every rank keeps its part of each parameter in the parameter's own dtype; a block's parameters are put
together before it runs, in the arithmetic's dtype, and dropped behind it. It does not matter whether
ranks share a sequence or hold one each: either way a rank's gradient is a term of a sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm

from zeco.core.errors import ConfigError
from zeco.models import CausalLM


def shard_model(model: CausalLM, *, compute_dtype: torch.dtype | None = None) -> None:
    """Cut a model's parameters over all ranks, in place; call it on every rank, before the optimizer.

    The model must be the same on all ranks. Its gradients are summed over the ranks, not averaged.

    Args:
        model: on this rank's device.
        compute_dtype: of the arithmetic, such as ``torch.bfloat16``; None for the parameters' own.
            Gradients are summed in the parameters' dtype.

    Raises:
        ConfigError: there is no process group.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "config key parallel.shard_parameters = true needs ranks to cut parameters over; start at "
            "least 2, or leave it out"
        )
    parameter = next(model.parameters())
    mesh = init_device_mesh(parameter.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=parameter.dtype)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A plain sum, which gloo has too; division by 1 would be an operation of NCCL's own.
            module.set_force_sum_reduction_for_comms(True)


def join_parts(x: Tensor) -> Tensor:
    """Return a whole tensor; all ranks call this where it is cut."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def cut_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return a tensor, the same on all ranks, on the device of another one and cut as that is."""
    here = whole.to(like.device)
    if not isinstance(like, DTensor):
        return here
    return distribute_tensor(here, like.device_mesh, like.placements)


class ShardedGradients:
    """The gradients of a model after `shard_model`, each rank's part: see `FlatGradients`.

    Args:
        parameters: those to train.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self.parameters[0].device

    def _parts(self) -> list[Tensor]:
        """Return this rank's parts of the gradients, as views."""
        gradients = (p.grad for p in self.parameters)
        return [grad.to_local() for grad in gradients if isinstance(grad, DTensor)]

    def zero(self) -> None:
        """Start a new step."""
        for p in self.parameters:
            p.grad = None

    def reduce(self, sums: Sequence[float]) -> list[float]:
        """Return numbers summed over all ranks; the gradients are so since the backward pass."""
        totals = torch.tensor(sums, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        return totals.tolist()

    def divide(self, divisor: float) -> None:
        """Divide all gradients."""
        for part in self._parts():
            part.div_(divisor)

    def clip(self, largest: float | None) -> Tensor:
        """Scale all gradients so that their common norm is at most ``largest``; return the norm."""
        parts = self._parts()
        square = get_total_norm(parts).double().square()
        dist.all_reduce(square)
        norm = square.sqrt()
        if largest is not None:
            factor = (largest / (norm + 1e-6)).clamp(max=1.0)
            for part in parts:
                part.mul_(factor)
        return norm
