from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from zeco.core.errors import ArgumentError, ConfigError, RankFailedError
from zeco.training.launch import World, choose_device, launch


def add_ranks(world: World, offset: int) -> tuple[int, int]:
    total = torch.tensor(world.rank + offset)
    dist.all_reduce(total)
    return world.size, int(total)


def fail_on(world: World, failing: int, how: str) -> None:
    if world.rank == failing:
        if how == "dies":
            os._exit(7)
        raise ArgumentError("q is wrong; mend it")
    dist.all_reduce(torch.zeros(1))  # would wait for ever


def test_one_rank_needs_no_group() -> None:
    assert launch(lambda world: (world.rank, dist.is_initialized()), num_ranks=1) == (0, False)


def test_ranks_form_a_group_and_rank_0_returns() -> None:
    assert launch(add_ranks, 10, num_ranks=3, device="cpu") == (3, 33)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_rank_ends_all_and_is_named(failing: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailedError, match=f"^rank {failing}: q is wrong; mend it") as caught:
        launch(fail_on, failing, "raises", num_ranks=2, device="cpu")
    assert time.monotonic() - start < 50
    assert "ArgumentError" in caught.value.__notes__[0]


@pytest.mark.timeout(60)
def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankFailedError, match="rank"):
        launch(fail_on, 1, "dies", num_ranks=2, device="cpu")


def test_number_of_ranks_under_torchrun_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="3 ranks were asked for, but torchrun started 4"):
        launch(add_ranks, 0, num_ranks=3)


def test_too_few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("auto", 1) == "cuda"
    assert choose_device("cpu", 4) == "cpu"
    with pytest.raises(ConfigError, match="each of 4 ranks a CUDA device, but this machine has 1"):
        choose_device("auto", 4)
