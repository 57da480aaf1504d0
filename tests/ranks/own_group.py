"""A process group of the program's own class."""

import torch
import torch.distributed as dist


class OwnGroup(dist.ProcessGroup):
    """All ranks, over a Gloo backend of its own; ``name`` tells it from others in the default store."""

    def __init__(self, name: str):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        super().__init__(rank, world_size)
        gloo = dist.ProcessGroup.BackendType.GLOO
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._register_backend(torch.device("cpu"), gloo, dist.ProcessGroupGloo(store, rank, world_size))
        self._set_default_backend(gloo)
