"""A user's script: a torchmetrics metric in the wrapped module; torch's AveragedModel and ema-pytorch's EMA of it."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ema_pytorch import EMA
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchmetrics.classification import MulticlassAccuracy


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
        self.accuracy = MulticlassAccuracy(num_classes=4)

    def forward(self, inputs, targets):
        scores = self.net(inputs)
        self.accuracy.update(scores, targets)
        return nn.functional.cross_entropy(scores, targets)


def main(out: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2, momentum=0.9)
    averaged = AveragedModel(ddp, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)
    ema = EMA(ddp.module.net, beta=0.9, update_after_step=2, update_every=1)
    losses = []
    for step in range(10):
        inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        loss = ddp(inputs, inputs[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        averaged.update_parameters(ddp)
        ema.update()
        losses.append(loss.item())
    score = ddp.module.accuracy.compute().item()  # over both ranks' batches
    held = [ddp.module.net, averaged.module.module.net, ema.ema_model]
    report = {
        "class": f"{type(ddp).__module__}.{type(ddp).__name__}",
        "losses": losses,
        "weights": [*torch.cat([p.detach().flatten() for net in held for p in net.parameters()]).tolist(), score],
    }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
