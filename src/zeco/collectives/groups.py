"""From what a user has (a mesh, a process group, nothing) to this rank's end of it."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeco.collectives.process_group import ProcessGroupTransport
from zeco.collectives.single import SingleTransport
from zeco.collectives.transport import Transport
from zeco.core.errors import ArgumentError, GroupError

Group = dist.ProcessGroup | DeviceMesh | Transport | int | None
"""What is taken for a group of ranks: None is the default group, or one rank without it. An int is
what `torch.distributed.new_group` returns to a process that isn't in the new group; it is refused."""

_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroupTransport] = (
    weakref.WeakKeyDictionary()
)


def transport_of(group: Group) -> Transport:
    """Return this rank's end of a group; the same object for the same group.

    Args:
        group: a process group, a 1-D device mesh, one of `zeco.testing`'s in-process ranks, or None
            for the default group (one rank where torch.distributed isn't initialised).

    Raises:
        ArgumentError: something else, or a mesh of several dims.
        GroupError: this process isn't in the group.
    """
    if isinstance(group, Transport):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ArgumentError(
                f"the mesh has dims {group.mesh_dim_names}; give one of them, as mesh['sp']"
            )
        group = group.get_group()
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return SingleTransport()
        group = dist.group.WORLD
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError(
            "this process isn't in the given group; call this only on the group's members"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            f"group is a {type(group).__name__}, but must be a ProcessGroup, a 1-D DeviceMesh, an "
            "in-process rank or None"
        )
    if group not in _transports:
        _transports[group] = ProcessGroupTransport(group)
    return _transports[group]
