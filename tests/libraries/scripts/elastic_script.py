"""A user's script: a rank is killed in mid-training; torchrun starts all again, from the last checkpoint."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, SAVE_EVERY, KILLED_AT = 12, 4, 6


def save(path: Path, step: int, ddp, optimizer) -> None:
    """Rank 0 writes; the rename makes the file whole or absent."""
    if dist.get_rank() == 0:
        torch.save(
            {"step": step, "model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()},
            path.with_suffix(".part"),
        )
        path.with_suffix(".part").rename(path)
    dist.barrier()


def load(path: Path, model, optimizer) -> int:
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def main(checkpoint: str, killed: str, out: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    began = load(Path(checkpoint), model, optimizer)
    ddp = DistributedDataParallel(model)
    first_try = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for step in range(began, STEPS):
        if killed == "killed" and first_try and step == KILLED_AT and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(4, 8, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), inputs.argmax(1) % 4).backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            save(Path(checkpoint), step + 1, ddp, optimizer)
    report = {
        "class": f"{type(ddp).__module__}.{type(ddp).__name__}",
        "began": began,
        "weights": torch.cat([value.flatten() for value in ddp.module.state_dict().values()]).tolist(),
    }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
