"""A rank that fails in its backward: the others, which wait for it, learn why before any timeout."""

import gc
import re
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import minddp
from minddp import DistributedDataParallel
from minddp.guards import times, watchdog
from tests.on_ranks import on_own_ranks


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.encoder = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, skip):
        return self.used(x) if skip else self.encoder(self.used(x))


def _unused_on_one_rank(rank, world_size):
    ddp = DistributedDataParallel(Two())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x = torch.randn(2, 4)
    ddp(x, False).sum().backward()
    optimizer.step()
    if rank == 1:
        ddp(x, True).sum().backward()
        with pytest.raises(RuntimeError, match="encoder.weight, encoder.bias"):
            optimizer.step()
    else:
        with pytest.raises(RuntimeError, match="(?s)rank 1 will not take part.*encoder.weight, encoder.bias"):
            ddp(x, False).sum().backward()


def _hook_raises_on_one_rank(rank, world_size):
    ddp = DistributedDataParallel(Two())

    def hook(state, bucket):
        if rank == 0:
            raise KeyError("lost its state")
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, hook)
    expected = (
        pytest.raises(KeyError, match="lost its state")
        if rank == 0
        else pytest.raises(RuntimeError, match="rank 0 will not take part.*KeyError.*lost its state")
    )
    with expected:
        ddp(torch.randn(2, 4), False).sum().backward()


@pytest.mark.parametrize("program", [_unused_on_one_rank, _hook_raises_on_one_rank])
def test_why_a_rank_fails_reaches_its_peers(program):
    on_own_ranks(program)


def _lost_before_a_forward(rank, world_size):
    """Rank 0 waits for nothing: what it hears, it hears at a forward. So it is where backward waits for nobody."""
    ddp = DistributedDataParallel(Two())
    x = torch.randn(2, 4)
    for _ in range(2):  # the second forward has a collective, the new buckets
        ddp(x, False).sum().backward()
    store = dist.distributed_c10d._get_default_store()
    ddp._minddp_observers.get("guards").watch.has_streams = True
    ddp.register_comm_hook(None, _waits_for_nobody)
    ddp._minddp_observers.get("guards").watch.hook = ""
    if rank == 1:
        with pytest.raises(ValueError, match="no more data"):
            out = ddp(x, False)
            ddp.module.used.weight.register_hook(_no_more_data)
            out.sum().backward()
        store.wait(["heard"])
        return ""
    deadline = time.monotonic() + 250
    while time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            ddp(x, False).sum().backward()
        except RuntimeError as error:
            store.set("heard", "")
            return str(error)
    return "nothing"


def _waits_for_nobody(state, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _no_more_data(_):
    raise ValueError("no more data")


def test_a_forward_hears_of_lost_peers():
    """On a device with streams a collective is over for the host when it is enqueued: nobody waits in backward."""
    heard = on_own_ranks(_lost_before_a_forward)[0]
    words = "says: an exception ended its backward"
    assert re.search(rf"(?i)rank 1 will not take part in the reduction of iteration \d+\. rank 1 .*{words}", heard)


def _given_up_alike(rank, world_size):
    """An exception that all ranks have met, and told: what came before is over, also for a reducer that is new."""
    with times.faster(0.05):
        ddp = DistributedDataParallel(Two())
        x = torch.randn(2, 4)
        for _ in range(2):
            ddp(x, False).sum().backward()
        dog = watchdog.current(dist.group.WORLD)
        watch = ddp._minddp_observers.get("guards").watch
        watch.has_streams = True
        handle = ddp.module.used.weight.register_hook(_no_more_data)
        with pytest.raises(ValueError, match="no more data"):
            ddp(x, False).sum().backward()
        handle.remove()
        deadline = time.monotonic() + 30
        while dog.told_of(f"{watch.key} backward") != [3] and time.monotonic() < deadline:
            time.sleep(0.05)
        dist.barrier()  # both have told, and have heard
        minddp.abort_iteration(ddp)
        ddp.zero_grad()
        dist.barrier()
        for remake in (False, True):
            if remake:
                minddp.refresh(ddp)
                ddp._minddp_observers.get("guards").watch.has_streams = True
            for _ in range(3):
                out = ddp(x, False)
                out.sum().backward()
                time.sleep(0.1)
        watch = ddp._minddp_observers.get("guards").watch
        key, begun = watch.key, watch.begun()
        del ddp, watch, out
        gc.collect()
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "list_keys") and any("/notices/" in name for name in store.list_keys()):
            assert time.monotonic() < deadline + 30  # nothing of it stays in the store
            time.sleep(0.05)
        place = dog.places()[key]  # of a wrapper that is gone: how far this rank came
        assert (place.begun, place.done) == (begun, begun)


def test_what_all_ranks_gave_up_alike_is_over():
    on_own_ranks(_given_up_alike)
