"""The ranks as a grid: replicas (``dp``) times parts of the sequence (``sp``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeco.core.errors import ConfigError
from zeco.sequence_parallel import SequenceParallel
from zeco.training.config import ParallelConfig
from zeco.training.launch import World


@dataclass(frozen=True, eq=False)
class Mesh:
    """Where this rank stands.

    Attributes:
        data_rank: which replica it belongs to.
        num_data: replicas.
        sp: the ranks that share its sequences.
        devices: the DeviceMesh with axes "dp" and "sp", or None for a single rank.
    """

    data_rank: int
    num_data: int
    sp: SequenceParallel
    devices: DeviceMesh | None


def count_ranks(config: ParallelConfig, world_size: int | None) -> tuple[int, int]:
    """Return (replicas, ranks a sequence).

    Args:
        config: the wish.
        world_size: ranks there are; None when as many are started as the config wants.

    Raises:
        ConfigError: the ranks can't be divided so.

    >>> count_ranks(ParallelConfig(data_ranks=2), 8)
    (2, 4)
    """
    replicas, shards = config.data_ranks, config.sequence_ranks
    if world_size is None:
        return replicas, shards or 1
    if shards is None:
        if world_size % replicas:
            raise ConfigError(
                f"parallel.data_ranks = {replicas} doesn't divide {world_size} ranks; change either"
            )
        return replicas, world_size // replicas
    if replicas * shards != world_size:
        raise ConfigError(
            f"parallel.data_ranks = {replicas} times parallel.sequence_ranks = {shards} is "
            f"{replicas * shards}, but there are {world_size} ranks; change either, "
            "or leave sequence_ranks out"
        )
    return replicas, shards


def make_mesh(config: ParallelConfig, world: World) -> Mesh:
    """Lay out the ranks of a run; those of a sequence are neighbours.

    Args:
        config: numbers of ranks, method and scan.
        world: this process; with more than one rank, the default process group must exist.
    """
    replicas, shards = count_ranks(config, world.size)
    if not dist.is_initialized():
        return Mesh(0, 1, _context(None, config), None)
    devices = init_device_mesh(world.device.type, (replicas, shards), mesh_dim_names=("dp", "sp"))
    sp = _context(devices["sp"], config)
    return Mesh(devices.get_local_rank("dp"), replicas, sp, devices)


def _context(group: DeviceMesh | None, config: ParallelConfig) -> SequenceParallel:
    return SequenceParallel(
        group,
        method=config.method,
        algorithm=config.algorithm,
        num_blocks=config.num_blocks,
    )
