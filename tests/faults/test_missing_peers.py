"""A rank that fails in its backward: the others, which wait for it, learn why within seconds."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from minddp.testing import RankPool


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.encoder = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, skip):
        return self.used(x) if skip else self.encoder(self.used(x))


def _unused_on_one_rank(rank, world_size):
    from minddp import DistributedDataParallel

    ddp = DistributedDataParallel(Two())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x = torch.randn(2, 4)
    ddp(x, False).sum().backward()
    optimizer.step()
    begin = time.monotonic()
    if rank == 1:
        ddp(x, True).sum().backward()
        with pytest.raises(RuntimeError, match="encoder.weight, encoder.bias"):
            optimizer.step()
    else:
        with pytest.raises(RuntimeError, match="(?s)rank 1 will not take part.*encoder.weight, encoder.bias"):
            ddp(x, False).sum().backward()
    return time.monotonic() - begin


def _hook_raises_on_one_rank(rank, world_size):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from minddp import DistributedDataParallel

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


def _slow_peer(rank, world_size):
    import warnings

    from minddp import DistributedDataParallel
    from minddp.guards import stall_inspector

    stall_inspector.WARN_SECONDS = 2
    ddp = DistributedDataParallel(Two())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 1:
            time.sleep(4)
        ddp(torch.ones(2, 4), False).sum().backward()
    grad = ddp.module.used.weight.grad.clone()
    dist.broadcast(grad, 0)
    assert torch.equal(grad, ddp.module.used.weight.grad)
    return [str(w.message) for w in caught if "has waited" in str(w.message)]


def _run(fn):
    """On ranks of their own: a collective that never ends stays behind in their process group."""
    pool = RankPool(2)
    try:
        return pool.run(fn, timeout=60)
    finally:
        pool.close()


def test_an_unused_parameter_on_one_rank_reaches_its_peers():
    assert max(_run(_unused_on_one_rank)) < 30


def test_a_hook_that_raises_reaches_its_peers():
    _run(_hook_raises_on_one_rank)


def test_a_slow_peer_is_named_and_waited_for():
    waited, slow = _run(_slow_peer)
    assert len(waited) == 1 and "Ranks [1] have not reported waiting" in waited[0]
    assert slow == []
