"""A user's script: ZeroRedundancyOptimizer after backward, and beside DDP inside join."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def make() -> DDP:
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)))


def loss_of(ddp: DDP, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    inputs = torch.randn(4, 8, generator=generator)
    return nn.functional.mse_loss(ddp(inputs), inputs[:, :2] ** 2)


def weights(ddp: DDP) -> list[float]:
    return torch.cat([value.detach().flatten() for value in ddp.parameters()]).tolist()


def plain() -> list[float]:
    ddp = make()
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=1e-2)
    for step in range(5):
        zero.zero_grad()
        loss_of(ddp, step).backward()
        zero.step()
    return weights(ddp)


def uneven() -> list[float]:
    """Rank 0 has three batches, the others five."""
    ddp = make()
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=1e-2)
    with Join([ddp, zero], divide_by_initial_world_size=False):
        for step in range(3 if dist.get_rank() == 0 else 5):
            zero.zero_grad()
            loss_of(ddp, step).backward()
            zero.step()
    return weights(ddp)


def main(out: str) -> None:
    dist.init_process_group("gloo")
    report = {
        "class": f"{DDP.__module__}.{DDP.__name__}",
        "plain": plain(),
        "uneven": uneven(),
    }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
