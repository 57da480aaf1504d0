"""A user's script: ZeroRedundancyOptimizer that steps inside of backward, by torch's communication hook for that.

torch refuses that over Gloo, so the ranks share memory.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import minddp.shm  # noqa: F401


def weights(make_hook) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())])
    ddp = DDP(net, bucket_cap_mb=0.005, gradient_as_bucket_view=True)  # some buckets
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), optimizer_class=torch.optim.SGD, overlap_with_ddp=True, lr=0.05, momentum=0.9
    )
    ddp.register_comm_hook(None, make_hook(allreduce_hook, ddp, zero))
    for step in range(8):
        inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        ddp.zero_grad()
        ddp(inputs).square().mean().backward()  # steps, from the third on
    # With the interleaved hook a rank has the others' weights only with the next forward.
    ddp(torch.zeros(1, 32))
    return torch.cat([p.detach().flatten() for p in ddp.parameters()]).tolist()


def main(out: str) -> None:
    dist.init_process_group("shm")
    report = {
        "class": f"{DDP.__module__}.{DDP.__name__}",
        "losses": weights(hook_with_zero_step),
        "weights": weights(hook_with_zero_step_interleaved),
    }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
