"""Process groups of the program's own, of all ranks, over Gloo backends of their own."""

import itertools

import torch
import torch.distributed as dist

_numbers = itertools.count()


class OwnGroup(dist.ProcessGroup):
    """Of a class of the program's; ``name`` tells it from others in the default store.

    It has collectives of its own, as such classes do: torch runs those of its base class with the GIL held, for which
    Gloo's threads may wait.
    """

    def __init__(self, name: str):
        super().__init__(dist.get_rank(), dist.get_world_size())
        self._gloo = _give_gloo(self, _store(name))

    def allreduce(self, tensors, options):
        return self._gloo.allreduce(tensors, options)

    def broadcast(self, tensors, options):
        return self._gloo.broadcast(tensors, options)

    def allgather(self, outputs, inputs, options):
        return self._gloo.allgather(outputs, inputs, options)


def made_by_hand() -> dist.ProcessGroup:
    """Of torch's class, and in none of its tables."""
    store = _store(f"by hand {next(_numbers)}")
    group = dist.ProcessGroup(store, dist.get_rank(), dist.get_world_size())
    _give_gloo(group, store)
    group._set_group_desc("mine")
    return group


def _store(name: str) -> dist.Store:
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


def _give_gloo(group: dist.ProcessGroup, store: dist.Store) -> dist.ProcessGroupGloo:
    gloo = dist.ProcessGroup.BackendType.GLOO
    backend = dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size())
    group._register_backend(torch.device("cpu"), gloo, backend)
    group._set_default_backend(gloo)
    return backend
