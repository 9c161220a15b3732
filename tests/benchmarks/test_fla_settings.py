"""FLA's kernels take one setting or have all compiled first; others are left alone."""

from __future__ import annotations

import pytest

from zeco.benchmarks.fla_settings import compiled_side_by_side, one_setting_each

triton = pytest.importorskip("triton")


class Kernel:
    """Stands for a kernel under an autotuner; notes the settings that it runs with."""

    arg_names = ("x",)

    def __init__(self, module):
        self.ran = []

        def function(x):
            pass

        function.__module__ = module
        self.fn = function

    def run(self, *args, **settings):
        self.ran.append(settings["num_warps"])

    def warmup(self, *args, grid, **settings):
        self.ran.append(("compiled", *args, grid, settings["num_warps"]))


def tuned(module):
    timed = []
    kernel = Kernel(module)

    def do_bench(run, quantiles):
        run()
        timed.append(run)
        return [float(len(timed))] * 3

    configs = [triton.Config({"BLOCK": size}, num_warps=size // 16) for size in (32, 64, 128)]
    tuner = triton.runtime.autotuner.Autotuner(
        kernel, ("x",), configs, ["x"], None, None, do_bench=do_bench
    )
    return tuner, kernel, timed


def test_a_kernel_of_fla_is_not_timed():
    tuner, kernel, timed = tuned("fla.ops.some.chunk")
    with one_setting_each():
        tuner.run(1)
    tuner.run(2)
    assert kernel.ran == [4, 4]
    assert timed == []


def test_other_kernels_are_tuned_as_ever():
    tuner, kernel, timed = tuned("somebody.kernels")
    with one_setting_each():
        tuner.run(1)
    assert len(timed) == 3
    assert kernel.ran[-1] == 2


def test_tuning_is_on_again_afterwards():
    with one_setting_each():
        pass
    tuner, _, timed = tuned("fla.ops.some.chunk")
    tuner.run(1)
    assert len(timed) == 3


def test_all_settings_are_compiled_before_the_first_is_timed():
    tuner, kernel, timed = tuned("fla.ops.some.chunk")
    with compiled_side_by_side():
        tuner.run(1, grid="the grid", warmup=False)
        tuner.run(1, grid="the grid", warmup=False)
    compiled = [("compiled", 1, "the grid", warps) for warps in (2, 4, 8)]
    assert kernel.ran == [*compiled, 2, 4, 8, 2, 2]
    assert len(timed) == 3


def test_other_kernels_are_compiled_as_ever():
    tuner, kernel, _ = tuned("somebody.kernels")
    with compiled_side_by_side():
        tuner.run(1)
    assert kernel.ran == [2, 4, 8, 2]
    assert triton.runtime.autotuner.Autotuner.prune_configs.__name__ == "prune_configs"
