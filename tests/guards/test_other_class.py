"""Ranks that construct torch's class, where others construct minddp's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from tests.on_ranks import on_ranks


@on_ranks(3)
def test_a_group_with_both_classes_is_refused_on_all_ranks(rank, world_size):
    for torchs in ([1], [0, 2]):
        if rank in torchs:
            with pytest.raises(RuntimeError, match="expects same model across all ranks"):
                TorchDDP(torch.nn.Linear(4, 2))
        else:
            named = f"rank 1 constructed torch's class, rank {rank}" if len(torchs) == 1 else "ranks 0, 2 constructed"
            with pytest.raises(RuntimeError, match=f"{named}.*docs/launching.md"):
                minddp.DistributedDataParallel(torch.nn.Linear(4, 2))
    for cls in (TorchDDP, minddp.DistributedDataParallel):  # the group is whole
        cls(torch.nn.Linear(4, 2))(torch.ones(1, 4)).sum().backward()
