"""A user's script: torch's distributed checkpoint, saved by so many ranks and loaded by as many others."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel


def make(seed: int):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))
    ddp = DistributedDataParallel(model)
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-2, eps=1e-3)


def train(ddp, optimizer, steps: int) -> list[float]:
    """All ranks see the same batches, so that the number of ranks does not change the result."""
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 + step)
        inputs = torch.randn(10, 6, generator=generator)
        loss = nn.functional.cross_entropy(ddp(inputs), inputs.argmax(1) % 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(phase: str, folder: str, out: str) -> None:
    dist.init_process_group("gloo")
    ddp, optimizer = make(seed=0 if phase == "save" else 7 + dist.get_rank())
    if phase == "save":
        train(ddp, optimizer, steps=4)
    model_state, optimizer_state = get_state_dict(ddp, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    keys = sorted(model_state)
    if phase == "save":
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(ddp, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = train(ddp, optimizer, steps=3)
    report = {
        "class": f"{type(ddp).__module__}.{type(ddp).__name__}",
        "keys": keys,
        "world_size": dist.get_world_size(),
        "losses": losses,
        "weights": torch.cat([value.float().flatten() for value in ddp.module.state_dict().values()]).tolist(),
    }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
