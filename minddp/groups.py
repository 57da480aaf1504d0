"""Which process group a wrapper works with."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def choose_group(group: Any, mesh: Any) -> Any:
    """The group of the arguments ``process_group`` and ``device_mesh``, or the default group.

    Raises:
        ValueError: there is no group; as from torch's class.
        RuntimeError: both are given, this rank is not in the group, or the mesh has several dimensions.
    """
    if group is not None and mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if not dist.is_available() or (group is None and mesh is None and not dist.is_initialized()):
        raise ValueError(
            "DistributedDataParallel needs a process group: call torch.distributed.init_process_group() "
            "on every rank first (torchrun sets what it reads), or pass process_group=."
        )
    if mesh is not None:
        group = _group_of(mesh)
    chosen: Any = group if group is not None else dist.group.WORLD
    if not isinstance(chosen, dist.ProcessGroup):
        raise RuntimeError("process_group: this rank is not a member of the group, so it cannot train in it.")
    return chosen


def _group_of(mesh: Any) -> Any:
    if not hasattr(mesh, "get_group"):
        raise TypeError(f"device_mesh must be a torch.distributed.DeviceMesh of one dimension, or None, got {mesh!r}")
    if mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
    return mesh.get_group(mesh_dim=0)
