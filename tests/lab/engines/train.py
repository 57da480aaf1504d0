"""A user's script, the same under every engine: it knows torch.distributed's variables and nothing else.

Rank 0 saves ``checkpoint.pt`` each step, in the working directory; a run resumes from it, and leaves its final
weights in ``report.json``. A step's batch is the same however many ranks share it: runs of 2 and of 4 ranks compare.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 20, 8


def save(path: Path, state: dict) -> None:
    """Whole or absent, whenever the process ends."""
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def train(folder: Path, wrap=DistributedDataParallel) -> None:
    """Inside an initialized default group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # the wrapper makes the replicas alike
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    ddp = wrap(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    began = 0
    if (folder / "checkpoint.pt").exists():
        state = torch.load(folder / "checkpoint.pt")
        began = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(began, STEPS):
        inputs = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), inputs.argmax(1) % 4).backward()
        optimizer.step()
        if rank == 0:
            state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(folder / "checkpoint.pt", state)
        dist.barrier()
        time.sleep(float(os.environ.get("SECONDS_A_STEP", "0")))
    if rank == 0:
        report = {
            "class": f"{type(ddp).__module__}.{type(ddp).__qualname__}",
            "backend": dist.get_backend(),
            "ranks": ranks,
            "began": began,
            "weights": torch.cat([value.flatten() for value in model.state_dict().values()]).tolist(),
        }
        (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Path.cwd())
    dist.destroy_process_group()
