"""A user's script: Lightning Fabric's DDPStrategy, accumulating, with clipping, saved and loaded on the way."""

import json
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, inputs):
        return self.used(inputs)


def main(out: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(find_unused_parameters=True))
    fabric.launch()
    torch.manual_seed(fabric.global_rank)
    model = Partly()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = fabric.setup(model, optimizer)
    losses, path = [], str(Path(out).with_suffix(".ckpt"))
    for step in range(12):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + fabric.global_rank))
        accumulating = step % 3 != 2
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
            fabric.backward(loss)
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        if step == 5:
            fabric.save(path, {"model": model, "optimizer": optimizer})
            fabric.load(path, {"model": model, "optimizer": optimizer})
    wrapped = model._forward_module
    report = {
        "class": f"{type(wrapped).__module__}.{type(wrapped).__name__}",
        "losses": losses,
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
    }
    if fabric.global_rank == 0:
        Path(out).write_text(json.dumps(report))
    fabric.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
