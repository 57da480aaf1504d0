"""What is destroyed first: a reducer that dropped a Gloo group's last reference under the GIL could hang."""

from __future__ import annotations

import gc
import weakref

import torch
import torch.distributed as dist

import minddp
from minddp.testing import run_ranks


def order_of_ends(rank: int, world_size: int) -> list[str]:
    ends: list[str] = []
    group = dist.new_group()
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(3, 3), process_group=group)
    ddp(torch.ones(2, 3)).sum().backward()
    weakref.finalize(ddp.reducer, ends.append, "reducer")
    weakref.finalize(group, ends.append, "group")
    dist.destroy_process_group(group)
    del group, ddp
    gc.collect()
    return ends


def test_the_group_goes_after_the_reducer() -> None:
    assert run_ranks(order_of_ends, 2) == [["reducer", "group"]] * 2
