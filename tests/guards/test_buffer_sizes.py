"""Ranks that differ: by now in the sizes of their buffers, which may change; in their class."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp.guards import times
from minddp.testing import RankError, run_ranks, shutdown
from tests.on_ranks import on_ranks


class _Masked(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("mask", torch.ones(2, 2).tril(), persistent=False)

    def forward(self, n, shape=None):
        if len(self.mask) < n or shape:
            self.register_buffer("mask", torch.ones(shape or (n, n)).tril(), persistent=False)
        return self.layer(torch.ones(n, 2)) * self.mask.sum() * self.scale


@times.faster(0.2)
def _grows(rank, world_size, lengths):
    ddp = minddp.DistributedDataParallel(_Masked())
    for n in (1, lengths[rank], 1):
        ddp(n).sum().backward()


@pytest.mark.parametrize("lengths", [(3, 6), (1, 6), (6, 1, 1)])
def test_every_rank_learns_which_buffer_differs(lengths):
    try:
        with pytest.raises(RankError) as raised:
            run_ranks(_grows, len(lengths), lengths)
    finally:
        shutdown()
    texts = raised.value.failures
    assert len(texts) == len(lengths)
    shapes = [str([max(n, 2)] * 2) for n in lengths]
    for text in texts.values():
        assert "'mask' is [" in text and all(shape in text for shape in shapes[:2]), text


@on_ranks(2)
def test_buffers_that_change_alike_or_are_nobody_elses_go_on(rank, world_size):
    def train(*sizes, shapes=(None,) * 9, **args):
        ddp = minddp.DistributedDataParallel(_Masked(), **args)
        for n, shape in zip(sizes, shapes):
            ddp(n, shape).sum().backward()
        return ddp.module.mask

    assert len(train(1, 4, 9, 1)) == 9
    assert len(train(1, 4 + rank, 9, 1, forward_sync_buffers=False)) == 9
    reshaped = train(1, 1, 1, shapes=[None, (2, 3) if rank else (3, 2), None])  # torch copies as many bytes
    assert reshaped.shape == ((2, 3) if rank else (3, 2))
    ddp = minddp.DistributedDataParallel(_Masked())
    with ddp.no_sync():
        for n in (4 + rank, 9):  # alike again before the next copy
            ddp(n).sum().backward()
    for _ in range(2):
        ddp(1).sum().backward()


# ---- ranks that construct torch's class, where others construct minddp's


@on_ranks(3)
def test_a_group_with_both_classes_is_refused_on_all_ranks(rank, world_size):
    for torchs in ([1], [0, 2]):
        if rank in torchs:
            with pytest.raises(RuntimeError, match="expects same model across all ranks"):
                TorchDDP(nn.Linear(4, 2))
        else:
            named = f"rank 1 constructed torch's class, rank {rank}" if len(torchs) == 1 else "ranks 0, 2 constructed"
            with pytest.raises(RuntimeError, match=f"{named}.*docs/launching.md"):
                minddp.DistributedDataParallel(nn.Linear(4, 2))
    for cls in (TorchDDP, minddp.DistributedDataParallel):  # the group is whole
        cls(nn.Linear(4, 2))(torch.ones(1, 4)).sum().backward()
