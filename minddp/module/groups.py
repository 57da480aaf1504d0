"""Which process group a wrapper works with."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

_LOST = (
    "DistributedDataParallel over one dimension of a mesh: {count} parameters are parallelized over another "
    "({first}, ...). They train, but from the first forward on they are missing from parameters() and state_dict(), "
    "as with torch's class: make the optimizer before that, clip and save them through the submodules' attributes (DTensors)."
)


def choose_group(group: Any, mesh: Any, module: torch.nn.Module) -> Any:
    """The group of the arguments ``process_group`` and ``device_mesh``, or the default group.

    Raises:
        RuntimeError: both are given, there is no group, this rank is not in it, or the mesh has several dimensions.
    """
    if group is not None and mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if not dist.is_available() or (group is None and mesh is None and not dist.is_initialized()):
        raise RuntimeError(
            "DistributedDataParallel needs a process group: call torch.distributed.init_process_group() "
            "on every rank first (torchrun sets what it reads), or pass process_group=."
        )
    if mesh is not None:
        group = _group_of(mesh, module)
    chosen: Any = group if group is not None else dist.group.WORLD
    if not isinstance(chosen, dist.ProcessGroup):
        raise RuntimeError("process_group: this rank is not a member of the group, so it cannot train in it.")
    return chosen


def _group_of(mesh: Any, module: torch.nn.Module) -> Any:
    if mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
    if mesh._get_root_mesh() != mesh:  # one dimension of several: the others may shard the module
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        sharded = [name for name, p in module.named_parameters() if isinstance(p, DTensor)]
        if sharded:
            warnings.warn(_LOST.format(count=len(sharded), first=sharded[0]), RuntimeWarning, stacklevel=4)
        _pre_dp_module_transform(module)
    return mesh.get_group(mesh_dim=0)
