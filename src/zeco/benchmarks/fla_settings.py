"""Flash Linear Attention's kernels without its autotuning, which takes a minute or more an operator.

For checks, for memory, and for times of two programs that call the same kernels; a time that is to
stand for FLA wants its own default, the autotuning.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def one_setting_each() -> Generator[None]:
    """Let every autotuned kernel of FLA that runs inside take one setting, and keep it afterwards.

    Raises:
        ImportError: the package triton is missing; install zeco-sp[gpu].
    """
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    run = tuner.run

    def run_with_one(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.configs) > 1 and self.base_fn.__module__.startswith("fla."):
            self.configs = [min(self.configs, key=_plainness)]
        return run(self, *args, **kwargs)

    tuner.run = run_with_one
    try:
        yield
    finally:
        tuner.run = run


def _plainness(config: Any) -> tuple[int, int, int]:
    """Order settings by what most kernels run well with: 4 warps, 2 stages, small blocks."""
    blocks = sum(x for x in config.kwargs.values() if isinstance(x, int))
    return abs(config.num_warps - 4), abs(config.num_stages - 2), blocks
