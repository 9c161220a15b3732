"""How the kernels of Flash Linear Attention and mamba-ssm come to settings while they are measured.

Their autotuning compiles dozens of settings of each kernel, one after the other, and then times them:
a minute and more an operator. Most of that is compiling, which threads do side by side; the choice
stays their own. Checks, and times of two programs that call the same kernels, do without the choice.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from zeco.benchmarks.record import usable_cores

# The compiler holds Python's lock for a part of the time: more threads gain nothing.
_MOST_THREADS = 16


@contextmanager
def one_setting_each() -> Generator[None]:
    """Let every autotuned kernel of FLA that runs inside take one setting, and keep it afterwards.

    Raises:
        ImportError: the package triton is missing; install zeco-sp[gpu].
    """
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    run = tuner.run

    def run_with_one(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.configs) > 1 and _is_of(self, "fla"):
            self.configs = [min(self.configs, key=_plainness)]
        return run(self, *args, **kwargs)

    tuner.run = run_with_one
    try:
        yield
    finally:
        tuner.run = run


@contextmanager
def compiled_side_by_side() -> Generator[None]:
    """Compile all settings of a peer's autotuned kernels by threads before its autotuning times them.

    Nothing happens where Triton is missing, or too old to do it: then they are compiled in turn.
    """
    try:
        tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
        compiling = importlib.import_module("triton.runtime._async_compile").AsyncCompileMode
    except ImportError:
        yield
        return
    prune = tuner.prune_configs

    def prune_and_compile(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        configs = prune(self, kwargs)
        if _is_of(self, "fla", "mamba_ssm"):
            given = {name: x for name, x in kwargs.items() if name != "warmup"}
            # What doesn't compile says so again when its turn comes, and is left out there.
            with compiling(pool, ignore_errors=True):
                for config in configs:
                    self.fn.warmup(*self.nargs.values(), **given, **config.all_kwargs())
        return configs

    with ThreadPoolExecutor(min(_MOST_THREADS, usable_cores())) as pool:
        tuner.prune_configs = prune_and_compile
        try:
            yield
        finally:
            tuner.prune_configs = prune


def _is_of(tuner: Any, *packages: str) -> bool:
    return tuner.base_fn.__module__.partition(".")[0] in packages


def _plainness(config: Any) -> tuple[int, int, int]:
    """Order settings by what most kernels run well with: 4 warps, 2 stages, small blocks."""
    blocks = sum(x for x in config.kwargs.values() if isinstance(x, int))
    return abs(config.num_warps - 4), abs(config.num_stages - 2), blocks
