"""What a layer needs only after its operator or its halo: work for the time of an exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

ResultT = TypeVar("ResultT")


class Deferred(Generic[ResultT]):
    """What is computed while an exchange is under way, or at the latest when it is asked for.

    The work runs as it would have where this was made: inside of an operator, where it may run,
    autograd, autocast and the precision of matrix products are the operator's own.

    Args:
        work: returns it; a function of nothing that the operator is given to differentiate.
        device: where it computes.
    """

    def __init__(self, work: Callable[[], ResultT], device: torch.device) -> None:
        self._work: Callable[[], ResultT] | None = work
        self._value: ResultT | None = None
        self._records = torch.is_grad_enabled()
        self._device_type = device.type
        self._autocasts = torch.is_autocast_enabled(device.type)
        self._autocast_dtype = torch.get_autocast_dtype(device.type)
        self._precision = torch.get_float32_matmul_precision()

    def run(self) -> None:
        """Do the work, if it hasn't been done."""
        if self._work is None:
            return
        work, self._work = self._work, None
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self._precision)
        try:
            with (
                torch.set_grad_enabled(self._records),
                torch.autocast(self._device_type, self._autocast_dtype, self._autocasts),
            ):
                self._value = work()
        finally:
            torch.set_float32_matmul_precision(precision)

    def result(self) -> ResultT:
        """Return what it gave, once.

        Nothing of it is kept here: an operator keeps the exchange that it was called with, and so
        this object, until its backward pass.
        """
        self.run()
        value, self._value = self._value, None
        if value is None:
            raise RuntimeError("deferred work was asked for twice, or gave nothing")
        return value
